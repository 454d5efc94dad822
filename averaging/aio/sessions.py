"""Sessions with other daemons, shared by all runs and rounds of a daemon: dialled when needed, kept, written by one
task each.

Frames to a peer leave in order, control before bulk, so that a heartbeat never waits behind more than one part. A frame
that was posted is delivered once, whatever happens to channels, or the peer is reported lost. There may be more than
one channel to a peer, as both may dial at once. Frames go to the newest channel, because an older one may belong to a
process that has died.

There are two kinds of channels. Those of the transport (libp2p streams) reach any peer. Direct ones are many times as
fast and outlive libp2p's process, and only peers that were admitted open them, as members of a group or to hand a state
over. A round first tries those (`enter`), and what it sends waits for them for a moment.

One channel and one loop are enough: a channel fills 97-99 % of a link of 200 Mbit/s, and on loopback a round keeps
every core busy to 98 %. More channels, or a thread for them, gave no measurable gain.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from random import Random, SystemRandom
from typing import Protocol

from equipoise.averaging.aio.bandwidth import LinkMeter
from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.aio.peer_channels import PeerChannels
from equipoise.averaging.ports import Channel, DirectTransport, FrameRefused, Transport
from equipoise.averaging.session import messages as wire
from equipoise.averaging.session.machine import SESSION_BYTES, Session
from equipoise.averaging.session.outbox import Bulk, Frame
from equipoise.averaging.timing import DIRECT_SECONDS
from equipoise.tasks import TaskSet, sleep_until

MAX_QUEUED_CONTROL = 4096
"""Most control frames that wait for one peer. A healthy peer has a handful; a peer that does not read is given up."""

MAX_UNACKNOWLEDGED = 4096
"""Most frames to one peer without an acknowledgement. A link of 1 GB/s and 300 ms has 1,200 parts under way."""

MAX_PEERS = 256
"""Most peers with a session; a group has at most 64 members. Beyond it the one unused for longest is closed, strangers
before peers that this one has been in a round with."""

MAX_CHANNELS = 4
"""Most open channels of a kind with one peer: two if both dialled at once, and as many that the peer has given up."""

MAX_OPEN = 256
"""Most open channels in all, but for those in use. Beyond it, the unused peer with the most loses one for each that
comes. The transports hold twice as many, so that there is always room to open one, however many strangers come."""

SWEEP_SECONDS = 10.0
"""Time between two looks for idle channels."""


FAREWELL_SECONDS = 5.0
"""Longest time for the other end's answer to a farewell."""

HELLO_SECONDS = 10.0
"""Longest time that a channel is kept whose other end says no hello."""

MAX_REASON_CHARACTERS = 200
"""Most characters of the reason why a frame was refused, for it may quote the frame."""

log = logging.getLogger(__name__)


Placed = tuple[memoryview, Callable[[memoryview], None]]
"""Where the body of a frame goes, and what takes it once it is whole, which may raise `FrameRefused`."""


class Receiver(Protocol):
    """Is told of what comes in, each frame once and in order."""

    def place(self, peer: str, header: bytes, size: int) -> Placed:
        """Place the body of a frame, which has begun to come in; raises `FrameRefused`."""

    def frame(self, peer: str, header: bytes) -> None:
        """Take a frame without a body; raises `FrameRefused`."""

    def lost(self, peer: str, reason: str, gone: bool) -> None:
        """No channel to `peer` can be opened: frames to it are lost, but for those of rounds, which wait.

        If it is `gone`, its session is over, and frames of rounds may be lost in both directions too.
        """


