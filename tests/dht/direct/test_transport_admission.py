"""Who gets in, and who does not, over real connections; every refusal is counted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from OpenSSL import SSL

from equipoise.dht.direct import handshake, transport
from equipoise.dht.direct.credential import issue
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.handshake import PREFACE_BYTES, Preface, parse_preface
from equipoise.dht.direct.sockets import receive_exactly
from equipoise.dht.direct.tls import TlsSession, make_context
from equipoise.dht.identity import Identity, peer_of
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


async def test_a_member_that_was_restarted_is_known_at_once(peers) -> None:
    first, second = peers.pair()
    await first.stop()
    again = peers.make("first")
    again.admit(second.peer, second.credential)
    assert (await again.open(second.peer)).peer == second.peer
    assert refused(second) == {}


async def test_an_impostor_that_claims_a_members_name_is_refused(peers, dial, layer) -> None:
    member, target = peers.pair(layer)
    await turned_away(dial, member.peer, target, make_context(peers.identity("impostor")), layer)
    assert refused(target) == {"impostor": 1}
    assert target.status().channels == 0


async def test_another_member_at_a_members_address_is_refused(peers, layer) -> None:
    first, moved, other = peers.make("first", layer), peers.identity("moved"), peers.make("other")
    first.admit(moved.peer, issue([port_of(other)]))
    other.admit(first.peer, first.credential)
    with pytest.raises(ConnectionError, match=moved.peer):
        await first.open(moved.peer)
    assert refused(other) == {"other peer": 1}


async def test_an_impostor_at_a_members_address_is_refused(peers, layer) -> None:
    """Right address, wrong key: the preface is understood, TLS is answered, by somebody else, who learns nothing."""
    first, second = peers.pair(layer)
    async with terminating(make_context(peers.identity("impostor"))) as (address, arrived):
        first.admit(second.peer, issue([address]))
        with pytest.raises(ConnectionError, match=f"holds the key of .*, not of {second.peer}"):
            await first.open(second.peer)
    assert refused(first) == {"impostor": 1}
    assert not arrived


async def test_a_handshake_that_was_recorded_opens_nothing_again(peers, dial, layer) -> None:
    first, second = peers.pair(layer)
    async with passing(port_of(second)) as (address, passed):
        first.admit(second.peer, issue([address]))
        await (await first.open(second.peer)).send(*FRAME)
    await peers.accepted.get()
    replaying = await dial(second)
    await asyncio.get_running_loop().sock_sendall(replaying, b"".join(passed))
    replaying.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(replaying, 4096):
            pass
    assert refused(second) == {"tls failure": 1}
    assert peers.accepted.empty()


async def test_flipped_bits_between_two_members_end_the_connection_and_no_more(
    peers, layer, monkeypatch
) -> None:
    for name in ("OPEN_SECONDS", "HANDSHAKE_SECONDS", "ADMIT_SECONDS"):
        monkeypatch.setattr(transport, name, 0.3)
    first, second = peers.pair(layer)
    for position in range(3, 2500, 227):
        async with passing(port_of(second), position) as (address, _):
            first.admit(second.peer, issue([address]))
            with contextlib.suppress(ConnectionError):
                channel = await first.open(second.peer)
                await channel.send(*FRAME)
        while not peers.accepted.empty():
            with contextlib.suppress(ConnectionError):
                frame = await peers.accepted.get_nowait().receive(lambda _, size: memoryview(bytearray(size)))
                assert frame == FRAME
    assert second.peer in first._allowlist


async def test_an_altered_layer_is_found_out_before_a_frame(peers, layer) -> None:
    """The preface is in the clear; the greeting confirms it inside TLS, to both."""
    first, second = peers.pair(layer)
    async with passing(port_of(second), LAYER_AT) as (address, _):
        first.admit(second.peer, issue([address]))
        with pytest.raises(ConnectionError, match=f"does not confirm the layer {layer}"):
            await first.open(second.peer)
    assert refused(second) == {"tls failure": 1}
    assert "does not confirm the layer" in second.status().last_refusal


async def shaken(layer) -> tuple[asyncio.Task, TlsSession, socket.socket]:
    """An accepting side that waits for the greeting: its task, and the dialling side's TLS and socket."""
    own, other = (Identity(Ed25519PrivateKey.generate(), Path()) for _ in range(2))
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    preface, loop = Preface(layer, other.peer, own.peer), asyncio.get_running_loop()
    accepting = asyncio.ensure_future(handshake.secure(near, make_context(own), preface, dialler=False))
    client = TlsSession(make_context(other), server=False)
    while not client.shake_hands():
        await loop.sock_sendall(far, client.seal())
        client.feed(await loop.sock_recv(far, handshake.HANDSHAKE_BYTES))
    return accepting, client, far


