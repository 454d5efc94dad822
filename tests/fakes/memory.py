"""A transport and a directory in memory: the ports of `equipoise.averaging` without a network."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from equipoise.averaging.ports import MAX_BODY_BYTES, MAX_HEADER_BYTES, Buffer, Channel, FrameRefused, Place


@dataclass
class Entry:
    peer: str
    spec: str
    ready: bool
    round: int
    dialable: bool
    bandwidth: float
    accumulated: float
    credential: bytes = b""
    left: bool = False
    tags: tuple[str, ...] = ()
    observes: bool = False


class Net:
    """Peers that reach each other."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self.records: dict[str, dict[str, Entry]] = {}
        self._views: dict[tuple[str, str], int] = {}
        self._looked = asyncio.Condition()

    def peer(self, name: str, dialable: bool = True) -> tuple[MemoryTransport, MemoryDirectory]:
        transport = MemoryTransport(self, name, dialable)
        self.transports[name] = transport
        return transport, MemoryDirectory(self, transport)

    async def acquainted(self, run: str, peers: Sequence[str]) -> None:
        """Wait until each of `peers` has seen as many peers in `run`."""
        async with self._looked:
            await self._looked.wait_for(
                lambda: all(self._views.get((run, peer), 0) >= len(peers) for peer in peers)
            )

    async def ready(self, run: str, peers: Sequence[str]) -> None:
        """Wait until each of `peers` has said that it waits for a group of `run`."""
        async with self._looked:
            await self._looked.wait_for(
                lambda: all(peer in (of := self.records.get(run, {})) and of[peer].ready for peer in peers)
            )

    async def view(self, run: str, peer: str) -> list[Entry]:
        """What `peer` sees of `run`."""
        entries = [entry for _, entry in sorted(self.records.get(run, {}).items())]
        async with self._looked:
            self._views[run, peer] = len(entries)
            self._looked.notify_all()
        return entries

    def kill(self, name: str) -> None:
        """As by SIGKILL: its channels break, and it cannot be dialled."""
        transport = self.transports.pop(name)
        transport.handler = None
        for channel in list(transport.channels):
            channel.close()


class MemoryChannel:
    def __init__(
        self, owner: MemoryTransport, peer: str, inbox: asyncio.Queue, outbox: asyncio.Queue
    ) -> None:
        self._owner = owner
        self._peer = peer
        self._inbox = inbox
        self._outbox = outbox
        self.closed = False
        self.punched = False
        self.delivered = self.in_flight = 0
        self.received = 0
        self.rtt = 0.0

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, header: Buffer, body: Buffer = b"") -> None:
        if len(header) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {len(header)} + {len(body)} bytes exceeds the maximum")
        if self.closed:
            raise ConnectionError(f"the channel to {self._peer} is closed")
        await self._outbox.put((bytes(header), bytes(body)))
        self.delivered += len(header) + len(body)

    async def receive(self, place: Place) -> tuple[bytes, memoryview]:
        frame = None if self.closed else await self._inbox.get()
        if frame is None or self.closed:
            self.closed = True
            raise ConnectionError(f"the channel from {self._peer} is closed")
        header, body = frame
        self.received += len(header) + len(body)
        self._owner.count_frame()
        if not body:
            return header, memoryview(b"")
        try:
            view = place(header, len(body))
        except FrameRefused:
            self.close()
            raise
        view[:] = body
        return header, view

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for queue in (self._inbox, self._outbox):
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)


class MemoryTransport:
    def __init__(self, net: Net, peer: str, dialable: bool) -> None:
        self._net = net
        self._peer = peer
        self._dialable = dialable
        self.handler: Callable[[Channel], Awaitable[None]] | None = None
        self.channels: list[MemoryChannel] = []
        self.tasks: set[asyncio.Task] = set()
        self.frames = 0
        self._awaited: list[tuple[int, asyncio.Event]] = []

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def dialable(self) -> bool:
        return self._dialable

    async def open(self, peer: str) -> Channel:
        await asyncio.sleep(0)
        other = self._net.transports.get(peer)
        if other is None or other.handler is None or not other.dialable:
            raise ConnectionError(f"cannot reach {peer}: nobody answers")
        to, back = asyncio.Queue(8), asyncio.Queue(8)
        mine, theirs = MemoryChannel(self, peer, back, to), MemoryChannel(other, self._peer, to, back)
        self.channels.append(mine)
        other.channels.append(theirs)
        task = asyncio.create_task(other.handler(theirs))
        other.tasks.add(task)
        task.add_done_callback(other.tasks.discard)
        return mine

    async def received(self, frames: int) -> None:
        """Wait until this many frames have come in."""
        event = asyncio.Event()
        self._awaited.append((frames, event))
        await event.wait()

    def count_frame(self) -> None:
        self.frames += 1
        for frames, event in self._awaited:
            if self.frames >= frames:
                event.set()

    def serve(self, handler: Callable[[Channel], Awaitable[None]] | None) -> None:
        self.handler = handler


class MemoryDirectory:
    def __init__(self, net: Net, transport: MemoryTransport) -> None:
        self._net = net
        self._transport = transport
        self.carry: Callable[[str, bytes], bool] = lambda peer, data: False
        self.received: list[tuple[str, bytes]] = []

    def receive(self, peer: str, data: bytes) -> None:
        self.received.append((peer, data))

    async def announce(
        self,
        run: str,
        *,
        spec: str,
        ready: bool,
        round: int,
        accumulated: float,
        bandwidth: float = 0.0,
        left: bool = False,
        observes: bool = False,
    ) -> None:
        peer = self._transport.peer
        self._net.records.setdefault(run, {})[peer] = Entry(
            peer,
            spec,
            ready,
            round,
            self._transport.dialable,
            bandwidth,
            accumulated,
            left=left,
            observes=observes,
        )

    async def withdraw(self, run: str) -> None:
        self._net.records.get(run, {}).pop(self._transport.peer, None)

    async def peers(self, run: str) -> Sequence[Entry]:
        return await self._net.view(run, self._transport.peer)


class FakeIdentity:
    """Signs with a hash that anyone could make: enough where nobody forges."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def sign(self, data: bytes) -> bytes:
        return hashlib.sha256(self.peer.encode() + data).digest()

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        return signature == hashlib.sha256(peer.encode() + data).digest()
