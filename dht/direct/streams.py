"""Byte streams on a TCP connection that `handshake` has opened: of TLS records, of our AEAD records.

Both are `equipoise.dht.streams.Stream`s: `FramedChannel` puts frames on them. A frame is sent as a head
(prefix and header) and a body, and what is read ahead stays below `HEAD_BYTES`, so that bodies go from and to the
caller's memory.
"""

from __future__ import annotations

import asyncio
import mmap
import socket

from equipoise.dht import streams
from equipoise.dht.direct import aead
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.tls import RECORD_BYTES, TlsSession
from equipoise.dht.streams import HEAD_BYTES, YIELD_BYTES, Buffer, BytesRefused, Stream, StreamClosed

JOINED_BYTES = 16 * 1024
"""A frame up to this size is joined and sent in one call, one record: copying is cheaper than a second one."""
TLS_PIECE_BYTES = 128 * 1024
"""Most bytes that are encrypted at once, as eight records: larger copies no longer fit the cache."""
TLS_READ_BYTES = 256 * 1024
"""Most bytes that are read from the socket at once."""
MAX_OVERHEAD, SLACK_BYTES = 4, TLS_READ_BYTES + 64 * 1024
"""Most bytes of TLS for each byte of content, and most beyond that, what waits to be opened included. Messages of TLS
itself, as updates of keys, have no content, and each costs more than a kilobyte of it."""


class TlsStream(Stream):
    """Through OpenSSL, between memory and the socket: two calls of the system per 16 KiB record would cost as much."""

    def __init__(self, connection: socket.socket, tls: TlsSession) -> None:
        super().__init__(connection, buffer_bytes=0)
        self._tls = tls
        self._raw = memoryview(bytearray(TLS_READ_BYTES))
        self._fed = self._opened = 0

    async def send(self, head: Buffer, body: Buffer = b"") -> None:
        """Write `head`, which is small, and `body`."""
        first, rest = _join(head, body)
        await self._give_sealed(memoryview(first))
        for start in range(0, len(rest), TLS_PIECE_BYTES):
            await self._give_sealed(rest[start : start + TLS_PIECE_BYTES])
            if (start + TLS_PIECE_BYTES) % YIELD_BYTES == 0:
                await asyncio.sleep(0)

    async def _give_sealed(self, plain: memoryview) -> None:
        if self._why is not None:
            raise StreamClosed(self._why)
        await super().send(self._tls.seal(plain))

    async def _take(self, view: memoryview, lacking: int, bound: float | None) -> int:
        # Only OpenSSL knows how much of the records that hold those bytes has come already.
        at_least = max(1, lacking - RECORD_BYTES)
        try:
            while not (opened := self._tls.open_into(view)):
                if self._fed > MAX_OVERHEAD * self._opened + SLACK_BYTES:
                    raise BytesRefused(f"{self._fed} bytes of TLS hold {self._opened} bytes")
                taken = await super()._take(self._raw, at_least, bound)
                self._fed += taken
                self._tls.feed(self._raw[:taken])
        except Refused as fault:
            raise (StreamClosed if fault.why == "went away" else BytesRefused)(str(fault)) from None
        self._opened += opened
        return opened


class AeadStream(Stream):
    """Through records of `aead`."""

    def __init__(self, connection: socket.socket, sealer: aead.Sealer, opener: aead.Opener) -> None:
        super().__init__(connection, buffer_bytes=0)
        self._sealer = sealer
        self._opener = opener
        self._out = _pages(aead.MAX_HEAD_RECORD_BYTES + aead.MAX_RECORD_BYTES)
        self._in = _pages(aead.MAX_RECORD_BYTES + HEAD_BYTES)
        self._start = self._end = 0

    def close(self, why: str = "closed by this peer") -> None:
        """Close the socket, end the waits on it and free both buffers, up to 2.5 MB in all; idempotent."""
        super().close(why)
        # Reference cycles keep closed streams for a while: a stranger could fill the memory with broken channels.
        self._in = self._out = memoryview(b"")
        self._start = self._end = 0

    async def wait_readable(self) -> None:
        """Wait, without a bound, until there is something to read; may read ahead."""
        if not self._ahead and self._start == self._end:
            await self._hold(1, None)

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view` with authentic bytes; raises StreamClosed if it ends, breaks, stalls, or a record is refused."""
        done = 0
        while done < len(view):
            if self._ahead:
                done += self._drain(view[done:])
            else:
                done += await self._open_next(view[done:])

    async def send(self, head: Buffer, body: Buffer = b"") -> None:
        """Write `head`, which is small, and `body`."""
        if self._why is not None:
            raise StreamClosed(self._why)
        (first, rest), out = _join(head, body), self._out
        sealed, unyielded = self._sealer.seal_into(aead.HEAD, first, out), 0
        for piece in _pieces(rest):
            # The first piece leaves with the head: a call less for each frame.
            sealed += self._sealer.seal_into(aead.BODY, piece, out[sealed:])
            await super().send(out[:sealed])
            sealed, unyielded = 0, unyielded + len(piece)
            if unyielded >= YIELD_BYTES:
                unyielded = 0
                await asyncio.sleep(0)
        if sealed:
            await super().send(out[:sealed])

    async def _open_next(self, place: memoryview) -> int:
        """Open the next record into `place`, or ahead; return how many bytes `place` has got."""
        if self._end - self._start < aead.PREFIX_BYTES:
            await self._hold(aead.PREFIX_BYTES, streams.STALL_SECONDS)
        kind, size = self._opener.parse_prefix(self._in[self._start : self._end])
        if kind == aead.BODY and size > len(place):
            raise BytesRefused(f"a record of {size} bytes where {len(place)} are left of a body")
        total = aead.PREFIX_BYTES + size + aead.TAG_BYTES
        if self._end - self._start < total:
            await self._hold(total, streams.STALL_SECONDS)
        record = self._in[self._start : self._start + total]
        self._start += total
        if kind == aead.HEAD:
            self._ahead = memoryview(self._opener.open(record))
            return 0
        self._opener.open_into(record, place[:size])
        return size

    async def _hold(self, total: int, bound: float | None) -> None:
        """Have the next `total` bytes of records in the buffer."""
        held = self._end - self._start
        if self._start and self._start + total + HEAD_BYTES > len(self._in):
            # At most the bytes read ahead of the last record, or those of a record that has just begun: HEAD_BYTES.
            self._in[:held] = self._in[self._start : self._end]
            self._start, self._end = 0, held
        room = min(len(self._in), self._start + total + HEAD_BYTES)
        while (lacking := self._start + total - self._end) > 0:
            self._end += await self._take(self._in[self._end : room], lacking, bound)


def _pages(size: int) -> memoryview:
    """Memory that takes no time, and only the pages that frames use: most channels carry small frames only."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _join(head: Buffer, body: Buffer) -> tuple[bytes, memoryview]:
    """Join what is small; a large body stays where it is."""
    first, rest = bytes(head), memoryview(body).cast("B")
    if rest and len(first) + len(rest) <= JOINED_BYTES:
        return first + rest, memoryview(b"")
    return first, rest


def _pieces(body: memoryview) -> list[memoryview]:
    """Cut a body into pieces for a record each, about equal: a tiny last one would cost as much as a whole one."""
    if not body:
        return []
    count = -(-len(body) // aead.PIECE_BYTES)
    size = -(-len(body) // count)
    return [body[start : start + size] for start in range(0, len(body), size)]
