"""Channels to peers, shared by all runs and rounds of a daemon: opened when needed, kept, written by one task each.

Frames to a peer leave in order, control before bulk, so that a heartbeat never waits behind more than one part. A
frame that was posted is delivered, or the peer is reported lost. There may be more than one channel to a peer, as both
may dial at once; the newest is written to, for an older one may be all that is left of a process that died.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from equipoise.averaging.aio.buffers import BufferPool
from equipoise.averaging.ports import Buffer, Channel, FrameRefused, Transport

MAX_QUEUED_CONTROL = 4096
"""Control frames waiting for one peer; a healthy peer has a handful, one that does not read is given up."""

MAX_LINKS = 256
"""Peers with open channels. Beyond it the one unused for longest is closed; a group has at most 64 members."""

MAX_CHANNELS = 4
"""Open channels with one peer: two if both dialled at once, and as many that the other end has given up already."""

log = logging.getLogger(__name__)

Frame = tuple[bytes, Buffer]
"""Header and body."""

Bulk = Callable[[], Frame | None]
"""Makes a bulk frame when its turn has come; None if it is no longer wanted."""


class Receiver(Protocol):
    """Who is told of what comes in."""

    def place(self, peer: str, header: bytes, size: int) -> memoryview:
        """Where a body goes; raises `FrameRefused`."""

    def frame(self, peer: str, header: bytes, body: memoryview) -> None:
        """A frame has come; raises `FrameRefused`."""

    def lost(self, peer: str, reason: str, connected: bool) -> None:
        """Frames to or from `peer` may have been lost; `connected` says whether another channel to it is open."""


class _Scratch(bytearray):
    """Memory for bodies that nobody wants; a type of its own, so that it can be told from memory that may be kept."""


class _Link:
    """One peer's channels, newest last, and what waits to be sent to it."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.control: deque[bytes] = deque()
        self.bulk: deque[Bulk] = deque()
        self.writer: asyncio.Task[None] | None = None


