"""Frames over real libp2p streams."""

from __future__ import annotations

import asyncio

import pytest

from equipoise.dht.transport import MAX_CHANNELS_PER_PEER, STREAM_PROTOCOL, FramedChannel
from equipoise.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES

BODY = bytes(range(256)) * 2048


def fresh(header: bytes, size: int) -> memoryview:
    return memoryview(bytearray(size))


async def accepted(member) -> asyncio.Queue[FramedChannel]:
    channels: asyncio.Queue[FramedChannel] = asyncio.Queue()

    async def serve(channel: FramedChannel) -> None:
        await channels.put(channel)
        await asyncio.Event().wait()

    member.transport.serve(serve)
    return channels


@pytest.fixture
async def pair(members, until):
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await until(lambda: first.peer in second.status().connected)
    queue = await accepted(first)
    mine = await second.transport.open(first.peer)
    theirs = await asyncio.wait_for(queue.get(), 10)
    return first, second, mine, theirs


async def test_frames_in_both_directions(pair) -> None:
    first, second, mine, theirs = pair
    assert (mine.peer, theirs.peer) == (first.peer, second.peer)
    buffer = bytearray(MAX_BODY_BYTES)
    sizes = []

    def place(header: bytes, size: int) -> memoryview:
        sizes.append((header, size))
        return memoryview(buffer)[:size]

    async def send_all() -> None:
        await mine.send(b"empty")
        await mine.send(b"", BODY)
        await asyncio.gather(mine.send(b"a", memoryview(BODY)), mine.send(b"b", bytearray(BODY)))
        await mine.send(b"h" * MAX_HEADER_BYTES, bytes(MAX_BODY_BYTES))

    sending = asyncio.create_task(send_all())
    assert await theirs.receive(place) == (b"empty", b"")
    assert await theirs.receive(place) == (b"", BODY)
    assert {(await theirs.receive(place))[0] for _ in range(2)} == {b"a", b"b"}
    assert buffer[: len(BODY)] == BODY
    header, body = await theirs.receive(place)
    assert (len(header), len(body)) == (MAX_HEADER_BYTES, MAX_BODY_BYTES)
    assert sizes[0] == (b"", len(BODY))
    await sending
    await theirs.send(b"back", BODY)
    assert await mine.receive(fresh) == (b"back", BODY)


async def test_reading_goes_on_while_the_other_end_does_not_read(pair) -> None:
    _, _, mine, theirs = pair

    async def flood() -> None:
        while True:
            await mine.send(b"flood", bytes(MAX_BODY_BYTES))

    flooding = asyncio.create_task(flood())
    for number in range(3):
        await theirs.send(b"%d" % number, BODY)
        assert (await asyncio.wait_for(mine.receive(fresh), 10))[0] == b"%d" % number
    assert not flooding.done()
    theirs.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(flooding, 10)


async def test_a_peer_that_does_not_exist_cannot_be_reached(pair, stranger) -> None:
    _, second, _, _ = pair
    with pytest.raises(ConnectionError, match=f"cannot reach {stranger.peer}"):
        await second.transport.open(stranger.peer)


async def test_a_peer_that_does_not_serve_hangs_up(members, until) -> None:
    first = await members.start("first")
    second = await members.start("second", join=first.addresses)
    await until(lambda: first.peer in second.status().connected)
    channel = await second.transport.open(first.peer)
    with pytest.raises(ConnectionError):
        await channel.receive(fresh)


async def test_streams_of_one_peer_are_bounded(pair, until) -> None:
    first, second, mine, theirs = pair
    queue = await accepted(first)
    opened = [mine, theirs] + [
        await second.transport.open(first.peer) for _ in range(MAX_CHANNELS_PER_PEER - 1)
    ]
    opened += [await asyncio.wait_for(queue.get(), 10) for _ in range(MAX_CHANNELS_PER_PEER - 1)]
    with pytest.raises(ConnectionError, match="the maximum"):
        await second.transport.open(first.peer)
    # One that ignores its own bound is hung up on by the other.
    stream = await second._link.open_stream(first.peer, STREAM_PROTOCOL)
    channel = FramedChannel(first.peer, stream, lambda channel: None)
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(channel.receive(fresh), 10)
    for one in opened:
        one.close()
    await until(lambda: not first.transport.channels)
    (await second.transport.open(first.peer)).close()
    (await queue.get()).close()


async def test_a_stopped_member_leaves_its_peers_an_error(pair, until) -> None:
    first, second, mine, _ = pair

    async def is_out_of_reach() -> bool:
        try:
            (await second.transport.open(first.peer)).close()
        except ConnectionError as error:
            return "cannot reach" in str(error)
        return False

    receiving = asyncio.create_task(mine.receive(fresh))
    await first.stop()
    with pytest.raises(ConnectionError, match=first.peer):
        await asyncio.wait_for(receiving, 10)
    # p2pd opens streams on the dead connection until it has read its end.
    await until(is_out_of_reach)
