"""The asyncio driver of one run's transfers: a daemon's own download, beside what it serves."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from blake3 import blake3

from equipoise.averaging.aio.donor import TRANSFER_FRAME, Donor, flow_of, mates_of
from equipoise.averaging.aio.round_driver import Shared, group_of, mean_outcome
from equipoise.averaging.aio.search_driver import SearchDriver
from equipoise.averaging.aio.sessions import Placed, Sessions
from equipoise.averaging.counts import count
from equipoise.averaging.manifest import TICKET_BYTES, Verify
from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.replication import messages
from equipoise.averaging.replication import transfer_events as events
from equipoise.averaging.replication.answers import Request, Wish
from equipoise.averaging.replication.chunks import ImageId, is_chunk
from equipoise.averaging.replication.client import Fetch
from equipoise.averaging.replication.messages import AskItems, Item, TransferMessage, encode
from equipoise.averaging.replication.update import MAX_MANIFEST_BYTES, EncodedMean, read_head
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.tasks import Driver, TaskSet

MAX_DONORS = 64
"""Most peers that a download asks: as many as a group has. Of a larger run so many are enough, and each costs a dial
and a word a second; a directory that is flooded with names must not have all of them dialled."""

LOOK_SECONDS = 0.5
"""Time between two looks of a download into the directory. A look shows which peers have come or left."""

Room = Callable[[int], memoryview]
"""Makes room for an image, or for an encoded mean, given its bytes; called in a thread. It returns a writable view of
that size, or raises ValueError."""

log = logging.getLogger(__name__)


class Download:
    """One download of a run's state, or of a mean, within `timeout` seconds.

    Attributes:
        machine: Decides which donor is asked for which chunks.
        driver: Feeds it events.
        ended: Its outcome.
    """

    def __init__(self, request: Request, sessions: Sessions, timeout: float, room: Room) -> None:
        self._loop = asyncio.get_running_loop()
        self.machine = Fetch(request, self._loop.time(), timeout)
        self.ended: asyncio.Future[FetchOutcome] = self._loop.create_future()
        self._sessions = sessions
        self._room = room
        self._ticket = request.ticket
        self._circle = request.wish.circle
        self._image: ImageId | None = None
        self._digests = b""
        self._memory = memoryview(b"")
        self._credentials: Mapping[str, bytes] = {}
        self._due: Counter[str] = Counter()
        self._tasks = TaskSet()
        self._making: asyncio.Task[None] | None = None
        self.driver = Driver(self.machine, self._perform, events.Woke)

    def see(self, credentials: Mapping[str, bytes]) -> None:
        """Take note of the peers of the run, and of their credentials for direct channels."""
        before = self._credentials

        def lot(peer: str) -> tuple[bool, bool, bytes]:
            # It differs from download to download: no name outside of the circle is sure of a place.
            return peer not in self._circle, peer not in before, blake3(self._ticket + peer.encode()).digest()

        chosen = heapq.nsmallest(MAX_DONORS, credentials, lot)
        self._credentials = {peer: credentials[peer] for peer in chosen}
        for peer, credential in self._credentials.items():
            if credential != before.get(peer):
                self._sessions.admit(peer, credential)  # A donor opens a channel before it answers.
        self.driver.tell(events.PeersSeen(tuple(self._credentials)))

    def place(self, peer: str, message: Item, size: int) -> Placed:
        """Place a body: in a buffer of its own if it is wanted, else in scratch.

        A body never goes straight into the image: a donor that stalled in the middle of a chunk could write over one
        that another has delivered and that was verified.

        Raises:
            FrameRefused: The body has another size than it should have, or more comes than was asked for.
        """
        if message.ticket != self._ticket:
            return self._sessions.scratch(size)  # The body is of an earlier download, which is over.
        self._due[peer] -= 1
        if self._due[peer] < 0:
            raise self._broken(peer, "it sends more than it was asked for")
        image = self._image
        if image is None or not self.machine.expects(peer, message):
            return self._sessions.scratch(size)
        expected = image.length(message.item)
        if size != expected:
            raise self._broken(peer, f"expected {expected} bytes of item {message.item}, got {size}")
        return self._sessions.pool.take(size), partial(self._take, peer, message)

    def _take(self, peer: str, message: Item, body: memoryview) -> None:
        image = self._image
        if image is None or not self.machine.expects(peer, message):
            return  # Another donor has sent it since it began to come in.
        if message.item == 0:
            if genuine := image.genuine(body):
                self._digests = bytes(body)
        elif genuine := is_chunk(body, self._digests, message.item):
            self._memory[image.span(message.item)] = body
        self.driver.tell(events.BodyReceived(peer, message, genuine))

    def _perform(self, action: events.FetchAction) -> None:
        match action:
            case events.Send(peer, message):
                self._send(peer, message)
            case events.Allocate(image):
                self._image, self._digests = image, b""
                if self._making is not None:
                    self._making.cancel()
                self._making = self._tasks.spawn(self._make_room(image))
            case events.Finish(outcome):
                self._end(outcome)

    def _broken(self, peer: str, reason: str) -> FrameRefused:
        self.driver.tell(events.ProtocolBroken(peer, reason))
        return FrameRefused(reason)

    def _send(self, peer: str, message: TransferMessage) -> None:
        self._sessions.post(peer, TRANSFER_FRAME + encode(message))
        if isinstance(message, AskItems):
            if peer not in self._due:
                # By now it has admitted this peer: it has answered.
                self._sessions.enter(flow_of(self._ticket, peer), {peer: self._credentials.get(peer, b"")})
            self._due[peer] += len(message.items)

    async def _make_room(self, image: ImageId) -> None:
        try:
            self._memory = await self._loop.run_in_executor(None, self._room, image.size)
        except (ValueError, OSError, MemoryError) as error:
            self.driver.tell(events.Withdrew(str(error) or "no memory for it"))
        else:
            self.driver.tell(events.MemoryReady(image.size))

    def _end(self, outcome: FetchOutcome) -> None:
        for peer in self._due:
            self._sessions.leave(flow_of(self._ticket, peer))
        self._memory = memoryview(b"")
        self.driver.stop()
        self.ended.set_result(outcome)


class Transfer:
    """Gives and takes the state of one run, and the means that led to it.

    Args:
        search: Knows the other peers, of which no download asks one that has never said anything, and the peers that
            are to contribute to the mean after a state. It hears of each missed mean that came.

    Attributes:
        donor: What it gives.
    """

    def __init__(self, spec: RunSpec, shared: Shared, search: SearchDriver) -> None:
        self._spec = spec
        self._shared = shared
        self._sessions = shared.sessions
        self._search = search
        self._loop = asyncio.get_running_loop()
        self._download: Download | None = None
        self._tasks = TaskSet()
        self._left = ""
        self.donor = Donor(spec, shared)

    @property
    def standing(self) -> str:
        """The state that is being fetched or served, and the reason, in one line; empty if none."""
        fetching = self._download.machine.standing if self._download is not None else ""
        return "; ".join(line for line in (fetching, self.donor.standing) if line)

    async def fetch(self, wish: Wish, timeout: float, room: Room) -> FetchOutcome:
        """Get a snapshot from all peers that have it, or a mean that this peer missed.

        This peer stands at the state before the mean.

        Args:
            timeout: Seconds for everything; the outcome fails with a reason when they are over.
            room: Makes memory for the image, or for the encoded mean.

        Raises:
            ValueError: A download of this run is going on already.
        """
        if wish.after is not None:
            return await self._recover(wish, wish.after, timeout, room)
        run, ticket = self._spec.name, self._sessions.chance.randbytes(TICKET_BYTES)
        request = Request(run, self._spec.hash, ticket, wish)
        got = await self._get(request, timeout, room)
        if got.state is None:
            log.info("run %s: no state fetched: %s", run, got.reason)
        else:
            what = f"{got.size / 1e6:.1f} MB from {count(len(got.sources), 'peer')} in {got.seconds:.2f} s"
            log.info("run %s: fetched the state of epoch %d, %s (%s)", run, got.state.epoch, what, got.reason)
        return got

    async def _recover(self, wish: Wish, after: StateId, timeout: float, room: Room) -> FetchOutcome:
        self.donor.reach(after.epoch)
        spec = self._spec
        memory = own = await self.donor.image_of(after)

        def image(size: int) -> memoryview:
            nonlocal memory
            memory = memoryview(mmap.mmap(-1, size))  # It takes no memory before it is written to.
            return memory

        got = FetchOutcome(ok=True, reason="")
        if own is None:
            got = await self._get(self._question(wish, after), timeout, image)
        if got.ok:
            try:
                how = "missed, and had from others: " if own is None else "missed, and kept here: "
                args = memory or memoryview(b""), spec, after, self._shared.identity.verify, room, how
                mean, found = await self._loop.run_in_executor(None, unpack, *args)
                if own is None:
                    self.donor.keep(mean, got.age)
                got = msgspec.structs.replace(got, reason=found.reason, size=mean.size, round=found)
            except (ValueError, FrameRefused) as error:
                unheard = len(got.sources)  # They have it still.
                got = FetchOutcome(ok=False, reason=str(error), sources=got.sources, unheard=unheard)
        log.info("run %s, after epoch %d: %s", spec.name, after.epoch, got.reason)
        self._search.note_mean(got)
        return got

    def _question(self, wish: Wish, after: StateId) -> Request:
        """The question for the mean after a state."""
        spec, ticket, circle = self._spec, self._sessions.chance.randbytes(TICKET_BYTES), wish.circle
        membership, drawn = self._search.membership, frozenset(self._search.draw(after).peers)
        follows = not wish.patient and membership.crowded and not membership.observes
        follows = follows and self._sessions.peer not in drawn
        quorum = spec.strategy.quorum if spec.strategy.least or follows else 0
        if spec.strategy.least:  # Its last group may have nobody in common with the next.
            circle |= drawn
        elif follows:  # The others of its circle follow the state as it does.
            circle = circle & membership.holders or circle
        limit = spec.layout.mean_size(spec.options.group_size) + MAX_MANIFEST_BYTES
        wish = msgspec.structs.replace(wish, circle=circle, limit=limit)
        return Request(spec.name, spec.hash, ticket, wish, quorum, follows)

    def withdraw(self, reason: str) -> None:
        """End the download that is going on, if any."""
        if self._download is not None:
            self._download.driver.tell(events.Withdrew(reason))

    def retire(self) -> bool:
        """Fetch nothing more, and serve what is kept, as the trainer has left; returns whether anything is kept."""
        if not self.donor.keeps:
            return False
        self.withdraw("the run was left")
        self.donor.retire()
        return True

    def stop(self, reason: str) -> None:
        """Serve and fetch nothing more."""
        self._left = reason
        self.withdraw(reason)
        self._tasks.cancel()
        self.donor.stop()

    def place(self, peer: str, message: TransferMessage, size: int) -> Placed:
        """Place the body of a frame.

        Raises:
            FrameRefused: It is not what was asked for.
        """
        if self._download is None or not isinstance(message, Item):
            return self._sessions.scratch(size)
        return self._download.place(peer, message, size)

    def frame(self, peer: str, message: TransferMessage) -> None:
        """Take a frame without a body."""
        if isinstance(message, messages.ToNewcomer):
            if self._download is not None:
                self._download.driver.tell(events.AnswerReceived(peer, message))
        else:
            self.donor.hear(peer, message)

    def lost(self, peer: str, reason: str) -> None:
        """Note that a peer cannot be reached, and that frames to or from it are lost."""
        self.donor.lost(peer, reason)
        if self._download is not None:
            self._download.driver.tell(events.PeerLost(peer, reason))

    async def _get(self, request: Request, timeout: float, room: Room) -> FetchOutcome:
        if self._download is not None:
            raise ValueError(f"a state of run {self._spec.name!r} is being fetched already: wait for it")
        self.donor.fetching(request.wish.after is None)
        download = self._download = Download(request, self._sessions, timeout, room)
        if self._left:
            self.withdraw(self._left)
        looking = self._tasks.keep(lambda: self._look_regularly(download))
        try:
            return await asyncio.shield(download.ended)
        except asyncio.CancelledError:
            self.withdraw("cancelled")
            raise
        finally:
            self._download = None
            looking.cancel()
            self.donor.fetching(False)

    async def _look_regularly(self, download: Download) -> None:
        while True:
            mates = await mates_of(self._shared.directory, self._spec, self._sessions.peer)
            is_mute = self._search.membership.is_mute
            download.see({one.peer: one.credential for one in mates if not is_mute(one.peer)})
            await asyncio.sleep(LOOK_SECONDS)


def unpack(
    image: memoryview, spec: RunSpec, after: StateId, verify: Verify, room: Room, how: str
) -> tuple[EncodedMean, Outcome]:
    """Take the image of a mean apart, for a thread; its digest was checked. Returns it and its round's outcome.

    Args:
        after: The state that the mean must lead on from.
        verify: Checks the signatures of the members' joins.
        room: Makes room for the encoded mean, u8 [`mean_size`]; its content is undefined if this raises.
        how: What its outcome's reason begins with.

    Raises:
        ValueError: The image is no mean of this run after this state, or there is no room.
        FrameRefused: Its manifest does not decode.
    """
    manifest, contributors, payload = read_head(image)
    manifest.check(verify, spec=spec.hash, needs=spec.needs, own=None)
    if manifest.before != after:
        raise ValueError(f"expected the mean after epoch {after.epoch}, got one after {manifest.before}")
    group = group_of(spec, manifest)
    layout, givers = spec.layout, len(group.shares(contributors))
    if len(payload) != (size := layout.mean_size(givers)):
        raise ValueError(f"expected {size} bytes of encoded values, got {len(payload)}")
    sizes = [layout.codec_of(part).mean_size(part.size, givers) for part in group.parts]
    stops = list(itertools.accumulate(sizes, initial=0))
    mean = EncodedMean(
        manifest, contributors, tuple(payload[slice(*ends)] for ends in itertools.pairwise(stops))
    )
    result = room(size)
    for part, encoded in zip(group.parts, mean.parts, strict=True):
        layout.codec_of(part).check_mean(encoded, part.size, givers)
        layout.put_mean(part, givers, encoded, result)
    outcome = mean_outcome(spec, group, mean, mean.digest(), how)
    return mean, msgspec.structs.replace(outcome, bytes_received=mean.size)
