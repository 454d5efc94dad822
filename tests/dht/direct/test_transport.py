"""Frames over real sockets, in both layers."""

from __future__ import annotations

import asyncio
import os

import pytest

from equipoise.averaging import ports
from equipoise.dht import transport
from equipoise.dht.direct import aead, handshake, streams
from equipoise.dht.direct.transport import MAX_OPENING
from equipoise.limits import MAX_HEADER_BYTES
from fakes.direct import introduce

LAYERS = ("tls", "aead")
LARGE = 4 * 1024 * 1024


def anywhere(header: bytes, size: int) -> memoryview:
    return memoryview(bytearray(size))


def nowhere(header: bytes, size: int) -> memoryview:
    raise ports.FrameRefused("no place for it")


def test_a_header_fits_into_a_record() -> None:
    assert aead.MAX_HEAD_BYTES >= MAX_HEADER_BYTES + streams.JOINED_BYTES


@pytest.mark.parametrize("layer", LAYERS)
async def test_frames_arrive_as_sent(peers, layer) -> None:
    there, here = await peers.connected(layer)
    assert (there.peer, here.peer) == (peers.all[1].peer, peers.all[0].peer)
    for header_size in (0, 1, 200, 100_000, 128 * 1024):
        for body_size in (0, 1, 5_000, 20_000, 256 * 1024, 256 * 1024 + 1, LARGE):
            header, body = os.urandom(header_size), os.urandom(body_size)
            sending = asyncio.ensure_future(there.send(header, body))
            got, place = await here.receive(anywhere)
            await sending
            assert got == header
            assert place == body
    assert here.received >= LARGE


@pytest.mark.parametrize("layer", LAYERS)
async def test_both_directions_at_once(peers, layer) -> None:
    there, here = await peers.connected(layer)
    body = os.urandom(LARGE)

    async def send(channel) -> None:
        for number in range(8):
            await channel.send(bytes([number]), body)

    async def receive(channel) -> None:
        for number in range(8):
            header, place = await channel.receive(anywhere)
            assert header == bytes([number])
            assert place == body

    async with asyncio.TaskGroup() as group:
        for end in (there, here):
            group.create_task(send(end))
            group.create_task(receive(end))
    # Its segment acknowledges, to the kernel too, all that came before.
    await here.send(b"done")
    await there.receive(anywhere)
    assert there.delivered >= 8 * LARGE


