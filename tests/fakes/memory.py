"""A transport and a directory in memory: the ports of `equipoise.averaging` without a network."""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from equipoise.averaging.ports import Buffer, Channel, FrameRefused, Place
from equipoise.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES, Candidate, Stand


async def passed(seconds: float) -> None:
    """Wait until the loop's clock, which may be a clock that jumps, is so many seconds on."""
    reached = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, reached.set)
    await reached.wait()


class Net:
    """Peers that reach each other.

    Attributes:
        latency: Seconds that a frame is under way.
        lag: Seconds until others see a record.
        loss: Share of the frames at which a channel breaks; what is under way on it is lost.
        cuts: Pairs of peers that reach each other no more.
        frozen: Peers whose records stay as they are.
        tags: The tags of peers that have some.
        blind: Peers whose records a peer does not see.
        rates: Bytes a second that a peer sends at most, over all its channels.
    """

    def __init__(self, latency: float = 0.0, lag: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self.latency, self.lag, self.loss = latency, lag, loss
        self.chance = Random(seed)
        self.cuts: set[frozenset[str]] = set()
        self.frozen: set[str] = set()
        self.tags: dict[str, tuple[str, ...]] = {}
        self.blind: dict[str, set[str]] = {}
        self.rates: dict[str, float] = {}
        self._sends_until: dict[str, float] = {}
        self.transports: dict[str, MemoryTransport] = {}
        self.records: dict[str, dict[str, Candidate]] = {}
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

    async def carry(self, peer: str, size: int) -> None:
        """Wait until `peer` has sent so many bytes more."""
        if peer in self.rates:
            sent_at = max(self._sends_until.get(peer, 0.0), _now()) + size / self.rates[peer]
            self._sends_until[peer] = sent_at
            await passed(sent_at - _now())

    async def view(self, run: str, peer: str) -> list[Candidate]:
        """What `peer` sees of `run`."""
        records, blind = self.records.get(run, {}), self.blind.get(peer, set())
        entries = [records[name] for name in sorted(records.keys() - blind)]
        async with self._looked:
            self._views[run, peer] = len(entries)
            self._looked.notify_all()
        return entries

    def cut(self, *names: str) -> None:
        """Part these peers from all others."""
        self.cuts |= {frozenset((a, b)) for a in names for b in self.transports.keys() - set(names)}
        for channel in [one for other in self.transports.values() for one in other.channels]:
            if frozenset((channel.peer, channel.owner)) in self.cuts:
                channel.close()

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
        self._net = owner.net
        self._peer = peer
        self._inbox = inbox
        self._outbox = outbox
        self.closed = False
        self.other: MemoryChannel | None = None
        self.punched = False
        self.delivered = self.in_flight = 0
        self.received = 0
        self.rtt = 0.0

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def owner(self) -> str:
        return self._owner.peer

    async def send(self, header: Buffer, body: Buffer = b"") -> None:
        if len(header) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {len(header)} + {len(body)} bytes exceeds the maximum")
        if self.closed:
            raise ConnectionError(f"the channel to {self._peer} is closed")
        if self._net.loss and self._net.chance.random() < self._net.loss:
            self.close()
            raise ConnectionError(f"the channel to {self._peer} broke")
        await self._net.carry(self.owner, len(header) + len(body))
        await self._outbox.put((bytes(header), bytes(body), _now() + self._net.latency))
        self.delivered += len(header) + len(body)

    async def receive(self, place: Place) -> tuple[bytes, memoryview]:
        frame = None if self.closed else await self._inbox.get()
        if frame is None or self.closed:
            self.close()  # Else a frame that waits to be sent would wait for ever.
            raise ConnectionError(f"the channel from {self._peer} is closed")
        header, body, due = frame
        if due > _now():
            await passed(due - _now())
            if self.closed:
                raise ConnectionError(f"the channel from {self._peer} broke")
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
        self._owner.channels.remove(self)
        is_read = self.other is None or not self.other.closed
        # A stream loses its end, never what comes before; and nobody waits to write where nobody reads.
        for queue, kept in ((self._inbox, 0), (self._outbox, 7 if is_read else 0)):
            frames = [queue.get_nowait() for _ in range(queue.qsize())]
            for frame in [*frames[:kept], None]:
                queue.put_nowait(frame)


class MemoryTransport:
    def __init__(self, net: Net, peer: str, dialable: bool) -> None:
        self.net = net
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
        await passed(2 * self.net.latency)
        other = self.net.transports.get(peer)
        severed = frozenset((peer, self._peer)) in self.net.cuts
        if other is None or other.handler is None or not other.dialable or severed:
            raise ConnectionError(f"cannot reach {peer}: nobody answers")
        to, back = asyncio.Queue(8), asyncio.Queue(8)
        mine, theirs = MemoryChannel(self, peer, back, to), MemoryChannel(other, self._peer, to, back)
        mine.other, theirs.other = theirs, mine
        self.channels.append(mine)
        other.channels.append(theirs)
        task = asyncio.create_task(other.handler(theirs), context=other.context.copy())
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
        self.handler, self.context = handler, contextvars.copy_context()


class MemoryDirectory:
    def __init__(self, net: Net, transport: MemoryTransport) -> None:
        self._net = net
        self._transport = transport
        self.carry: Callable[[str, bytes], bool] = lambda peer, data: False
        self.received: list[tuple[str, bytes]] = []

    def receive(self, peer: str, data: bytes) -> None:
        self.received.append((peer, data))

    async def announce(self, run: str, stand: Stand) -> None:
        peer = self._transport.peer
        if self._net.lag:
            await passed(self._net.lag)
        if peer in self._net.frozen:
            return
        self._net.records.setdefault(run, {})[peer] = Candidate(
            peer=peer,
            dialable=self._transport.dialable,
            tags=self._net.tags.get(peer, ()),
            **{name: getattr(stand, name) for name in Stand.__struct_fields__},
        )

    async def withdraw(self, run: str) -> None:
        if self._transport.peer not in self._net.frozen:
            self._net.records.get(run, {}).pop(self._transport.peer, None)

    async def peers(self, run: str) -> Sequence[Candidate]:
        return await self._net.view(run, self._transport.peer)


def _now() -> float:
    return asyncio.get_running_loop().time()


class FakeIdentity:
    """Signs with a hash that anyone could make: enough where nobody forges."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def sign(self, data: bytes) -> bytes:
        return hashlib.sha256(self.peer.encode() + data).digest()

    def role(self, peer: str) -> str:
        return "trainer"

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        return signature == hashlib.sha256(peer.encode() + data).digest()