class Sessions:
    """All sessions and channels of this daemon.

    Args:
        transport: Opens and accepts channels.
        receiver: Is told of frames and losses.
        direct: Opens and accepts faster ones between members of a group, where there is such a thing.
        chance: Makes the names of sessions, joins and downloads; by default such that nobody can guess them.
        caps: Most bytes per second that this peer sends, and receives, as others are told; 0 for no cap.

    Attributes:
        pool: Memory for the bodies of frames.
        chance: This daemon's source of chance.
        meter: Measures this peer's link.
    """

    def __init__(
        self,
        transport: Transport,
        receiver: Receiver,
        direct: DirectTransport | None = None,
        chance: Random | None = None,
        caps: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.pool = BufferPool()
        self.chance = chance or SystemRandom()
        self._transport = transport
        self._receiver = receiver
        self._direct = direct
        self._peers: dict[str, PeerChannels] = {}
        self.meter = LinkMeter(self._peers.values(), caps)
        self._flows: dict[bytes, frozenset[str]] = {}
        self._rounds: set[bytes] = set()
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskSet()
        self._scratch = bytearray()
        self._sweeper = self._loop.call_later(SWEEP_SECONDS, self._sweep)
        self._stopped = False
        transport.serve(lambda channel: self._accept(channel, False))
        if direct is not None:
            direct.serve(lambda channel: self._accept(channel, True))

    @property
    def peer(self) -> str:
        """PeerID of this daemon."""
        return self._transport.peer

    @property
    def dialable(self) -> bool:
        """True if others can open channels to this daemon."""
        return self._transport.dialable

    @property
    def credential(self) -> bytes:
        """The credential by which other peers open direct channels with this daemon; empty without direct channels."""
        return b"" if self._direct is None else self._direct.credential

    def received(self, peer: str) -> int:
        """Bytes that have come from `peer` in its session, those of a frame that is not complete included."""
        channels = self._peers.get(peer)
        return 0 if channels is None else channels.received

    def rtt(self, peer: str) -> float:
        """Round-trip time of the channels with `peer`, in seconds; 0 where that is not known."""
        channels = self._peers.get(peer)
        return 0.0 if channels is None else max((channel.rtt for channel in channels.direct), default=0.0)

    # ---- flows ----

    def enter(self, flow: bytes, credentials: Mapping[str, bytes], round: bool = False) -> None:
        """Begin a flow with some peers: admit them to direct channels, and open those that this daemon can open.

        Args:
            flow: A round's id or a transfer's name, which frames name and `leave` ends.
            credentials: By PeerID, what the peer said of its direct channels; empty if nothing.
            round: True for a round: its frames wait while no channel is open, and channels are worth effort.
        """
        self._flows[flow] = frozenset(credentials)
        if round:
            self._rounds.add(flow)
        for peer, credential in credentials.items():
            self.approach(peer, credential)
        for peer in credentials.keys() - {self.peer} if round else ():
            self._get(peer).met = True
            if self._direct is not None:
                self._direct.meet(peer)

    def admit(self, peer: str, credential: bytes) -> bool:
        """Accept direct channels from `peer`, which may open one; returns whether it is admitted."""
        if self._direct is None or not credential or peer == self.peer:
            return False
        try:
            self._direct.admit(peer, credential)
        except ValueError as error:
            log.warning("no direct channels with %s: %s", peer, error)
            return False
        return True

    def approach(self, peer: str, credential: bytes) -> None:
        """Admit a peer to direct channels, and open one if this daemon can."""
        if self.admit(peer, credential):
            self._dial_soon(peer)

    def leave(self, flow: bytes) -> None:
        """End a flow: the bulk that it still wanted to send is not sent."""
        self._rounds.discard(flow)
        for peer in self._flows.pop(flow, ()):
            if channels := self._peers.get(peer):
                channels.outbox.drop_bulk(flow)

    # ---- frames ----

    def reaches(self, peer: str) -> bool:
        """True if a channel to `peer` is open, so that frames need not wait for one."""
        channels = self._peers.get(peer)
        return channels is not None and channels.best() is not None

    def post(self, peer: str, header: bytes, flow: bytes = b"") -> None:
        """Send a control frame as soon as possible."""
        channels = self._get(peer)
        if len(channels.outbox.control) >= MAX_QUEUED_CONTROL:
            self._drop(peer, f"{MAX_QUEUED_CONTROL} control frames wait for it: it does not read")
            return
        channels.outbox.control.append((flow, header))
        self._write_soon(peer, channels)

    def beat(self, peer: str, header: bytes) -> None:
        """Send a control frame without a number: it goes first, may get lost, and waits only once."""
        channels = self._get(peer)
        channels.outbox.beats[header] = None
        self._write_soon(peer, channels)

    def post_bulk(self, peer: str, flow: bytes, make: Bulk, late: bool = False) -> None:
        """Send a bulk frame of a flow, made when its turn has come; a `late` one after all that are not."""
        channels = self._get(peer)
        channels.outbox.add_bulk(flow, make, late)
        self._write_soon(peer, channels)

    def scratch(self, size: int) -> Placed:
        """Place a body that nobody wants in a buffer that is shared, and whose content is undefined."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size], lambda body: None

    async def stop(self) -> None:
        """Send what control frames can be sent at once, then close every channel."""
        self._transport.serve(None)
        if self._direct is not None:
            self._direct.serve(None)
        for channels in self._peers.values():
            channels.patience = 0.0
            channels.news.set()
        writers = [channels.writer for channels in self._peers.values() if channels.writer is not None]
        if writers:
            await asyncio.wait(writers, timeout=0.5)
        self._stopped = True
        self._sweeper.cancel()
        self.meter.stop()
        for channels in self._peers.values():
            for channel in channels.channels:
                channel.close()
        self._peers.clear()
        await self._tasks.stop()

    # ---- dialling ----

    def _get(self, peer: str) -> PeerChannels:
        channels = self._peers.pop(peer, None) or PeerChannels(self.chance.randbytes(SESSION_BYTES))
        self._peers[peer] = channels  # most recently used last
        if len(self._peers) > MAX_PEERS:
            unused = [
                name for name, other in self._peers.items() if name != peer and self._unused(name, other)
            ]
            if stale := min(unused, key=lambda name: self._peers[name].met, default=None):
                self._drop(stale, f"closed: unused for longest of {MAX_PEERS} peers")
        return channels

    def _dial_soon(self, peer: str) -> None:
        channels, direct = self._get(peer), self._direct
        if direct is not None and direct.reaches(peer) and channels.dials(self._loop.time(), DIRECT_SECONDS):
            channels.dialling = self._tasks.spawn(self._dial(direct, peer, channels))

    async def _dial(self, direct: DirectTransport, peer: str, channels: PeerChannels) -> None:
        channel: Channel | None = None
        try:
            channel = await direct.open(peer)
        except ConnectionError as error:
            channels.dialled_in_vain(self._loop.time())
            log.info("no direct channel to %s, using libp2p: %s", peer, error)
        finally:
            channels.dialling = None
            channels.news.set()
        if channel is not None:
            self._enter(channels, channel, True)
        elif channels.redials and channels.writer is None:
            self._unreachable(peer, channels, "no direct channel")

    def _enter(self, channels: PeerChannels, channel: Channel, direct: bool) -> None:
        """Read from a channel that was opened here, unless its session ended meanwhile."""
        if self._peers.get(channel.peer) is not channels or self._stopped:
            channel.close()
            return
        channels.add(channel, direct)
        self._tasks.spawn(self._read(channels, channel, True))

    async def _accept(self, channel: Channel, direct: bool) -> None:
        if self._stopped:
            channel.close()
            return
        channels = self._get(channel.peer)
        channels.add(channel, direct)
        alike = channels.direct if direct else channels.streams
        if len(alike) > MAX_CHANNELS:
            self._broke(channels, alike[0])
        self._make_room()
        # Neither end has dialled a channel through a hole: that of the lesser PeerID says hello first.
        await self._read(channels, channel, channel.punched and self.peer < channel.peer)

    # ---- idle channels ----

    def _unused(self, peer: str, channels: PeerChannels) -> bool:
        return channels.writer is None and not any(peer in members for members in self._flows.values())

    def _sweep(self) -> None:
        for peer, channels in list(self._peers.items()):
            for channel in channels.idle(self._loop.time()):
                if self._unused(peer, channels):
                    channels.remove(channel)
                    self._tasks.spawn(self._retire(channels, channel, FAREWELL_SECONDS))
        self._sweeper = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def _make_room(self) -> None:
        if sum(len(one.channels) for one in self._peers.values()) > MAX_OPEN:
            spare = (one for peer, one in self._peers.items() if one.channels and self._unused(peer, one))
            if most := max(spare, key=lambda one: len(one.channels), default=None):
                channel = most.channels[0]
                most.remove(channel)
                self._tasks.spawn(self._retire(most, channel, 0.0))

    async def _retire(self, channels: PeerChannels, channel: Channel, seconds: float) -> None:
        """Say farewell; what the other end had sent before it heard of it is still read for some seconds."""
        try:
            await channel.send(channels.outbox.farewell())
            await asyncio.sleep(seconds)
        except ConnectionError as error:
            log.debug("idle channel with %s: %s", channel.peer, error)
        finally:
            channel.close()

    # ---- writing ----

    def _write_soon(self, peer: str, channels: PeerChannels) -> None:
        if channels.writer is None and not self._stopped:
            channels.writer = self._tasks.spawn(self._write(peer, channels))

    async def _write(self, peer: str, channels: PeerChannels) -> None:
        channel = None
        try:
            while self._peers.get(peer) is channels and (channels.redials or channels.outbox):
                if channel is None or channels.news.is_set():
                    channel = await self._reach(peer, channels)
                else:
                    await self._write_one(peer, channels, channel)
        except ConnectionError as error:
            self._unreachable(peer, channels, str(error))
        finally:
            channels.writer = None

    async def _write_one(self, peer: str, channels: PeerChannels, channel: Channel) -> None:
        frame = channels.outbox.next_frame(channel)
        if frame is None:
            return
        if channels.outbox.session.unacknowledged > MAX_UNACKNOWLEDGED:
            self._drop(peer, f"it has not acknowledged {MAX_UNACKNOWLEDGED} frames")
            return
        if frame[1]:
            self.meter.sends()
        try:
            await channel.send(*frame)
        except ConnectionError:
            self._broke(channels, channel)

    async def _reach(self, peer: str, channels: PeerChannels) -> Channel | None:
        """Return the channel to write to until there is news, or None; raises ConnectionError if none can be opened."""
        channels.news.clear()
        channel = channels.best()
        # A direct channel may soon be there: it is being opened, or both ends have not said hello yet.
        opening = channels.dialling is not None or not channels.greeted.issuperset(channels.direct)
        left = channels.patience - self._loop.time() if opening else 0.0
        if channel in channels.direct or (channel is not None and left <= 0):
            return channel
        if left > 0:  # The peer may be faster, where only it can dial.
            await sleep_until(channels.news, left)
        elif channels.channels:
            await channels.news.wait()  # Until both have said hello.
        else:
            await self._open(peer, channels)
        return None

    async def _open(self, peer: str, channels: PeerChannels) -> None:
        """Dial, until that succeeds or fails or the peer has dialled this daemon."""
        opening = asyncio.create_task(self._transport.open(peer))
        opening.add_done_callback(lambda _: channels.news.set())
        try:
            while not opening.done() and not channels.channels:
                channels.news.clear()
                await channels.news.wait()
        except asyncio.CancelledError:
            if opening.done() and not opening.exception():
                opening.result().close()
            raise
        finally:
            opening.cancel()  # Nothing happens if it is done.
        if opening.done():
            error = opening.exception()
            if error is None:
                self._enter(channels, opening.result(), False)
            elif not channels.channels:
                raise error

    # ---- reading ----

    async def _read(self, channels: PeerChannels, channel: Channel, dialled: bool) -> None:
        try:
            await self._greet(channels, channel, dialled)
            await self._receive(channels, channel)
        except (ConnectionError, TimeoutError) as error:
            why = str(error) or f"no hello came within {HELLO_SECONDS:g} s"
            log.debug("channel with %s: %s", channel.peer, why)
        except FrameRefused as error:
            if channel in channels.channels:
                reason = str(error)[:MAX_REASON_CHARACTERS]
                log.info("dropped %s: %s", channel.peer, reason)
                self._drop(channel.peer, reason)
        finally:
            self.meter.received(channel)
            self._broke(channels, channel)
            channel.close()

    async def _greet(self, channels: PeerChannels, channel: Channel, dialled: bool) -> None:
        """Exchange hellos; the end that was dialled answers, so that it knows what the other one knows."""
        if dialled:
            await channel.send(wire.encode_hello(channels.outbox.session.hello()))
        async with asyncio.timeout(HELLO_SECONDS):
            hello = wire.decode_hello((await channel.receive(_refuse_body))[0])
        if not channels.outbox.session.greet(hello):
            self._begin_anew(channels, channel)
            if dialled:
                raise ConnectionError("the other end has begun another session")
            channels.outbox.session.greet(hello)
        if not dialled:
            await channel.send(wire.encode_hello(channels.outbox.session.hello()))
        channels.greeted.add(channel)
        channels.news.set()
        self._write_soon(channel.peer, channels)

    def _begin_anew(self, channels: PeerChannels, channel: Channel) -> None:
        """The other end knows nothing of the session: its process is another one, or it has dropped this peer."""
        for other in channels.channels:
            if other is not channel:
                channels.remove(other)
                other.close()
        channels.greeted.clear()
        channels.outbox.begin_anew(self.chance.randbytes(SESSION_BYTES))
        self._tell_lost(channel.peer, "it has begun another session", gone=True)

    async def _receive(self, channels: PeerChannels, channel: Channel) -> None:
        peer, session = channel.peer, channels.outbox.session
        _, take = self.scratch(0)

        def place(header: bytes, size: int) -> memoryview:
            nonlocal take
            memory, take = self._place(session, channel, header, size)
            return memory

        while True:
            header, body = await channel.receive(place)
            self.meter.received(channel)
            if channels.outbox.session is not session or self._peers.get(peer) is not channels:
                return
            kind, number, acknowledged = wire.decode_envelope(header)
            deliver = session.take(number, acknowledged)
            if kind == wire.FAREWELL:
                if channel in channels.channels:  # Else that was the answer to this end's own farewell.
                    channels.remove(channel)
                    await channel.send(channels.outbox.farewell())
                return
            if deliver and body:
                take(body)
            elif deliver and len(header) > wire.ENVELOPE_BYTES:
                self._receiver.frame(peer, header[wire.ENVELOPE_BYTES :])
            if session.acknowledges:
                self._write_soon(peer, channels)

    def _place(self, session: Session[Frame], channel: Channel, header: bytes, size: int) -> Placed:
        _, number, _ = wire.decode_envelope(header)
        self.meter.receives(channel)
        if number <= session.delivered:
            return self.scratch(size)
        return self._receiver.place(channel.peer, header[wire.ENVELOPE_BYTES :], size)

    # ---- losses ----

    def _broke(self, channels: PeerChannels, channel: Channel) -> None:
        """Drop one channel to a peer, and dial again if it was the last; do nothing if it was dropped before."""
        peer = channel.peer
        if channel not in channels.channels:
            return
        channels.remove(channel)
        channel.close()
        if not channels.channels:
            channels.redials = True
            if self._rounds_with(peer):
                self._dial_soon(peer)
        self._write_soon(peer, channels)

    def _unreachable(self, peer: str, channels: PeerChannels, reason: str) -> None:
        """No channel is open, and none can be opened now."""
        if self._peers.get(peer) is not channels or channels.channels:
            return
        channels.redials = channels.dialling is not None
        if channels.redials:
            return  # A direct channel may yet be opened.
        if rounds := self._rounds_with(peer):
            channels.outbox.drop_all_but(rounds)
            self._tell_lost(peer, reason, gone=False)
        else:
            self._drop(peer, reason)

    def _drop(self, peer: str, reason: str) -> None:
        """End the session with a peer."""
        channels = self._peers.pop(peer, None)
        if channels is None:
            return
        for task in (channels.writer, channels.dialling):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for channel in channels.channels:
            channels.remove(channel)
            channel.close()
        self.meter.drop(channels)
        self._tell_lost(peer, reason, gone=True)

    def _rounds_with(self, peer: str) -> set[bytes]:
        return {flow for flow in self._rounds if peer in self._flows[flow]}

    def _tell_lost(self, peer: str, reason: str, gone: bool) -> None:
        """Tell the receiver soon: a round that posts may be in the middle of what its machine asked for."""
        log.debug("%s cannot be reached: %s", peer, reason)
        tell = functools.partial(self._receiver.lost, peer, reason, gone)
        self._loop.call_soon(lambda: None if self._stopped else tell())


def _refuse_body(header: bytes, size: int) -> memoryview:
    raise FrameRefused(f"expected a hello without a body, got {size} bytes")
