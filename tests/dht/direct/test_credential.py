"""Credentials: what is well-formed is taken, and nothing else, whatever bytes come."""

from __future__ import annotations

import msgspec
import pytest

from equipoise.dht.direct.credential import MAX_ADDRESSES, issue, parse
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.listener import endpoints
from equipoise.limits import MAX_CREDENTIAL_BYTES

PLACES = (("192.0.2.1", 4000), ("2001:db8::1", 4001))


def test_an_issued_credential_is_taken() -> None:
    assert parse(issue(PLACES)) == PLACES
    assert len(issue(PLACES)) < 50


def test_a_peer_that_listens_nowhere_has_a_credential() -> None:
    assert issue(()) == b"\x90"
    assert parse(issue(())) == ()


def test_addresses_that_do_not_fit_or_cannot_be_dialled_are_left_out() -> None:
    long = tuple((f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 50}.host{number}", 65535) for number in range(4))
    data = issue([("fe80::1%eth0", 1), *long])
    assert len(data) <= MAX_CREDENTIAL_BYTES
    assert parse(data) == long[: len(parse(data))]
    many = issue([(f"192.0.2.{number}", 1) for number in range(20)])
    assert len(parse(many)) == MAX_ADDRESSES


@pytest.mark.parametrize(
    "told",
    [
        ["192.0.2.1 0"],
        ["192.0.2.1 65536"],
        ["192.0.2.1 \u0661"],
        ["192.0.2.1"],
        ["a b 1"],
        [" 1"],
        ["x" * 300 + " 1"],
        ["192.0.2.1 1"] * 5,
        [7],
        "192.0.2.1 1",
        None,
    ],
)
def test_nonsense_is_refused(told) -> None:
    with pytest.raises(Refused) as caught:
        parse(msgspec.msgpack.encode(told))
    assert caught.value.why == "malformed credential"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "bound", "forwarded", "found"),
    [
        (["10.0.0.2", "127.0.0.1"], [("0.0.0.0", 7)], False, [("10.0.0.2", 7)]),
        (["127.0.0.1"], [("0.0.0.0", 7)], False, [("127.0.0.1", 7)]),
        ([], [("127.0.0.1", 7)], False, [("127.0.0.1", 7)]),
        (["10.0.0.2"], [("10.0.0.3", 7)], False, [("10.0.0.3", 7)]),
        (["192.0.2.1"], [("10.0.0.3", 7)], True, [("192.0.2.1", 7), ("10.0.0.3", 7)]),
        (["home.example"], [("0.0.0.0", 7)], False, [("home.example", 7)]),
        (
            ["10.0.0.2", "2001:db8::2"],
            [("0.0.0.0", 7), ("::", 8)],
            False,
            [("10.0.0.2", 7), ("2001:db8::2", 8)],
        ),
        (["fe80::1", "169.254.3.4"], [("0.0.0.0", 7), ("::", 8)], False, []),
        (["10.0.0.2"], [], False, []),
    ],
)
def test_a_listener_names_the_places_where_it_is_reached(hosts, bound, forwarded, found) -> None:
    assert endpoints(hosts, bound, forwarded=forwarded) == found
