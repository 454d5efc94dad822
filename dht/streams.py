"""Streams of bytes, read into and written from the caller's buffers: TCP connections, and libp2p streams through p2pd,
a unix socket each.

p2pd's control protocol (libp2p/go-libp2p-daemon, specs/CONTROL.md): on an outbound stream we write a
varint-delimited Request and read a Response, on an inbound one p2pd connects to our socket and writes a
StreamInfo; from then on the socket carries the stream's bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from equipoise.dht.address import varint
from equipoise.dht.limits import Caps

PREFACE_BYTES = 4096
"""Longest protobuf before the stream's bytes: a StreamInfo or an error text takes a few hundred."""
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
"""Asked of the kernel, which may grant less: fewer wake-ups per part."""
STALL_SECONDS = 10.0
"""Longest time that a peer takes nothing, or ends nothing that it began."""
WATCH_SECONDS = 1.0
"""Longest time until a stall is noticed."""
YIELD_BYTES = 1024 * 1024
"""Most bytes that are read without waiting before others on the loop get a turn."""
READ_COST_BYTES = 64 * 1024
"""Least that a read counts for among `YIELD_BYTES`: many small frames take their time too."""
HEAD_BYTES = 4096
"""Most bytes that are read ahead: a control frame whole, in one call."""
WAKE_BYTES = 64 * 1024
"""Most missing bytes that the kernel collects before it wakes the loop: a wake-up costs as much as these bytes, and
links deliver segments of 1.4 KB. This is half of the receive buffer with which Linux begins."""
CAPPED_BYTES = 16 * 1024
"""Most bytes that move at once where a cap holds."""
PAUSE_SECONDS = 0.5
"""Time without accepting after the system had no descriptor left."""

_TCP_INFO = struct.Struct("=16xI8xI36xI48xQ")
"""Linux's tcp_info: tcpi_snd_mss, tcpi_sacked, tcpi_rtt, and since 4.1 tcpi_bytes_acked."""
_INT = struct.Struct("=i")

UNCAPPED = Caps()

Buffer = bytes | bytearray | memoryview

_log = logging.getLogger(__name__)


class StreamClosed(ConnectionError):
    """The stream is closed or broken; the message says why."""


class BytesRefused(StreamClosed):
    """Bytes that came break the rules, by the other end or by somebody in between; nothing after them is taken."""


