"""What a stream knows of its connection, from Linux's own `tcp_info`, and what caps let through it."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from equipoise.dht.limits import Caps, TokenBucket
from equipoise.dht.streams import CAPPED_BYTES, Stream


class _Connection:
    """A connection of which the kernel says `info`, and nothing where that is None."""

    def __init__(self, info: bytes | None) -> None:
        self._info = info

    def setblocking(self, blocks: bool) -> None:
        pass

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        if self._info is None:
            raise OSError("it is no TCP connection")
        return self._info[:size]


def info(**fields: int) -> bytes:
    """A `tcp_info` with these fields (include/uapi/linux/tcp.h)."""
    data = bytearray(232)
    places = {"snd_mss": ("I", 16), "sacked": ("I", 28), "rtt": ("I", 68), "bytes_acked": ("Q", 120)}
    for name, value in fields.items():
        kind, place = places[name]
        struct.pack_into(f"={kind}", data, place, value)
    return bytes(data)


async def test_segments_behind_a_lost_one_are_delivered() -> None:
    told = info(bytes_acked=10_000, sacked=7, snd_mss=1448, rtt=2500)
    stream = Stream(_Connection(told), 0)  # type: ignore[arg-type]
    assert stream.delivered == 10_000 + 7 * 1448
    assert stream.rtt == 0.0025


@pytest.mark.parametrize("told", [None, info()[:104]], ids=["not TCP", "an old kernel"])
async def test_bytes_of_which_the_kernel_tells_nothing_count_as_sent(told: bytes | None) -> None:
    stream = Stream(_Connection(told), 0)  # type: ignore[arg-type]
    stream.sent = 5
    assert stream.delivered == 5
    assert stream.rtt == 0.0


class _Counted(TokenBucket):
    """A cap that has room for everything, and knows what passes."""

    def __init__(self) -> None:
        super().__init__(rate=1e15)
        self.passed: list[int] = []

    def spend(self, count: int) -> None:
        self.passed.append(count)
        super().spend(count)


async def test_caps_pass_all_bytes_in_small_pieces() -> None:
    mine, theirs = map(Stream, socket.socketpair())
    caps = mine.caps = theirs.caps = Caps()
    sent, received = caps.upload, caps.download = _Counted(), _Counted()
    body, view = bytes(range(256)) * 1024, bytearray(4 + 256 * 1024)
    await asyncio.gather(mine.send(b"head", body), theirs.receive_into(memoryview(view)))
    assert view == b"head" + body
    assert sum(sent.passed) == sum(received.passed) == len(view)
    assert max(sent.passed + received.passed) <= CAPPED_BYTES
    mine.close()
    theirs.close()
