"""Channels to peers, shared by all runs and rounds of a daemon: opened when needed, kept, written by one task each.

Frames to a peer leave in order, control before bulk, so that a heartbeat never waits behind more than one part. A
frame that was posted is delivered, or the peer is reported lost. Where a channel breaks, the control frames that may
have been lost with it are sent again, in order, and so may come twice, unless they were posted as `once`. There may be
more than one channel to a peer, as both may dial at once; the newest is written to, for an older one may be all that is
left of a process that died.

There are two kinds. Channels of the transport (libp2p streams) reach any peer. Direct ones are many times as fast and
outlive libp2p's process, and only peers that were admitted open them, as members of a group or to hand a state over: a
round first tries those (`enter`), and what it sends waits for them for a moment.

One channel and one loop are enough: a channel fills 97-99 % of a link of 200 Mbit/s, and on loopback a round keeps
every core busy to 98 %, so neither more of them nor a thread of their own had anything to win where it was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol

from equipoise.averaging.aio.bandwidth import Meter
from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.aio.fair_queue import Bulk
from equipoise.averaging.aio.link import Link, Once
from equipoise.averaging.ports import Channel, DirectTransport, FrameRefused, Transport

MAX_QUEUED_CONTROL = 4096
"""Control frames waiting for one peer; a healthy peer has a handful, one that does not read is given up."""

MAX_LINKS = 256
"""Peers with open channels. Beyond it the one unused for longest is closed; a group has at most 64 members."""

MAX_CHANNELS = 4
"""Open channels with one peer: two if both dialled at once, and as many that the other end has given up already."""

IDLE_SECONDS = 60.0
"""A channel on which nothing has moved for so long is closed; rounds are seconds apart."""

SWEEP_SECONDS = 10.0
"""Between two looks for idle channels."""

FAREWELL_SECONDS = 5.0
"""How long the other end may take to answer a farewell."""

FAREWELL = b"F"
"""The only frame of the mesh itself: whoever sends it sends nothing more on this channel, and has lost nothing. The
other end answers with the same, after all that it had sent before, and closes."""

DIRECT_SECONDS = 1.0
"""How long frames wait for a direct channel that is being opened: half of what makes a silent member look dead."""

MAX_REASON_CHARACTERS = 200
"""Of why a frame was refused: that may quote the frame."""

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who is told of what comes in."""

    def place(self, peer: str, header: bytes, size: int) -> memoryview:
        """Where a body goes; raises `FrameRefused`."""

    def frame(self, peer: str, header: bytes, body: memoryview) -> None:
        """A frame has come; raises `FrameRefused`."""

    def lost(self, peer: str, reason: str, connected: bool) -> None:
        """Frames to or from `peer` may have been lost; `connected` says whether another channel to it is open."""

    def interrupted(self, peer: str, reason: str) -> None:
        """The only channel to `peer` broke while a direct one is being opened: rounds go on by that.

        What was said outside of them, longer ago than is sent again, may have to be said anew.
        """


class _Scratch(bytearray):
    """Memory for bodies that nobody wants; a type of its own, so that it can be told from memory that may be kept."""