async def test_a_peer_that_sends_no_greeting_is_not_read_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(TlsSession, "open_into", lambda self, view: 0)
    accepting, client, far = await shaken("aead")
    noise = bytes((handshake.MAX_RECORDS + 1) * handshake.HANDSHAKE_BYTES)
    await asyncio.get_running_loop().sock_sendall(far, client.seal() + noise)
    with far, pytest.raises(Refused, match="does not greet"):
        await accepting


@pytest.mark.parametrize("late", [0, 1, 3, 20, 24, 40])
async def test_a_greeting_that_comes_in_two_pieces_is_a_greeting(late: int) -> None:
    accepting, client, far = await shaken("tls")
    last, loop = client.seal(bytes(1)), asyncio.get_running_loop()
    await loop.sock_sendall(far, last[: len(last) - late])
    for _ in range(10):  # The other side reads what has come.
        await asyncio.sleep(0)
    await loop.sock_sendall(far, last[len(last) - late :])
    with far:
        stream = await asyncio.wait_for(accepting, 10)
        assert not stream.closed
        stream.close()


async def knock(dial, claimed: str, target, context: SSL.Context, layer):
    """Dial `target` as an attacker would, with any certificate behind a claim that is as good as can be."""
    connection = await dial(target)
    preface = Preface(layer, claimed, target.peer)
    await asyncio.get_running_loop().sock_sendall(connection, preface.encode())
    raw = socket.socket(fileno=connection.detach())
    raw.setblocking(False)
    return await handshake.secure(raw, context, preface, dialler=True)


async def turned_away(dial, claimed: str, target, context: SSL.Context, layer) -> None:
    before = sum(refused(target).values())
    with pytest.raises(Refused):
        await knock(dial, claimed, target, context, layer)
    assert sum(refused(target).values()) == before + 1


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
async def terminating(context: SSL.Context):
    """A stranger that answers every dialler with `context`; what gets through is noted."""
    arrived: list[object] = []

    async def serve(connection: socket.socket) -> None:
        preface = parse_preface(await receive_exactly(connection, PREFACE_BYTES))
        with contextlib.suppress(Refused):
            stream = await handshake.secure(connection, context, preface, dialler=False)
            arrived.append(stream)

    async with serving(serve) as address:
        yield address, arrived


@contextlib.asynccontextmanager
async def passing(target: tuple[str, int], position: int = -1):
    """Somebody who passes bytes on in both directions, one bit of those to `target` flipped, and notes the latter."""
    loop = asyncio.get_running_loop()
    noted: list[bytes] = []

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
                if sink.getpeername()[:2] == target:
                    noted.append(bytes(data))
                await loop.sock_sendall(sink, data)

    async with serving(serve) as address:
        yield address, noted


async def test_silent_listeners_hold_half_of_the_dials_and_each_only_for_a_while(peers, monkeypatch) -> None:
    monkeypatch.setattr(handshake, "SILENT_SECONDS", 0.3)
    first, second = peers.pair()
    silent = [peer_of(bytes([number]) * 32) for number in range(transport.MAX_OPENING)]
    with contextlib.ExitStack() as stack:
        places = []
        for peer in silent:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            places.append(listening.getsockname())
            first.admit(peer, issue(places[-1:]))
        dials = [asyncio.ensure_future(first.open(peer)) for peer in silent]
        await asyncio.sleep(0)
        first.meet(second.peer)
        assert (await first.open(second.peer)).peer == second.peer
        assert not any(dial.done() for dial in dials), "it took none of the strangers' turns"
        found = await asyncio.gather(*dials, return_exceptions=True)
    assert all("no byte for" in str(one) for one in found)