class Mesh:
    """All channels of this daemon.

    Args:
        transport: Opens and accepts them.
        receiver: Is told of frames and losses.
    """

    def __init__(self, transport: Transport, receiver: Receiver) -> None:
        self._transport = transport
        self._receiver = receiver
        self._links: dict[str, _Link] = {}
        self._loop = asyncio.get_running_loop()
        self._readers: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.Task[None]] = set()
        self._scratch = _Scratch()
        self.pool = BufferPool()
        self._stopped = False
        transport.serve(self._accept)

    @property
    def peer(self) -> str:
        """PeerID of this daemon."""
        return self._transport.peer

    @property
    def dialable(self) -> bool:
        """Whether others can open channels to this daemon."""
        return self._transport.dialable

    def connected(self, peer: str) -> bool:
        """Whether a channel to `peer` is open."""
        link = self._links.get(peer)
        return link is not None and bool(link.channels)

    def post(self, peer: str, header: bytes) -> None:
        """Send a control frame, as soon as it can be."""
        link = self._link(peer)
        if len(link.control) >= MAX_QUEUED_CONTROL:
            self._drop(peer, f"{MAX_QUEUED_CONTROL} control frames wait for it: it does not read")
            return
        link.control.append(header)
        self._write_soon(peer, link)

    def post_bulk(self, peer: str, make: Bulk) -> None:
        """Send a bulk frame, made when its turn has come."""
        link = self._link(peer)
        link.bulk.append(make)
        self._write_soon(peer, link)

    def scratch(self, size: int) -> memoryview:
        """A buffer for a body that nobody wants; its content is undefined, and it is shared."""
        if len(self._scratch) < size:
            self._scratch = _Scratch(size)
        return memoryview(self._scratch)[:size]

    def is_scratch(self, body: memoryview) -> bool:
        """Whether a body lies where the next one may be received over it."""
        return isinstance(body.obj, _Scratch)

    async def stop(self) -> None:
        """Send what control frames can be sent at once, then close every channel."""
        self._transport.serve(None)
        if self._writers:
            await asyncio.wait(self._writers, timeout=0.5)
        self._stopped = True
        tasks = [*self._writers, *self._readers]
        for task in tasks:
            task.cancel()
        for link in self._links.values():
            for channel in link.channels:
                channel.close()
        self._links.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _link(self, peer: str) -> _Link:
        link = self._links.pop(peer, None) or _Link()
        self._links[peer] = link  # most recently used last
        if len(self._links) > MAX_LINKS:
            idle = (name for name, other in self._links.items() if other.writer is None)
            stale = next(idle, None)
            if stale is not None and stale != peer:
                self._drop(stale, f"closed: unused for longest of {MAX_LINKS} peers")
        return link

    def _write_soon(self, peer: str, link: _Link) -> None:
        if link.writer is None and not self._stopped:
            link.writer = asyncio.create_task(self._write(peer, link))
            self._writers.add(link.writer)
            link.writer.add_done_callback(self._writers.discard)
            link.writer.add_done_callback(_surface)

    async def _write(self, peer: str, link: _Link) -> None:
        try:
            while self._links.get(peer) is link and (link.control or link.bulk):
                await self._write_one(peer, link)
        except Exception as error:
            self._drop(peer, str(error))
            if not isinstance(error, ConnectionError):
                raise
        finally:
            link.writer = None

    async def _write_one(self, peer: str, link: _Link) -> None:
        if not link.channels:
            await self._open(peer, link)
        channel = link.channels[-1]
        header = link.control.popleft() if link.control else None
        try:
            if header is not None:
                await channel.send(header)
            elif frame := link.bulk.popleft()():
                await channel.send(*frame)
        except ConnectionError as error:
            if header is not None:
                link.control.appendleft(header)  # Another channel may take it.
            self._broke(channel, str(error))

    async def _open(self, peer: str, link: _Link) -> None:
        try:
            channel = await self._transport.open(peer)
        except ConnectionError:
            if not link.channels:  # Else it has dialled us meanwhile.
                raise
            return
        link.channels.append(channel)
        reader = asyncio.create_task(self._read(channel))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        reader.add_done_callback(_surface)

    async def _accept(self, channel: Channel) -> None:
        if self._stopped:
            channel.close()
            return
        link = self._link(channel.peer)
        link.channels.append(channel)
        if len(link.channels) > MAX_CHANNELS:
            self._broke(link.channels[0], f"closed: {MAX_CHANNELS} newer channels to it are open")
        await self._read(channel)

    async def _read(self, channel: Channel) -> None:
        peer = channel.peer
        try:
            while True:
                header, body = await channel.receive(
                    lambda header, size: self._receiver.place(peer, header, size)
                )
                self._receiver.frame(peer, header, body)
        except ConnectionError as error:
            self._broke(channel, str(error))
        except FrameRefused as error:
            link = self._links.get(peer)
            if link is not None and channel in link.channels:
                self._drop(peer, str(error))
        finally:
            self._broke(channel, "reading from it failed here")
            channel.close()

    def _broke(self, channel: Channel, reason: str) -> None:
        """One channel to a peer is of no more use; nothing happens if that is known."""
        peer = channel.peer
        link = self._links.get(peer)
        if link is None or channel not in link.channels:
            return
        if len(link.channels) == 1:
            self._drop(peer, reason)
            return
        link.channels.remove(channel)
        channel.close()
        link.bulk.clear()  # Its rounds send what they must again when they hear of the peer.
        self._report(peer, reason)

    def _drop(self, peer: str, reason: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        if link.writer is not None and link.writer is not asyncio.current_task():
            link.writer.cancel()
        for channel in link.channels:
            channel.close()
        self._report(peer, reason)

    def _report(self, peer: str, reason: str) -> None:
        log.debug("channel with %s: %s", peer, reason)
        # Not at once: whoever posts may be in the middle of what a round asked for, and must finish that first.
        self._loop.call_soon(self._tell_lost, peer, reason)

    def _tell_lost(self, peer: str, reason: str) -> None:
        if not self._stopped:
            self._receiver.lost(peer, reason, self.connected(peer))


def _surface(task: asyncio.Task[None]) -> None:
    """Log what a task of the mesh died of; only a bug of ours ends one by an exception."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of the mesh failed", exc_info=task.exception())
