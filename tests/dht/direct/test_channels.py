"""Frames over real sockets, in all three layers."""

from __future__ import annotations

import asyncio
import os

import pytest

LAYERS = ("plain", "tls", "aead")
LARGE = 4 * 1024 * 1024


def anywhere(header: bytes, size: int) -> memoryview:
    return memoryview(bytearray(size))


async def connect(first, second):
    """A channel from `first` to `second`, both ends; the accepting end stays open until the test ends."""
    accepted: asyncio.Queue = asyncio.Queue()

    async def handler(channel) -> None:
        await accepted.put(channel)
        await asyncio.Event().wait()

    second.serve(handler)
    return await first.open(second.peer), await accepted.get()


@pytest.mark.parametrize("layer", LAYERS)
async def test_frames_arrive_as_sent(peers, layer) -> None:
    there, here = await connect(*peers.pair(layer))
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
    there, here = await connect(*peers.pair(layer))
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
    assert there.delivered >= 8 * LARGE
