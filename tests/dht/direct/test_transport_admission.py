"""Who gets in, and who does not, over real connections; every refusal is counted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from equipoise.dht.direct import credential, handshake, transport
from equipoise.dht.direct.credential import (
    LIFE_SECONDS,
    OwnCertificate,
    fingerprint_of,
    issue,
    make_certificate,
    parse,
)
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.handshake import Preface, parse_preface
from equipoise.dht.direct.streams import PlainStream
from fakes.direct import port_of, refused

FRAME = (b"header", bytes(range(256)) * 80)
LAYER_AT = 5
"""Where the preface names the layer."""


@pytest.fixture(params=["tls", "aead"])
def layer(request) -> str:
    return request.param


async def test_an_outsider_is_refused(peers, layer, monkeypatch) -> None:
    monkeypatch.setattr(transport, "ADMIT_SECONDS", 0.05)
    member, outsider = peers.pair(layer)[0], peers.make("outsider")
    outsider.admit(member.peer, member.credential)
    with pytest.raises(ConnectionError, match=member.peer):
        await outsider.open(member.peer)
    assert refused(member) == {"not a member": 1}
    assert outsider.peer in member.status().last_refusal
    with pytest.raises(ConnectionError, match="no group"):
        await member.open(outsider.peer)


async def test_an_admission_may_come_after_the_connection(peers) -> None:
    first, second = peers.make("first"), peers.make("second")
    first.admit(second.peer, second.credential)
    opening = asyncio.ensure_future(first.open(second.peer))
    await asyncio.wait({opening}, timeout=0.05)
    second.admit(first.peer, first.credential)
    assert (await opening).peer == second.peer
    assert refused(second) == {}


async def test_the_news_of_a_restarted_peer_may_come_after_its_connection(peers) -> None:
    first, second = peers.pair()
    await first.stop()
    again = peers.make("first")
    again.admit(second.peer, second.credential)
    opening = asyncio.ensure_future(again.open(second.peer))
    await asyncio.wait({opening}, timeout=0.05)
    second.admit(again.peer, again.credential)
    assert (await opening).peer == second.peer
    assert refused(second) == {}


async def test_a_member_with_another_certificate_than_it_told_is_refused(peers, monkeypatch) -> None:
    monkeypatch.setattr(transport, "ADMIT_SECONDS", 0.05)
    _, second = peers.pair()
    other = peers.make("first")
    other.admit(second.peer, second.credential)
    with pytest.raises(ConnectionError, match=r"may not know this peer|reset"):
        await other.open(second.peer)
    assert refused(second) == {"impostor": 1}


async def test_an_impostor_that_claims_a_members_name_is_refused(peers, dial, layer) -> None:
    member, target = peers.pair(layer)
    own = make_certificate(member.peer, time.time())
    await turned_away(dial, member.peer, target, own, layer)
    assert refused(target) == {"impostor": 1}
    assert target.status().channels == 0


async def test_another_member_at_a_members_address_is_refused(peers, layer) -> None:
    first, moved, other = peers.make("first", layer), peers.identity("moved"), peers.make("other")
    first.admit(moved.peer, forge(peers, "moved", [port_of(other)]))
    other.admit(first.peer, first.credential)
    with pytest.raises(ConnectionError, match=moved.peer):
        await first.open(moved.peer)
    assert refused(other) == {"other peer": 1}


async def test_an_impostor_at_a_members_address_is_refused(peers, layer) -> None:
    """Right address, wrong key: the preface is understood, TLS is answered, by somebody else."""
    first, member = peers.make("first", layer), peers.identity("member")
    own = make_certificate(member.peer, time.time())
    async with terminating(first, own) as (address, arrived):
        first.admit(member.peer, forge(peers, "member", [address]))
        with pytest.raises(ConnectionError, match=f"{member.peer}.*not taken"):
            await first.open(member.peer)
    assert refused(first) == {"impostor": 1}
    assert not arrived


async def test_who_terminates_tls_between_two_members_learns_nothing(peers, layer) -> None:
    first, second = peers.pair(layer)
    fake = make_certificate(second.peer, time.time())
    async with terminating(first, fake) as (address, arrived):
        first.admit(second.peer, forge(peers, "second", [address], second._presence.certificate))
        with pytest.raises(ConnectionError, match="not taken"):
            await first.open(second.peer)
    assert refused(first) == {"impostor": 1}
    assert not arrived


async def test_a_member_that_presents_anothers_certificate_is_refused(peers) -> None:
    """It could pass connections on to the other as its own: neither end would notice."""
    first, victim = peers.pair()
    stolen = OwnCertificate(certificate_of(victim), Ed25519PrivateKey.generate(), time.time() + 3600)
    thief = peers.identity("thief")
    with pytest.raises(ValueError, match="another peer's"):
        first.admit(thief.peer, forge(peers, "thief", [port_of(victim)], stolen))
    with pytest.raises(ValueError, match="not signed by"):
        first.admit(thief.peer, victim.credential)
    assert refused(first) == {"replayed certificate": 1, "impostor": 1}
    assert not first.reaches(thief.peer)


async def test_a_copy_of_a_members_certificate_with_another_key_is_refused(peers, dial, layer) -> None:
    member, target = peers.pair(layer)
    genuine = x509.load_der_x509_certificate(certificate_of(member))
    key = Ed25519PrivateKey.generate()
    copied = certify(genuine.subject, genuine.issuer, key, key)
    await turned_away(dial, member.peer, target, as_own(key, copied), layer)
    assert sum(refused(target).values()) == 1
    assert target.status().channels == 0


async def test_a_member_that_is_an_authority_vouches_for_nobody(peers, dial, layer, monkeypatch) -> None:
    target, member = peers.make("target", layer), peers.identity("member")
    rights = x509.BasicConstraints(ca=True, path_length=None)
    with monkeypatch.context() as patch:
        patch.setattr(x509, "BasicConstraints", lambda ca, path_length: rights)
        authority = make_certificate(member.peer, time.time())
    target.admit(member.peer, forge(peers, "member", (), authority))
    name = x509.load_der_x509_certificate(authority.der).subject
    key = Ed25519PrivateKey.generate()
    vouched = certify(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "outsider")]), name, key, authority.key
    )
    await turned_away(dial, member.peer, target, as_own(key, vouched), layer)
    assert refused(target) == {"impostor": 1}
    assert "vouches" in target.status().last_refusal
    (await knock(dial, member.peer, target, authority, layer)).close()


async def test_equal_subjects_do_not_matter(peers, dial, layer, monkeypatch) -> None:
    monkeypatch.setattr(credential, "secrets", SimpleNamespace(token_hex=lambda size: "00" * size))
    target, member = peers.make("target", layer), peers.identity("member")
    twins = [make_certificate(member.peer, time.time()) for _ in range(2)]
    for own, other in (twins, twins[::-1]):
        target.admit(member.peer, forge(peers, "member", (), own))
        (await knock(dial, member.peer, target, own, layer)).close()
        await turned_away(dial, member.peer, target, other, layer)
    assert sum(refused(target).values()) == 2


async def test_an_expired_credential_is_refused(peers, monkeypatch) -> None:
    first, second = peers.pair()
    with pytest.raises(ValueError, match="not valid at this time"):
        first.admit(second.peer, forge(peers, "second", [], now=time.time() - 8 * 86400))
    monkeypatch.setattr(first._allowlist, "_clock", lambda: time.time() + 8 * 86400)
    with pytest.raises(ValueError, match="expired"):
        first.admit(second.peer, second.credential)
    with pytest.raises(ConnectionError, match="expired"):
        await first.open(second.peer)
    assert refused(first) == {"expired": 2}


async def test_an_expired_certificate_is_refused(peers, dial, layer) -> None:
    member, target = peers.pair(layer)
    old = make_certificate(member.peer, time.time() - LIFE_SECONDS - 60)
    with pytest.raises(ValueError, match="not valid at this time"):
        target.admit(member.peer, forge(peers, "first", (), old))
    # TLS refuses it as well, should it expire between admission and connection.
    known = target._allowlist[member.peer]
    target._allowlist[member.peer] = dataclasses.replace(known, certificate=old.der)
    await turned_away(dial, member.peer, target, old, layer)
    assert refused(target) == {"expired": 2}


async def test_who_flips_bits_between_two_members_ends_the_connection_and_no_more(
    peers, layer, monkeypatch
) -> None:
    for name in ("OPEN_SECONDS", "HANDSHAKE_SECONDS", "ADMIT_SECONDS"):
        monkeypatch.setattr(transport, name, 0.3)
    first, second = peers.pair(layer)
    for position in range(3, 2500, 227):
        async with flipping(port_of(second), position) as address:
            first.admit(second.peer, forge(peers, "second", [address], second._presence.certificate))
            with contextlib.suppress(ConnectionError):
                channel = await first.open(second.peer)
                await channel.send(*FRAME)
        while not peers.accepted.empty():
            with contextlib.suppress(ConnectionError):
                frame = await peers.accepted.get_nowait().receive(lambda _, size: memoryview(bytearray(size)))
                assert frame == FRAME
    assert second.peer in first._allowlist


async def test_who_alters_the_layer_asked_for_is_found_out_before_a_frame(peers, layer) -> None:
    """The preface is in the clear; the greeting confirms it inside TLS, to both."""
    first, second = peers.pair(layer)
    async with flipping(port_of(second), LAYER_AT) as address:
        first.admit(second.peer, forge(peers, "second", [address], second._presence.certificate))
        with pytest.raises(ConnectionError, match=f"does not confirm the layer {layer}"):
            await first.open(second.peer)
    assert refused(second) == {"tls failure": 1}
    assert "does not confirm the layer" in second.status().last_refusal


@pytest.mark.parametrize("dialler", [True, False])
@pytest.mark.parametrize("cancelled", [True, False])
async def test_who_forgoes_encryption_leaves_no_socket_behind(monkeypatch, dialler, cancelled) -> None:
    made: list[PlainStream] = []

    def make(connection: socket.socket) -> PlainStream:
        made.append(PlainStream(connection))
        return made[-1]

    monkeypatch.setattr(handshake, "PlainStream", make)
    own, other = socket.socketpair()
    with own, other:
        if not dialler:
            own.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    own.send(bytes(65536))  # Until its own byte has to wait.
        certificate = make_certificate("peer", time.time())
        plain = Preface("plain", "", "", b"")
        forgoing = asyncio.ensure_future(handshake.secure(own, certificate, b"", plain, dialler=dialler))
        await asyncio.sleep(0)
        if cancelled:
            forgoing.cancel()
        else:
            other.close()
        with pytest.raises(asyncio.CancelledError if cancelled else Refused):
            await forgoing
    assert [stream.closed for stream in made] == [True]


def forge(peers, name: str, where, own: OwnCertificate | None = None, now: float = 0.0) -> bytes:
    """A credential of the identity `name` with whatever certificate and addresses."""
    identity = peers.identity(name)
    return issue(identity, own or make_certificate(identity.peer, now or time.time()), where)


def certificate_of(peer) -> bytes:
    return parse(peer.peer, peer.credential, time.time()).certificate


async def knock(dial, claimed: str, target, own: OwnCertificate, layer):
    """Dial `target` as an attacker would, with any certificate behind a claim that is as good as can be."""
    connection = await dial(target)
    preface = Preface(layer, claimed, target.peer, fingerprint_of(target._allowlist[claimed].certificate))
    await asyncio.get_running_loop().sock_sendall(connection, preface.encode())
    trusted = certificate_of(target)
    raw = socket.socket(fileno=connection.detach())
    raw.setblocking(False)
    return await handshake.secure(raw, own, trusted, preface, dialler=True)


async def turned_away(dial, claimed: str, target, own: OwnCertificate, layer) -> None:
    before = sum(refused(target).values())
    with pytest.raises(Refused):
        await knock(dial, claimed, target, own, layer)
    assert sum(refused(target).values()) == before + 1


def certify(subject: x509.Name, issuer: x509.Name, key, signer) -> x509.Certificate:
    now = time.time()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(credential._moment(now - 60))
        .not_valid_after(credential._moment(now + 3600))
        .sign(signer, None)
    )


def as_own(key, made: x509.Certificate) -> OwnCertificate:
    return OwnCertificate(made.public_bytes(Encoding.DER), key, time.time() + 3600)


@contextlib.asynccontextmanager
async def serving(serve) -> AsyncIterator[tuple[str, int]]:
    """Run `serve(connection)` for each connection to the address given."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)

        async def accept() -> None:
            async with asyncio.TaskGroup() as group:
                while True:
                    connection, _ = await loop.sock_accept(listening)
                    group.create_task(serve(connection))

        task = asyncio.ensure_future(accept())
        try:
            yield listening.getsockname()
        finally:
            task.cancel()
            await asyncio.wait({task})