class Stream:
    """One stream's socket: non-blocking, with a bound on stalls, safe to close from anywhere.

    A cancelled `receive_into` or `send` that has moved bytes leaves the caller's framing torn: the caller closes. The
    socket has taken `sent` bytes and given `received` ones. The `caps` bound both, with those of other streams.
    """

    def __init__(self, connection: socket.socket, buffer_bytes: int = SOCKET_BUFFER_BYTES) -> None:
        connection.setblocking(False)
        if buffer_bytes:  # 0: as the kernel sees fit.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[asyncio.Future[None], float] = {}
        self._watchdog: asyncio.TimerHandle | None = None
        self._why: str | None = None
        self._reading: asyncio.Future[None] | None = None
        self._watched = False
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._ahead = memoryview(b"")
        self._unyielded = 0
        self._wakes_at = 1
        self._final: tuple[int, int] | None = None  # What was delivered and had arrived when it closed.
        self.sent = 0
        self.received = 0
        self.caps = UNCAPPED

    @property
    def delivered(self) -> int:
        """Bytes that the other end's kernel has, encryption and handshake included; else `sent`.

        What has arrived behind a gap counts: else a lost packet would look like a pause and a sudden lump.
        """
        if self._final is not None:
            return self._final[0]
        info = _tcp_info(self._socket)
        return self.sent if info is None else info.acknowledged + info.behind_gap * info.segment

    @property
    def in_flight(self) -> int:
        """Bytes that this end's kernel holds: not sent yet, or not acknowledged."""
        return 0 if self.closed else _waiting(self._socket, termios.TIOCOUTQ)

    @property
    def rtt(self) -> float:
        """Smoothed round-trip time, in seconds; 0 where that cannot be told, as through p2pd."""
        info = None if self.closed else _tcp_info(self._socket)
        return info.rtt_us / 1e6 if info else 0.0

    @property
    def arrived(self) -> int:
        """Bytes that have come in so far, `received` and those that wait in the kernel."""
        return self.received + _waiting(self._socket) if self._final is None else self._final[1]

    @property
    def closed(self) -> bool:
        """True once the stream has been closed at this end."""
        return self._why is not None

    def close(self, why: str = "closed by this peer") -> None:
        """Close the socket and end the waits on it; idempotent."""
        if self._why is not None:
            return
        self._final = self.delivered, self.arrived
        self._why = why
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
        for waiter in self._waiters:
            wake(waiter)

    async def wait_readable(self) -> None:
        """Wait, without a bound, until there is something to read; may read ahead."""
        if not self._ahead:
            await self._look_ahead(1, None)

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view` from the stream; raises StreamClosed if the stream ended, broke, or stalled."""
        done = 0
        while (lacking := len(view) - done) > 0:
            if self._ahead:
                done += self._drain(view[done:])
            elif lacking < HEAD_BYTES:
                await self._look_ahead(lacking, STALL_SECONDS)
            else:
                done += await self._take(view[done:], lacking, STALL_SECONDS)

    def read_ahead(self, count: int) -> bytes:
        """Return the next `count` bytes if they are here already, else none."""
        ahead = self._ahead
        if len(ahead) < count:
            return b""
        self._ahead = ahead[count:]
        return bytes(ahead[:count])

    async def receive_some(self, view: memoryview) -> int:
        """Wait, without a bound, for bytes; return how many came into `view`. Raises StreamClosed if it has ended."""
        return self._drain(view) if self._ahead else await self._take(view, 1, None)

    async def send(self, head: Buffer, body: Buffer = b"") -> None:
        """Write `head` and `body`, without joining them; raises StreamClosed if it broke or the other end stalls."""
        views = [memoryview(head), memoryview(body).cast("B")] if len(body) else [memoryview(head)]
        if self.caps.upload is None:
            await self._give(views)
            return
        for view in views:
            for start in range(0, len(view), CAPPED_BYTES):
                piece = view[start : start + CAPPED_BYTES]
                await self.caps.upload.take(len(piece))
                await self._give([piece])

    async def _give(self, views: list[memoryview]) -> None:
        while views:
            sent = self._attempt(self._socket.sendmsg, views)
            if sent is None:
                await self._wait_to_write()
            else:
                self.sent += sent
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]

    async def _look_ahead(self, lacking: int, bound: float | None) -> None:
        self._ahead = self._head[: await self._take(self._head, lacking, bound)]

    def _drain(self, view: memoryview) -> int:
        """Move what was read ahead into `view`; return how much."""
        got = min(len(self._ahead), len(view))
        view[:got] = self._ahead[:got]
        self._ahead = self._ahead[got:]
        return got

    async def _take(self, view: memoryview, lacking: int, bound: float | None) -> int:
        """Wait for bytes, put those that are there into `view`, and return how many; cancelled, none are lost.

        Nobody can do anything with fewer than `lacking`: a wait may last until these are there.
        """
        if self._unyielded >= YIELD_BYTES:
            # Before and not after: there is no waiting once bytes have been taken.
            self._unyielded = 0
            await asyncio.sleep(0)
        if (cap := self.caps.download) is not None:
            view = view[:CAPPED_BYTES]
            await cap.wait()
        while (taken := self._attempt(self._socket.recv_into, view)) is None:
            self._wake_at(lacking)
            await self._wait_to_read(bound)
            self._unyielded = 0
        if taken == 0:
            raise StreamClosed("closed by the other end")
        self.received += taken
        if cap is not None:
            cap.spend(taken)
        self._unyielded += max(taken, READ_COST_BYTES)
        return taken

    def _wake_at(self, count: int) -> None:
        """Have the socket readable only once `count` bytes wait, or it has ended, or its window is full.

        Linux does so for TCP; a unix socket is readable at the first byte.
        """
        count = min(count, WAKE_BYTES)
        if count != self._wakes_at and not self.closed:
            self._wakes_at = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _attempt(self, operation: Callable[[Any], int], argument: Any) -> int | None:
        if self._why is not None:
            raise StreamClosed(self._why)
        try:
            return operation(argument)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise StreamClosed(error.strerror or str(error)) from error

    async def _wait_to_read(self, bound: float | None) -> None:
        """Wait, in one task at a time, until there may be something to read.

        The socket stays watched from one wait to the next: to register it each time would cost as much as reading.
        """
        if not self._watched and self._why is None:
            self._loop.add_reader(self._socket, self._on_readable)
            self._watched = True
        self._reading = self._loop.create_future()
        try:
            await self._wait(self._reading, bound)
        finally:
            self._reading = None

    def _on_readable(self) -> None:
        if self._reading is not None:
            wake(self._reading)
        else:
            # The reader is busy elsewhere; to stay registered would call this at every turn of the loop.
            self._loop.remove_reader(self._socket)
            self._watched = False

    async def _wait_to_write(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        if self._why is None:
            self._loop.add_writer(self._socket, wake, waiter)
        try:
            await self._wait(waiter, STALL_SECONDS)
        finally:
            if self._why is None:
                self._loop.remove_writer(self._socket)

    async def _wait(self, waiter: asyncio.Future[None], bound: float | None) -> None:
        if self._why is None:
            self._waiters[waiter] = math.inf if bound is None else self._loop.time() + bound
            if self._watchdog is None and bound is not None:
                self._watchdog = self._loop.call_later(WATCH_SECONDS, self._watch)
            try:
                await waiter
            finally:
                del self._waiters[waiter]
        if self._why is not None:
            raise StreamClosed(self._why)

    def _watch(self) -> None:
        """End the waits whose time is over. One timer serves all: to set one for each wait would cost as much as it."""
        if self._reading is not None and self._wakes_at > 1 and _waiting(self._socket):
            wake(self._reading)  # Bytes that are too few to go on with are progress all the same.
        now = self._loop.time()
        for waiter, until in self._waiters.items():
            if now >= until and not waiter.done():
                waiter.set_exception(StreamClosed(f"no progress within {STALL_SECONDS:.0f} s"))
        bounded = any(until < math.inf for until in self._waiters.values())
        self._watchdog = self._loop.call_later(WATCH_SECONDS, self._watch) if bounded else None


class _TcpInfo(NamedTuple):
    """What the kernel knows of a TCP connection.

    Attributes:
        segment: Bytes of a segment.
        behind_gap: Segments that have arrived though one before them has not.
        rtt_us: The smoothed round-trip time in microseconds.
        acknowledged: Bytes up to the first gap that have arrived.
    """

    segment: int
    behind_gap: int
    rtt_us: int
    acknowledged: int


def _tcp_info(connection: socket.socket) -> _TcpInfo | None:
    """Return what the kernel knows of a TCP connection; None where it does not tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # Not TCP.
        return None
    return None if len(info) < _TCP_INFO.size else _TcpInfo(*_TCP_INFO.unpack(info))


def _waiting(connection: socket.socket, which: int = termios.FIONREAD) -> int:
    """Return how many bytes have come in and wait to be read, or with TIOCOUTQ to be acknowledged."""
    count = bytearray(_INT.size)
    fcntl.ioctl(connection, which, count)
    return int(_INT.unpack(count)[0])


_Opened = TypeVar("_Opened", socket.socket, Stream)


@contextlib.contextmanager
def closed_on_failure(opened: _Opened) -> Iterator[_Opened]:
    """Close what was opened if the block fails, or is cancelled."""
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


async def connect_unix(path: str) -> Stream:
    """Connect to a unix socket (p2pd's control socket)."""
    with closed_on_failure(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, path)
    return Stream(connection)


async def send_message(stream: Stream, message: bytes) -> None:
    """Write one varint-delimited message."""
    await stream.send(varint(len(message)), message)


async def receive_message(stream: Stream, limit: int = PREFACE_BYTES) -> bytes:
    """Read one varint-delimited message, no byte more; raises StreamClosed if it ends or is longer than `limit`."""
    size = shift = 0
    byte = bytearray(1)
    while True:
        await stream.receive_into(memoryview(byte))
        size |= (byte[0] & 0x7F) << shift
        if size > limit or shift > 28:
            raise StreamClosed(f"expected a message of at most {limit} bytes, {size} announced")
        if not byte[0] & 0x80:
            break
        shift += 7
    message = bytearray(size)
    await stream.receive_into(memoryview(message))
    return bytes(message)


def wake(waiter: asyncio.Future[None]) -> None:
    """End a wait, unless it is over."""
    if not waiter.done():
        waiter.set_result(None)


class Acceptor:
    """Hands on the connections to one socket, a turn of the loop for each."""

    def __init__(
        self, listening: socket.socket, backlog: int, taken: Callable[[socket.socket, Any], None]
    ) -> None:
        """Begin to listen on a bound socket; `taken` gets each connection, non-blocking, and where it comes from."""
        self.socket = listening
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        listening.listen(backlog)
        self._watch()

    def close(self) -> None:
        """Stop listening."""
        self._loop.remove_reader(self.socket)
        self.socket.close()

    def _watch(self) -> None:
        if self.socket.fileno() >= 0:
            self._loop.add_reader(self.socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, address = self.socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # The socket stays readable: without a pause this would be called at every turn of the loop.
            _log.warning("cannot accept connections for now: %s", error.strerror)
            self._loop.remove_reader(self.socket)
            self._loop.call_later(PAUSE_SECONDS, self._watch)
            return
        connection.setblocking(False)
        self._taken(connection, address)
