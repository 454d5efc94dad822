"""TLS between memory buffers: what a session takes, refuses, and leaves to whatever comes after it."""

from __future__ import annotations

import random
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed448
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.tls import TlsSession, make_context
from equipoise.dht.identity import Identity
from fakes.certificates import certify, presenting


@pytest.fixture(scope="module")
def identities() -> tuple[Identity, Identity]:
    """The client's and the server's."""
    client, server = (Identity(Ed25519PrivateKey.generate(), Path()) for _ in range(2))
    return client, server


@pytest.fixture
def sessions(identities) -> tuple[TlsSession, TlsSession]:
    return between(*(make_context(one) for one in identities))


def between(client: SSL.Context, server: SSL.Context) -> tuple[TlsSession, TlsSession]:
    return TlsSession(client, server=False), TlsSession(server, server=True)


def altered_at_random(rng: random.Random, genuine: x509.Certificate) -> x509.Certificate:
    """A few bytes changed; raises ValueError where nothing is left of the certificate."""
    data = bytearray(genuine.public_bytes(Encoding.DER))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return x509.load_der_x509_certificate(bytes(data))


def meet(client: TlsSession, server: TlsSession) -> None:
    over = [False, False]
    while not all(over):
        over[0] = client.shake_hands()
        pass_on(client, server)
        over[1] = server.shake_hands()
        pass_on(server, client)


def pass_on(sender: TlsSession, receiver: TlsSession, plain: bytes = b"") -> None:
    if sealed := sender.seal(plain):
        receiver.feed(sealed)


def opened(session: TlsSession, size: int) -> bytes:
    data = bytearray(size)
    got = session.open_into(memoryview(data))
    return bytes(data[:got])


def test_each_side_sees_the_others_key(identities, sessions) -> None:
    meet(*sessions)
    assert [session.peer for session in sessions] == [one.peer for one in identities[::-1]]


@pytest.mark.parametrize("server", [False, True])
def test_the_name_in_a_certificate_counts_for_nothing(identities, server) -> None:
    victim, other = identities
    thief = Ed25519PrivateKey.generate()
    contexts = [presenting(thief, certify(thief, victim.peer)), make_context(other)]
    own, judge = sessions = between(*contexts)
    if server:
        judge, own = sessions = between(*contexts[::-1])
    meet(*sessions)
    assert judge.peer == Identity(thief, Path()).peer
    assert own.peer == other.peer


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP256R1()), ed448.Ed448PrivateKey.generate()])
def test_a_key_of_another_kind_is_nobodys(identities, key) -> None:
    sessions = between(presenting(key, certify(key, "client")), make_context(identities[1]))
    meet(*sessions)
    assert sessions[1].peer == ""


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("server", [False, True])
def test_a_certificate_that_another_one_vouches_for_is_refused(identities, server, chain) -> None:
    """Vouched for by a member or by nobody, and whether or not the voucher comes along."""
    client, other = identities
    authority = certify(other.key, "authority", authority=True)
    vouched = certify(client.key, "client", issuer="authority", signer=other.key)
    contexts = [presenting(client.key, vouched, [authority] * chain), make_context(other)]
    with pytest.raises(Refused, match="not one that it signed itself") as fault:
        meet(*between(*(contexts[::-1] if server else contexts)))
    assert fault.value.why == "impostor"


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_an_altered_certificate_is_refused_or_of_the_same_key(identities) -> None:
    """Only the key counts, and no alteration makes it another one that the other side holds."""
    client, server = identities
    rng, genuine, taken = random.Random(8), certify(client.key, client.peer), 0
    for _ in range(300):
        try:
            context = presenting(client.key, altered_at_random(rng, genuine))
        except (
            Exception
        ):  # It is no certificate, or not of this key: who would send it has to write TLS anew.
            continue
        sessions = between(context, make_context(server))
        try:
            meet(*sessions)
        except Refused:
            continue
        taken += 1
        assert sessions[1].peer == client.peer
    assert taken > 0


def test_keys_for_what_follows_tls_are_the_twos_own_and_differ_by_side(identities, sessions) -> None:
    meet(*sessions)
    sides = (b"dialler", b"acceptor")
    keys = [[session.export_key(side, 32) for side in sides] for session in sessions]
    assert keys[0] == keys[1]
    again = between(*(make_context(one) for one in identities))
    meet(*again)
    assert len({*keys[0], *(again[0].export_key(side, 32) for side in sides)}) == 4


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 300_000])
def test_all_that_is_sealed_comes_out_at_once(sessions, size) -> None:
    client, server = sessions
    meet(client, server)
    data = random.Random(size).randbytes(size)
    pass_on(client, server, data)
    assert opened(server, size + 1) == data
    assert client.seal() == b""


def test_nothing_is_kept_that_a_ticket_could_resume(identities) -> None:
    """OpenSSL still sends two tickets: they name sessions of a store, which there is not."""
    context = make_context(identities[1])
    assert context.get_session_cache_mode() == SSL.SESS_CACHE_OFF
    assert context.set_options(0) & SSL.OP_NO_TICKET, "else a ticket would hold its session itself"


def test_an_altered_record_ends_the_session(sessions) -> None:
    client, server = sessions
    meet(client, server)
    sealed = bytearray(client.seal(b"x" * 1000))
    sealed[500] ^= 1
    server.feed(bytes(sealed))
    with pytest.raises(Refused, match="bad record mac"):
        opened(server, 1000)


def test_a_farewell_and_an_end_are_told(sessions) -> None:
    client, server = sessions
    meet(client, server)
    server.feed(client.seal(b"last"))
    client._tls.shutdown()
    server.feed(client.seal())
    assert opened(server, 4) == b"last"
    with pytest.raises(Refused, match="closed by the other end"):
        opened(server, 1)
    client.feed(b"")
    with pytest.raises(Refused, match="closed by the other end"):
        opened(client, 1)


def test_older_versions_are_refused(sessions) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(coming, going).do_handshake()
    sessions[1].feed(going.read())
    with pytest.raises(Refused, match=r"version|protocol") as fault:
        sessions[1].shake_hands()
    assert fault.value.why == "tls failure"


def test_a_peer_without_a_certificate_is_refused(sessions) -> None:
    nobody, server = sessions
    nobody._tls = SSL.Connection(SSL.Context(SSL.TLS_CLIENT_METHOD))
    nobody._tls.set_connect_state()
    with pytest.raises(Refused, match="certificate") as fault:
        meet(nobody, server)
    assert fault.value.why == "tls failure"


def test_noise_is_refused_at_its_first_bytes(sessions) -> None:
    sessions[1].feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(Refused):
        sessions[1].shake_hands()