@contextlib.asynccontextmanager
async def terminating(victim, own: OwnCertificate):
    """Somebody who answers `victim` with the certificate `own`; what gets through is noted."""
    arrived: list[object] = []

    async def serve(connection: socket.socket) -> None:
        preface = parse_preface(await handshake.receive_opening(connection))
        trusted = certificate_of(victim)
        with contextlib.suppress(Refused):
            stream = await handshake.secure(connection, own, trusted, preface, dialler=False)
            arrived.append(stream)

    async with serving(serve) as address:
        yield address, arrived


@contextlib.asynccontextmanager
async def flipping(target: tuple[str, int], position: int):
    """Somebody who passes bytes on in both directions, with one bit of what goes to `target` flipped."""
    loop = asyncio.get_running_loop()

    async def serve(connection: socket.socket) -> None:
        with connection, socket.socket() as onward:
            onward.setblocking(False)
            await loop.sock_connect(onward, target)
            copies = [
                asyncio.ensure_future(copy(connection, onward, position)),
                asyncio.ensure_future(copy(onward, connection, -1)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in copies:
                    one.cancel()
                await asyncio.wait(copies)

    async def copy(source: socket.socket, sink: socket.socket, flipped: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(await loop.sock_recv(source, 4096)):
                if passed <= flipped < passed + len(data):
                    data[flipped - passed] ^= 1
                passed += len(data)
                await loop.sock_sendall(sink, data)

    async with serving(serve) as address:
        yield address
