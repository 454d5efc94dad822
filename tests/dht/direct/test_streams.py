"""Streams whose bytes come in drops: the kernel collects them, and nobody waits for what is there, or over."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from equipoise.dht import streams as base
from equipoise.dht.direct import aead, streams
from equipoise.dht.direct.aead import Opener, Sealer
from equipoise.dht.streams import WAKE_BYTES, BytesRefused, Stream, StreamClosed
from equipoise.dht.transport import FramedChannel

KEY = bytes(32)
BODY = bytes(range(256)) * 4096
DROP = 1448
"""A segment on an Ethernet link."""


class Ends:
    """A connection: what `frame` makes is given to it as the test likes, and read by `channel`."""

    def __init__(self, receive_buffer: int = 0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            if receive_buffer:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self.far = socket.create_connection(server.getsockname())
            self.near, _ = server.accept()
        self.far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.far.setblocking(False)
        self.stream = streams.AeadStream(self.near, Sealer(KEY), Opener(KEY))
        self.channel = FramedChannel("peer", self.stream, lambda channel: None)
        self._sealer = Sealer(KEY)

    def frame(self, header: bytes, body: bytes) -> bytes:
        """The records of one frame."""
        head = len(header).to_bytes(4, "big") + len(body).to_bytes(4, "big") + header
        pieces = [body[at : at + aead.PIECE_BYTES] for at in range(0, len(body), aead.PIECE_BYTES)]
        return b"".join(
            [self._sealed(aead.HEAD, head), *(self._sealed(aead.BODY, piece) for piece in pieces)]
        )

    def receiving(self) -> asyncio.Task[tuple[bytes, memoryview]]:
        return asyncio.ensure_future(self.channel.receive(lambda header, size: memoryview(bytearray(size))))

    async def drip(self, data: bytes) -> None:
        """Send in drops, and let whoever reads have each."""
        for at in range(0, len(data), DROP):
            self.far.send(data[at : at + DROP])
            await turns()

    def close(self) -> None:
        self.channel.close()
        self.far.close()

    def _sealed(self, kind: int, plain: bytes) -> bytes:
        record = memoryview(bytearray(aead.MAX_RECORD_BYTES))
        return bytes(record[: self._sealer.seal_into(kind, plain, record)])


async def turns() -> None:
    """Let go on whoever can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def ends():
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def reads(monkeypatch):
    """The sizes of what is read from a socket."""
    sizes: list[int] = []
    take = Stream._take

    async def noted(self, view: memoryview, lacking: int, bound: float | None) -> int:
        sizes.append(await take(self, view, lacking, bound))
        return sizes[-1]

    monkeypatch.setattr(Stream, "_take", noted)
    return sizes


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each drop wakes")
async def test_drops_of_a_record_wake_nobody(ends, reads) -> None:
    receiving = ends.receiving()
    await ends.drip(ends.frame(b"header", BODY))
    assert await receiving == (b"header", BODY)
    records = 1 + -(-len(BODY) // aead.PIECE_BYTES)
    assert len(reads) <= len(BODY) // WAKE_BYTES + 3 * records < len(BODY) // DROP // 10


async def test_bytes_that_the_kernel_holds_count_as_received(ends) -> None:
    receiving, frame = ends.receiving(), ends.frame(b"header", BODY)
    for sent in range(0, 50 * DROP, DROP):
        assert ends.channel.received == sent
        await ends.drip(frame[sent : sent + DROP])
    before = ends.channel.received
    ends.channel.close()
    assert ends.channel.received == before
    with pytest.raises(StreamClosed):
        await receiving


async def test_a_small_frame_behind_a_large_one_does_not_wait(ends) -> None:
    receiving = ends.receiving()
    await ends.drip(ends.frame(b"large", BODY))
    await receiving
    for body in (b"", b"x", bytes(WAKE_BYTES - DROP)):
        receiving = ends.receiving()
        await ends.drip(ends.frame(b"small", body))
        assert receiving.done()
        assert receiving.result() == (b"small", body)


async def test_the_end_of_a_stream_within_a_record_does_not_wait(ends) -> None:
    receiving = ends.receiving()
    await ends.drip(ends.frame(b"header", BODY)[:20_000])
    ends.far.close()
    with pytest.raises(StreamClosed, match="closed by the other end"):
        await receiving


class Empty:
    """TLS whose records hold one byte in a thousand, as where the other end only changes its keys."""

    def __init__(self) -> None:
        self.fed = self.unread = 0

    def feed(self, data: memoryview) -> None:
        self.fed += len(data)
        self.unread += len(data)

    def open_into(self, view: memoryview) -> int:
        opened, self.unread = min(self.unread // 1000, len(view)), self.unread % 1000
        return opened


async def test_tls_that_holds_next_to_nothing_is_refused_soon(ends) -> None:
    tls = Empty()
    stream = streams.TlsStream(ends.near, tls)  # type: ignore[arg-type]
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(ends.far, bytes(4_000_000)))
    with pytest.raises(BytesRefused, match="bytes of TLS hold"):
        await stream.receive_into(memoryview(bytearray(4000)))
    assert tls.fed < 1_000_000
    sending.cancel()


async def test_too_little_to_go_on_with_is_progress_and_silence_is_none(ends, monkeypatch, reads) -> None:
    monkeypatch.setattr(base, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr("equipoise.dht.streams.STALL_SECONDS", 0.3)
    receiving = ends.receiving()
    frame = ends.frame(b"header", BODY)
    await ends.drip(frame[:2000])
    taken = sum(reads)
    await ends.drip(frame[2000:4000])
    with pytest.raises(StreamClosed, match="no progress"):
        await receiving
    assert taken < 4000 == sum(reads)


@pytest.mark.parametrize("buffer", [1, 16 * 1024, 1024 * 1024])
async def test_frames_pass_through_any_receive_buffer(buffer) -> None:
    ends = Ends(receive_buffer=buffer)
    loop = asyncio.get_running_loop()
    for header in (b"first", b"second"):
        sending = asyncio.ensure_future(loop.sock_sendall(ends.far, ends.frame(header, BODY)))
        assert await ends.receiving() == (header, BODY)
        await sending
    ends.close()
