"""Credentials: what is genuine is taken, and nothing else, whatever bytes come."""

from __future__ import annotations

import contextlib
import random
import time

import msgspec
import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.dht.direct import credential
from equipoise.dht.direct.credential import MAX_CREDENTIAL_BYTES, Presence, issue, make_certificate, parse
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.listener import endpoints
from equipoise.dht.identity import Identity, load_or_create

NOW = time.time()
MUTANTS = 3000


@pytest.fixture(scope="module")
def author(tmp_path_factory) -> Identity:
    return load_or_create(tmp_path_factory.mktemp("author"))


@pytest.fixture(scope="module")
def own(author):
    return make_certificate(author.peer, NOW)


@pytest.fixture(scope="module")
def genuine(author, own) -> bytes:
    return issue(author, own, [("192.0.2.1", 4000), ("2001:db8::1", 4001)])


def test_what_was_issued_is_taken(author, own, genuine) -> None:
    found = parse(author.peer, genuine, NOW)
    assert found.certificate == own.der
    assert found.addresses == (("192.0.2.1", 4000), ("2001:db8::1", 4001))
    assert NOW < found.expires <= NOW + credential.LIFE_SECONDS
    assert len(genuine) < 700


def test_the_key_is_not_shown(own) -> None:
    assert "key" not in repr(own)


def test_addresses_that_do_not_fit_or_cannot_be_dialled_are_left_out(author, own) -> None:
    long = [(f"{'a' * 60}.{'b' * 60}.{'c' * 60}.host{number}", 65535) for number in range(4)]
    data = issue(author, own, [("fe80::1%eth0", 1), *long])
    assert len(data) <= MAX_CREDENTIAL_BYTES
    assert parse(author.peer, data, NOW).addresses == tuple(
        long[: len(parse(author.peer, data, NOW).addresses)]
    )
    many = issue(author, own, [(f"192.0.2.{number}", 1) for number in range(20)])
    assert len(parse(author.peer, many, NOW).addresses) == credential.MAX_ADDRESSES


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"addresses": ("192.0.2.1 0",)}, "malformed credential"),
        ({"addresses": ("192.0.2.1 65536",)}, "malformed credential"),
        ({"addresses": ("192.0.2.1 \u0661",)}, "malformed credential"),
        ({"addresses": ("192.0.2.1",)}, "malformed credential"),
        ({"addresses": ("a b 1",)}, "malformed credential"),
        ({"addresses": (" 1",)}, "malformed credential"),
        ({"addresses": ("x" * 300 + " 1",)}, "malformed credential"),
        ({"addresses": ("192.0.2.1 1",) * 5}, "malformed credential"),
        ({"certificate": b""}, "malformed credential"),
        ({"certificate": bytes(200)}, "malformed credential"),
    ],
)
def test_signed_nonsense_is_refused(author, own, changes, why) -> None:
    wire = {"certificate": own.der, "addresses": ()} | changes
    with pytest.raises(Refused) as caught:
        parse(author.peer, _signed(author, **wire), NOW)
    assert caught.value.why == why
    assert "\n" not in str(caught.value)


def test_a_certificate_signed_by_another_key_is_refused(author, own) -> None:
    altered = own.der[:-1] + bytes([own.der[-1] ^ 1])
    with pytest.raises(Refused, match="not signed with its own key"):
        parse(author.peer, _signed(author, certificate=altered, addresses=()), NOW)


def test_no_altered_credential_is_taken(author, genuine) -> None:
    rng = random.Random(7)
    for _ in range(MUTANTS):
        altered = bytearray(genuine)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(altered))
            kind = rng.randrange(4)
            if kind == 0:
                altered[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del altered[at : at + rng.randrange(1, 9)]
            elif kind == 2:
                altered[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                altered = altered[: at + 1]
        if altered != genuine:
            with pytest.raises(Refused):
                parse(author.peer, bytes(altered), NOW)


def test_no_altered_certificate_breaks_the_parser(author, own) -> None:
    """Signed by the identity: an attacker may put any bytes into its own credential."""
    rng, genuine = random.Random(8), x509.load_der_x509_certificate(own.der)
    for _ in range(MUTANTS // 3):
        altered = bytearray(own.der)
        for _ in range(rng.randrange(1, 4)):
            altered[rng.randrange(len(altered))] = rng.randrange(256)
        if altered != own.der:
            data = _signed(author, certificate=bytes(altered), addresses=())
            # The signature does not cover the name of its own algorithm; what it covers is as it was.
            with contextlib.suppress(Refused):
                taken = x509.load_der_x509_certificate(parse(author.peer, data, NOW).certificate)
                assert taken.tbs_certificate_bytes == genuine.tbs_certificate_bytes


@given(st.binary(max_size=MAX_CREDENTIAL_BYTES + 10))
@settings(max_examples=500)
def test_noise_is_no_credential(noise: bytes) -> None:
    with pytest.raises(Refused):
        parse("12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN", noise, NOW)


@pytest.mark.parametrize(("days", "why"), [(-1, "expired"), (61, "malformed credential")])
def test_a_certificate_that_is_too_old_or_lasts_too_long_is_refused(author, monkeypatch, days, why) -> None:
    monkeypatch.setattr(credential, "LIFE_SECONDS", days * 86400.0)
    with pytest.raises(Refused) as caught:
        parse(author.peer, issue(author, make_certificate(author.peer, NOW), []), NOW)
    assert caught.value.why == why


def test_a_credential_is_renewed_with_another_certificate(author) -> None:
    days = 0.0
    presence = Presence(author, lambda: NOW + days * 86400)
    first, certificate = presence.credential, presence.certificate
    assert presence.credential is first
    days = 3.0
    assert presence.credential is first
    days = 4.0
    second = presence.credential
    assert presence.certificate.der == parse(author.peer, second, NOW + days * 86400).certificate
    assert presence.certificate is not certificate


def test_addresses_of_a_credential_follow_the_machine(author) -> None:
    presence = Presence(author, lambda: NOW)
    before = presence.credential
    presence.tell([("192.0.2.9", 5)])
    assert presence.credential != before
    assert parse(author.peer, presence.credential, NOW).addresses == (("192.0.2.9", 5),)


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
def test_where_a_listener_is_reached(hosts, bound, forwarded, found) -> None:
    assert endpoints(hosts, bound, forwarded=forwarded) == found


def _signed(author: Identity, certificate: bytes, addresses: tuple[str, ...]) -> bytes:
    signature = author.sign("direct", credential._signed(author.peer, certificate, addresses))
    return msgspec.msgpack.encode([certificate, addresses, signature])
