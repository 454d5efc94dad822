"""TLS between memory buffers: what a session takes, refuses, and leaves to whatever comes after it."""

from __future__ import annotations

import random
import ssl
import time

import pytest
from OpenSSL import SSL

from equipoise.dht.direct.credential import make_certificate
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.tls import GREETING_RECORD_BYTES, TlsSession


@pytest.fixture(scope="module")
def certificates():
    return make_certificate("client", time.time()), make_certificate("server", time.time())


@pytest.fixture
def sessions(certificates) -> tuple[TlsSession, TlsSession]:
    client, server = certificates
    return (
        TlsSession(client, server.der, server=False),
        TlsSession(server, client.der, server=True),
    )


def meet(client: TlsSession, server: TlsSession) -> None:
    over = [False, False]
    while not all(over):
        over[0] = client.shake_hands()
        server.feed(client.seal())
        over[1] = server.shake_hands()
        client.feed(server.seal())


def opened(session: TlsSession, size: int) -> bytes:
    data = bytearray(size)
    got = session.open_into(memoryview(data))
    return bytes(data[:got])


def test_each_sees_the_others_certificate(certificates, sessions) -> None:
    meet(*sessions)
    assert [one.certificate for one in sessions] == [one.der for one in certificates[::-1]]


def test_keys_for_what_follows_tls_are_the_twos_own_and_differ_by_side(certificates, sessions) -> None:
    meet(*sessions)
    sides = (b"dialler", b"acceptor")
    keys = [[one.export_key(side, 32) for side in sides] for one in sessions]
    assert keys[0] == keys[1]
    client, server = certificates
    again = (
        TlsSession(client, server.der, server=False),
        TlsSession(server, client.der, server=True),
    )
    meet(*again)
    assert len({*keys[0], *(again[0].export_key(side, 32) for side in sides)}) == 4


def test_a_greeting_has_the_size_that_is_read_of_it(sessions) -> None:
    meet(*sessions)
    assert len(sessions[1].seal(b"x")) == GREETING_RECORD_BYTES


@pytest.mark.parametrize("size", [0, 1, 16384, 16385, 300_000])
def test_all_that_is_sealed_comes_out_at_once(sessions, size) -> None:
    client, server = sessions
    meet(client, server)
    data = random.Random(size).randbytes(size)
    server.feed(client.seal(data))
    assert opened(server, size + 1) == data
    assert client.seal() == b""


def test_nothing_is_handed_out_to_resume_a_session_with(sessions) -> None:
    client, server = sessions
    meet(client, server)
    assert server.seal() == b""
    assert len(server.seal(b"x")) < 64, "no ticket goes along"


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
    client.end()
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


def test_who_shows_no_certificate_is_refused(sessions) -> None:
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
