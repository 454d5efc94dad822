from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from equipoise.dht.address import (
    EXAMPLE,
    LISTEN_EXAMPLE,
    Address,
    AddressError,
    ListenAddress,
    parse_address,
    parse_listen,
)
from equipoise.dht.identity import public_key_of

PEER = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (EXAMPLE, "192.0.2.7", 31337),
        (f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}", "2001:db8::1", 1),
        (f"/dns4/seed.example.org/tcp/65535/p2p/{PEER}", "seed.example.org", 65535),
    ],
)
def test_good_addresses(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert (address.text, address.host, address.port, address.relayed) == (text, host, port, False)
    assert (address.peer, address.first) == (text.rpartition("/")[2],) * 2


def test_through_a_relay() -> None:
    relay = EXAMPLE.rpartition("/")[2]
    address = parse_address(f"{EXAMPLE}/p2p-circuit/p2p/{PEER}")
    assert address.relayed
    assert address.peer == PEER
    assert (address.first, address.host) == (relay, "192.0.2.7")


def test_binary_form() -> None:
    # From go-multiaddr: ip4 4, tcp 6, dns4 54, p2p 421 and p2p-circuit 290 as varints, values length-prefixed.
    assert parse_address(EXAMPLE).encode_transport().hex() == "04c0000207067a69"
    relayed = parse_address(f"/dns4/a.org/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}").encode_transport()
    public = public_key_of(PEER).hex()
    assert relayed.hex() == f"3605{b'a.org'.hex()}060001a50326002408011220{public}a202"
    long = "a." * 100 + "a"
    encoded = parse_address(f"/dns/{long}/tcp/1/p2p/{PEER}").encode_transport()
    assert encoded == b"\x35\xc9\x01" + long.encode() + b"\x06\x00\x01"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("127.0.0.1:80", "start with /"),
        ("/ip4/127.0.0.1", "expected /ip4/ADDRESS/tcp/PORT"),
        (f"/ip4/127.0.0.300/tcp/1/p2p/{PEER}", "expected an IPv4 address"),
        (f"/ip6/127.0.0.1/tcp/1/p2p/{PEER}", "expected an IPv6 address"),
        (f"/ip6/fe80::1%eth0/tcp/1/p2p/{PEER}", "expected an IPv6 address without a zone"),
        (f"/dns4/-bad-/tcp/1/p2p/{PEER}", "expected a host name"),
        (f"/ip4/127.0.0.1/udp/1/p2p/{PEER}", "/tcp"),
        (f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}", "TCP port"),
        (f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}", "port 0"),
        ("/ip4/127.0.0.1/tcp/1", "/p2p/PEERID"),
        ("/ip4/127.0.0.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "Ed25519 PeerID"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}/ws", "/p2p/PEERID"),
        (f"/unix/tmp/x/tcp/1/p2p/{PEER}", "first"),
        ("/" + "x/" * 1000, "at most 512"),
    ],
)
def test_malformed_addresses(text: str, problem: str) -> None:
    with pytest.raises(AddressError, match="malformed address") as caught:
        parse_address(text)
    assert problem in str(caught.value)
    assert EXAMPLE in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("parse", [parse_address, parse_listen])
@given(st.text())
@example(EXAMPLE)
@example("/ip4/0.0.0.0/tcp/0")  # Hypothesis draws the literals of our own code too, and some are addresses.
def test_any_text_is_an_address_or_refused_in_one_clear_line(
    parse: Callable[[str], Address | ListenAddress], text: str
) -> None:
    address, error = parsed(parse, text)
    if address:
        assert f"/{address.host}/tcp/{address.port}" in text
    else:
        assert error.isprintable()


def parsed(
    parse: Callable[[str], Address | ListenAddress], text: str
) -> tuple[Address | ListenAddress | None, str]:
    try:
        return parse(text), ""
    except AddressError as error:
        return None, str(error)


def test_listen_addresses() -> None:
    assert parse_listen(LISTEN_EXAMPLE).port == 31337
    assert parse_listen("/ip6/::/tcp/0").host == "::"
    for text in ("/dns4/localhost/tcp/1", EXAMPLE, "/ip4/0.0.0.0/tcp/x"):
        with pytest.raises(AddressError, match="for example /ip4/0"):
            parse_listen(text)