@pytest.mark.parametrize("layer", LAYERS)
async def test_senders_take_turns_frame_by_frame(peers, layer) -> None:
    there, here = await peers.connected(layer)
    bodies = [bytes([number]) * 300_000 for number in range(16)]
    sending = asyncio.gather(*(there.send(body[:1], body) for body in bodies))
    for body in bodies:
        assert await here.receive(anywhere) == (body[:1], body)
    await sending


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_sender_waits_for_a_peer_that_does_not_read(peers, layer) -> None:
    there, here = await peers.connected(layer)
    body = bytes(LARGE // 64)
    sending = [asyncio.ensure_future(there.send(b"", body)) for _ in range(1024)]
    await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
    # 64 MB fit into no pair of socket buffers.
    assert not all(done.done() for done in sending)
    for _ in sending:
        await here.receive(anywhere)
    await asyncio.gather(*sending)


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_receive_cancelled_between_frames_loses_nothing(peers, layer) -> None:
    there, here = await peers.connected(layer)
    for number in range(20):
        receiving = asyncio.ensure_future(here.receive(anywhere))
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait({receiving})
        await there.send(bytes([number]), b"body")
        assert await here.receive(anywhere) == (bytes([number]), b"body")


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_send_cancelled_within_a_frame_closes(peers, layer) -> None:
    there, here = await peers.connected(layer)
    sending = asyncio.ensure_future(asyncio.wait_for(asyncio.gather(*_floods(there)), 0.05))
    with pytest.raises(TimeoutError):
        await sending
    with pytest.raises(ConnectionError, match="abandoned within a frame"):
        await there.send(b"more")
    with pytest.raises(ConnectionError, match=f"receive from {here.peer}"):
        await _drain(here)


async def _drain(channel) -> None:
    while True:
        await channel.receive(anywhere)


def _floods(channel):
    return [channel.send(b"", bytes(LARGE)) for _ in range(16)]


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_refused_place_closes(peers, layer) -> None:
    there, here = await peers.connected(layer)
    await there.send(b"header", bytes(100_000))
    with pytest.raises(ports.FrameRefused):
        await here.receive(nowhere)
    with pytest.raises(ConnectionError):
        await there.receive(anywhere)
    assert not any(one.status().channels for one in peers.all)


@pytest.mark.parametrize("layer", LAYERS)
async def test_closing_ends_both_ends(peers, layer) -> None:
    there, here = await peers.connected(layer)
    receiving = [asyncio.ensure_future(one.receive(anywhere)) for one in (there, here)]
    await asyncio.sleep(0)
    there.close()
    there.close()
    for one in receiving:
        with pytest.raises(ConnectionError):
            await one
    assert there.delivered >= 0


async def test_lengths_are_bounded(peers) -> None:
    there, _ = await peers.connected()
    with pytest.raises(ValueError, match="at most"):
        await there.send(b"", bytes(LARGE + 1))
    with pytest.raises(ValueError, match="at most"):
        await there.send(bytes(MAX_HEADER_BYTES + 1))
    await there.send(b"still open")


async def test_a_peer_that_dials_tls_is_served_by_one_that_dials_aead(peers) -> None:
    first, second = peers.make("first", "tls"), peers.make("second", "aead")
    introduce(first, second)
    for one, other in ((first, second), (second, first)):
        there = await one.open(other.peer)
        here = await peers.accepted.get()
        _, (header, _) = await asyncio.gather(there.send(b"hello", bytes(LARGE)), here.receive(anywhere))
        assert header == b"hello"


async def test_a_peer_that_listens_nowhere_dials_and_is_not_dialled(peers) -> None:
    public, hidden = peers.make("public"), peers.make("hidden", listen=())
    introduce(public, hidden)
    assert hidden.reaches(public.peer)
    assert not public.reaches(hidden.peer)
    assert not hidden.dialable
    with pytest.raises(ConnectionError, match="listens nowhere"):
        await public.open(hidden.peer)
    there = await hidden.open(public.peer)
    here = await peers.accepted.get()
    await here.send(b"from the one that was dialled")
    assert (await there.receive(anywhere))[0] == b"from the one that was dialled"


async def test_channels_per_peer_are_bounded(peers) -> None:
    first, second = peers.pair()
    for _ in range(transport.MAX_CHANNELS_PER_PEER):
        await first.open(second.peer)
    with pytest.raises(ConnectionError, match="maximum"):
        await first.open(second.peer)


async def test_channels_opened_at_once_are_bounded(peers, monkeypatch) -> None:
    first, at_once, most = peers.make("first"), 0, 0
    others = [peers.make(f"other {number}") for number in range(2 * MAX_OPENING)]
    secure = handshake.secure

    async def counted(*given, dialler: bool, **more):
        nonlocal at_once, most
        at_once += dialler
        most = max(most, at_once)
        try:
            return await secure(*given, dialler=dialler, **more)
        finally:
            at_once -= dialler

    monkeypatch.setattr(handshake, "secure", counted)
    for other in others:
        other.admit(first.peer, first.credential)
        first.admit(other.peer, other.credential)
    channels = await asyncio.gather(*(first.open(other.peer) for other in others))
    assert len(channels) == len(others)
    assert 1 < most <= MAX_OPENING


async def test_frames_sent_at_once_after_the_greeting_are_not_swallowed(peers) -> None:
    """OpenSSL must not read ahead: what follows the greeting on the socket is not TLS."""
    first, second = peers.pair("aead")

    async def greet(channel) -> None:
        await channel.send(b"from the acceptor", bytes(20_000))
        await peers.accepted.put((await channel.receive(anywhere))[0])

    second.serve(greet)
    for _ in range(50):
        channel = await first.open(second.peer)
        await channel.send(b"from the dialler", bytes(20_000))
        assert (await channel.receive(anywhere))[0] == b"from the acceptor"
        assert await peers.accepted.get() == b"from the dialler"
        channel.close()


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_flood_of_small_frames_leaves_others_their_turns(peers, layer) -> None:
    there, here = await peers.connected(layer)
    turns, frames = 0, 5_000

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    sending = asyncio.gather(*(there.send(b"x" * 100) for _ in range(frames)))
    turns = 0
    for _ in range(frames):
        await here.receive(anywhere)
    await sending
    counting.cancel()
    await asyncio.wait({counting})
    assert turns > 5