class Mesh:
    """All channels of this daemon.

    Args:
        transport: Opens and accepts them.
        receiver: Is told of frames and losses.
        direct: Opens and accepts faster ones between members of a group, where there is such a thing.

    Attributes:
        pool: Memory for the bodies of frames.
        meter: Measures what this peer can send.
    """

    def __init__(
        self, transport: Transport, receiver: Receiver, direct: DirectTransport | None = None
    ) -> None:
        self.pool = BufferPool()
        self.meter = Meter(self._delivered, self._sending)
        self._transport = transport
        self._receiver = receiver
        self._direct = direct
        self._links: dict[str, Link] = {}
        self._rounds: dict[bytes, frozenset[str]] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._delivered_before = 0
        self._scratch = _Scratch()
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
        """Whether others can open channels to this daemon."""
        return self._transport.dialable

    @property
    def credential(self) -> bytes:
        """What others need to open direct channels with this daemon; empty if it has none."""
        return b"" if self._direct is None else self._direct.credential

    def connected(self, peer: str) -> bool:
        """Whether a channel to `peer` is open."""
        link = self._links.get(peer)
        return link is not None and bool(link.channels)

    def received(self, peer: str) -> int:
        """Bytes that have come from `peer` while it was linked, those of a frame that is not complete included."""
        link = self._links.get(peer)
        return 0 if link is None else link.received

    def enter(self, flow: bytes, credentials: dict[str, bytes]) -> None:
        """A round begins with these peers: admit them to direct channels, and open those that we can open.

        Args:
            flow: The round's id, which `post_bulk` names and `leave` ends.
            credentials: By PeerID, what the peer said of its direct channels; empty if nothing.
        """
        self._rounds[flow] = frozenset(credentials)
        for peer, credential in credentials.items():
            if self.admit(peer, credential):
                self._dial_soon(peer)

    def meet(self, peers: Iterable[str]) -> None:
        """What has been entered is a round with these, and no mere transfer."""
        if self._direct is not None:
            for peer in peers:
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

    def leave(self, flow: bytes) -> None:
        """The round is over: what bulk it still wanted to send is not sent."""
        for peer in self._rounds.pop(flow, ()):
            if link := self._links.get(peer):
                link.queue.drop_bulk(flow)

    def post(self, peer: str, header: bytes, once: bool = False) -> None:
        """Send a control frame, as soon as it can be.

        Args:
            peer: Whom to.
            header: All of it.
            once: Whether it must not come twice: then the peer is reported lost where others would be sent again.
        """
        link = self._link(peer)
        if len(link.queue.control) >= MAX_QUEUED_CONTROL:
            self._drop(peer, f"{MAX_QUEUED_CONTROL} control frames wait for it: it does not read")
            return
        link.queue.control.append(Once(header) if once else header)
        self._write_soon(peer, link)

    def post_bulk(self, peer: str, flow: bytes, make: Bulk, late: bool = False) -> None:
        """Send a bulk frame of a round, made when its turn has come; a `late` one after all that are not."""
        link = self._link(peer)
        link.queue.add_bulk(flow, make, late)
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
        if self._direct is not None:
            self._direct.serve(None)
        for link in self._links.values():
            link.patience = 0.0
            link.news.set()
        writers = [link.writer for link in self._links.values() if link.writer is not None]
        if writers:
            await asyncio.wait(writers, timeout=0.5)
        self._stopped = True
        self.meter.stop()
        self._sweeper.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            for channel in link.channels:
                channel.close()
        self._links.clear()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- links ----

    def _link(self, peer: str) -> Link:
        link = self._links.pop(peer, None) or Link()
        self._links[peer] = link  # most recently used last
        if len(self._links) > MAX_LINKS:
            stale = next((name for name, other in self._links.items() if self._unused(name, other)), None)
            if stale is not None and stale != peer:
                self._drop(stale, f"closed: unused for longest of {MAX_LINKS} peers")
        return link

    def _dial_soon(self, peer: str) -> None:
        link, direct = self._link(peer), self._direct
        if direct is not None and direct.reaches(peer) and link.dials(self._loop.time(), DIRECT_SECONDS):
            link.dialling = self._spawn(self._dial(direct, peer, link))

    async def _dial(self, direct: DirectTransport, peer: str, link: Link) -> None:
        try:
            channel = await direct.open(peer)
        except ConnectionError as error:
            link.dialled_in_vain(self._loop.time())
            log.info("no direct channel to %s, using libp2p: %s", peer, error)
        else:
            self._enter(link, channel, True)
        finally:
            link.dialling = None
            link.news.set()

    def _enter(self, link: Link, channel: Channel, direct: bool) -> None:
        """Read from a channel that was opened here, unless its link was dropped meanwhile."""
        if self._links.get(channel.peer) is not link or self._stopped:
            channel.close()
            return
        link.add(channel, direct)
        self._spawn(self._read(channel))

    async def _accept(self, channel: Channel, direct: bool) -> None:
        if self._stopped:
            channel.close()
            return
        link = self._link(channel.peer)
        link.add(channel, direct)
        alike = link.direct if direct else link.streams
        if len(alike) > MAX_CHANNELS:
            self._broke(alike[0], f"closed: {MAX_CHANNELS} newer channels to it are open")
        await self._read(channel)

    # ---- idle channels ----

    def _unused(self, peer: str, link: Link) -> bool:
        return link.writer is None and not any(peer in members for members in self._rounds.values())

    def _sweep(self) -> None:
        for peer, link in list(self._links.items()):
            for channel in link.idle(self._loop.time(), IDLE_SECONDS):
                if self._unused(peer, link):
                    link.remove(channel)
                    self._spawn(self._retire(channel))
        self._sweeper = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    async def _retire(self, channel: Channel) -> None:
        """Say farewell; what the other end had sent before it heard of it is still read."""
        try:
            await channel.send(FAREWELL)
            await asyncio.sleep(FAREWELL_SECONDS)
        except ConnectionError as error:
            log.debug("idle channel with %s: %s", channel.peer, error)
        finally:
            channel.close()

    async def _part(self, channel: Channel) -> None:
        """The other end has said farewell: answer, unless that was its answer."""
        link = self._links.get(channel.peer)
        if link is not None and channel in link.channels:
            link.remove(channel)
            await channel.send(FAREWELL)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Only a bug of ours ends a task by an exception.
            log.error("a task of the mesh failed", exc_info=task.exception())

    # ---- writing ----

    def _write_soon(self, peer: str, link: Link) -> None:
        if link.writer is None and not self._stopped:
            link.writer = self._spawn(self._write(peer, link))

    async def _write(self, peer: str, link: Link) -> None:
        try:
            while self._links.get(peer) is link and link.queue:
                await self._write_one(peer, link)
        except Exception as error:
            self._drop(peer, str(error))
            if not isinstance(error, ConnectionError):
                raise
        finally:
            link.writer = None

    async def _write_one(self, peer: str, link: Link) -> None:
        channel = link.direct[-1] if link.direct else await self._reach(peer, link)
        if channel is None:
            return
        control = link.queue.control
        header = control.popleft() if control else None
        frame = link.queue.next_bulk() if header is None else (header,)
        if frame is None:
            return
        link.begin(channel, header)
        if header is None:
            self.meter.start()
        try:
            await channel.send(*frame)
            link.wrote(channel, header, self._loop.time())
        except ConnectionError as error:
            self._broke(channel, str(error))
            if link.under_way is not None:
                self._missed(peer, link, header, str(error))

    def _missed(self, peer: str, link: Link, control: bytes | None, reason: str) -> None:
        """What was being written did not arrive, on a channel that counted no more: it was closed as idle meanwhile."""
        link.under_way = None
        if control is not None:
            link.queue.control.appendleft(control)
        else:
            link.queue.drop_bulk()
            self._report(peer, reason)

    async def _reach(self, peer: str, link: Link) -> Channel | None:
        """The channel to write to while no direct one is open; None to look again."""
        if link.dialling is not None and (left := link.patience - self._loop.time()) > 0:
            # The peer may be faster, where only it can dial.
            link.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.news.wait(), left)
            return None
        if not link.streams:
            await self._open(peer, link)
            return None
        return link.streams[-1]

    async def _open(self, peer: str, link: Link) -> None:
        """Dial, until that succeeds or fails or the peer has dialled us."""
        opening = asyncio.create_task(self._transport.open(peer))
        arrival = asyncio.create_task(link.arrived.wait())
        try:
            await asyncio.wait({opening, arrival}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if opening.done() and not opening.exception():
                opening.result().close()
            raise
        finally:
            arrival.cancel()
            opening.cancel()  # Nothing happens if it is done.
        if opening.done():
            error = opening.exception()
            if error is None:
                self._enter(link, opening.result(), False)
            elif not link.channels:
                raise error

    def _delivered(self) -> int:
        return self._delivered_before + sum(link.delivered for link in self._links.values())

    def _sending(self) -> bool:
        return any(link.queue.has_bulk for link in self._links.values())

    # ---- reading ----

    async def _read(self, channel: Channel) -> None:
        peer = channel.peer
        place = functools.partial(self._receiver.place, peer)
        try:
            while True:
                header, body = await channel.receive(place)
                if header == FAREWELL:
                    await self._part(channel)
                    return
                self._receiver.frame(peer, header, body)
        except ConnectionError as error:
            self._broke(channel, str(error))
        except FrameRefused as error:
            link = self._links.get(peer)
            if link is not None and channel in link.channels:
                reason = str(error)[:MAX_REASON_CHARACTERS]
                log.info("dropped %s: %s", peer, reason)
                self._drop(peer, reason)
        finally:
            self._broke(channel, "reading from it failed here")
            channel.close()

    def _broke(self, channel: Channel, reason: str) -> None:
        """One channel to a peer is of no more use; nothing happens if that is known."""
        peer = channel.peer
        link = self._links.get(peer)
        if link is None or channel not in link.channels:
            return
        again, more = link.unsettled(channel, self._loop.time())
        alone = len(link.channels) == 1
        if alone and more:
            self._drop(peer, reason)
            return
        link.remove(channel)
        channel.close()
        link.queue.control.extendleft(reversed(again))
        if more:
            link.queue.drop_bulk()  # Its rounds send what they must again when they hear of the peer.
            self._report(peer, reason)
        elif alone:
            self._loop.call_at(link.patience, self._give_up, peer, link, link.patience, reason)
            self._tell_soon(functools.partial(self._receiver.interrupted, peer, reason))
        if again:
            log.debug("channel with %s: %s; %d frames are sent again", peer, reason, len(again))
            self._write_soon(peer, link)

    def _give_up(self, peer: str, link: Link, patience: float, reason: str) -> None:
        if self._links.get(peer) is not link or link.channels or link.patience != patience:
            return
        # A writer is opening a channel, or is about to, and reports the peer if it cannot.
        if link.writer is None:
            self._drop(peer, reason)

    def _drop(self, peer: str, reason: str) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        for task in (link.writer, link.dialling):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for channel in link.channels:
            link.remove(channel)
            channel.close()
        self._delivered_before += link.delivered
        self._report(peer, reason)

    def _report(self, peer: str, reason: str) -> None:
        log.debug("channel with %s: %s", peer, reason)
        self._tell_soon(functools.partial(self._receiver.lost, peer, reason, self.connected(peer)))

    def _tell_soon(self, tell: Callable[[], None]) -> None:
        """Not at once: whoever posts may be in the middle of what a round asked for, and must finish that first."""
        self._loop.call_soon(lambda: None if self._stopped else tell())
