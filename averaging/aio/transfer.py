"""The asyncio driver of one run's transfers: snapshots and means that a daemon serves, and its own download."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from functools import partial

import msgspec
from blake3 import blake3

from equipoise.averaging.aio.round_driver import Rounds, group_of, mean_outcome
from equipoise.averaging.aio.search_driver import SearchDriver
from equipoise.averaging.aio.sessions import Placed, Sessions
from equipoise.averaging.counts import count
from equipoise.averaging.manifest import TICKET_BYTES, Manifest, Verify
from equipoise.averaging.matchmaking.messages import MAX_DETAIL_CHARS
from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.ports import Directory, FrameRefused
from equipoise.averaging.replication import messages
from equipoise.averaging.replication import transfer_events as events
from equipoise.averaging.replication.answers import Request, Wish
from equipoise.averaging.replication.chunks import MAX_IMAGE_BYTES, Image, ImageId, is_chunk
from equipoise.averaging.replication.client import Fetch
from equipoise.averaging.replication.messages import Ask, AskItems, Item, TransferMessage, encode
from equipoise.averaging.replication.server import Server
from equipoise.averaging.replication.update import MAX_MANIFEST_BYTES, EncodedMean, read_head
from equipoise.averaging.session.outbox import Frame
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.limits import Allowance, Candidate
from equipoise.tasks import Driver, TaskSet

TRANSFER_FRAME = b"T"
"""First byte of the header of every frame of a transfer; a message follows."""

MAX_DONORS = 64
"""Most peers that a download asks: as many as a group has. Of a larger run so many are enough, and each costs a dial
and a word a second; a directory that is flooded with names must not have all of them dialled."""

LOOK_SECONDS = 0.5
"""Time between two looks of a download into the directory. A look shows which peers have come or left."""

KEPT_BYTES = 256 * 1024 * 1024
"""Most bytes of all means that a daemon keeps, but for the last of each run, which is kept whatever its size: two of
100 million int8 values. Runs share it alike."""

IMAGE_BYTES, FEW_MEANS = 12, 8
"""Bytes of a value in an image with Adam's two moments: a peer that lacks more bytes of means takes a snapshot, so no
more are kept. But `FEW_MEANS` are, for a snapshot has to be made first."""

ASKS_SECONDS, MAX_ASKS, MAX_ASKS_OF_ONE = 0.5, 64, 8
"""Bounds how many new questions are looked up in the directory, in so many seconds: in all, and of one peer. A peer
that catches up asks for one mean after another. A question that is dropped comes again a second later."""

Room = Callable[[int], memoryview]
"""Makes room for an image, or for an encoded mean, given its bytes; called in a thread. It returns a writable view of
that size, or raises ValueError."""

log = logging.getLogger(__name__)


def flow_of(ticket: bytes, peer: str) -> bytes:
    """Return the flow of one download between this peer and another."""
    return TRANSFER_FRAME + ticket + peer.encode()


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
        verify: Checks the signatures of the joins of a mean's round.
        rounds: The daemon's rounds, which go before what is served.
        runs: The runs of the daemon, which share what means may be kept.
        search: Knows the other peers, of which no download asks one that has never said anything, and the peers that
            are to contribute to the mean after a state. It hears of each missed mean that came.
    """

    def __init__(
        self,
        spec: RunSpec,
        sessions: Sessions,
        directory: Directory,
        verify: Verify,
        rounds: Rounds,
        runs: Sized,
        search: SearchDriver,
    ) -> None:
        self._spec = spec
        self._sessions = sessions
        self._directory = directory
        self._verify = verify
        self._rounds = rounds
        self._runs = runs
        self._search = search
        self._loop = asyncio.get_running_loop()
        self._donor = Server()
        self._asks = Allowance(ASKS_SECONDS, MAX_ASKS, MAX_ASKS_OF_ONE)
        self._held: dict[bytes, Image] = {}
        self._means: dict[StateId, EncodedMean | ImageId] = {}
        self._flows: dict[str, bytes] = {}
        self._download: Download | None = None
        self._offering = asyncio.Lock()
        self._tasks = TaskSet()
        self._driver = Driver(self._donor, self._perform, lambda: events.RoundsSeen(rounds.busy))
        self._left = ""

    # ---- the face ----

    @property
    def wanted(self) -> int | None:
        """Epoch of which a newcomer wants a snapshot."""
        return self._donor.wanted

    @property
    def standing(self) -> str:
        """The state that is being fetched or served, and the reason, in one line; empty if none."""
        fetching = self._download.machine.standing if self._download is not None else ""
        return "; ".join(line for line in (fetching, self._donor.standing) if line)

    def reach(self, epoch: int) -> None:
        """Note the epoch of this peer's trainer."""
        self._driver.tell(events.EpochReached(epoch))

    async def offer(self, state: StateId, image: memoryview) -> None:
        """Serve a snapshot, once its digest is known; it takes the place of the one before.

        Returns at once, unless the digest of the one before is still being computed: so a trainer that offers too often
        waits, and no images queue.

        The image's bytes must not change; they are kept until nobody downloads them any more.

        Raises:
            ValueError: It is empty, or larger than can be served.
        """
        if not 0 < len(image) <= MAX_IMAGE_BYTES:
            raise ValueError(f"expected an image of 1 to {MAX_IMAGE_BYTES} bytes, got {len(image)}")
        await self._offering.acquire()
        if self._left:
            self._offering.release()
            return
        self._driver.tell(events.SnapshotTaken(state))
        # Not within the task: a task that is cancelled before its first step runs no line of it.
        self._tasks.spawn(self._digest(state, image)).add_done_callback(lambda _: self._offering.release())

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

    def keep(self, mean: EncodedMean, age: float = 0.0) -> None:
        """Keep a mean for peers that missed it, if it leads on from a state; its round closed `age` seconds ago."""
        before = mean.before
        if before is not None and not self._left:
            self._drop(before)
            self._means[before] = mean
            useful = max(IMAGE_BYTES * self._spec.layout.size, FEW_MEANS * mean.size)
            most = min(KEPT_BYTES // max(len(self._runs), 1), useful)
            self._driver.tell(events.MeanKept(before, mean.size, most, age))

    def begin(self, manifest: Manifest) -> None:
        """Note that a round of this run exchanges values here; the run driver calls `over` when it has ended."""
        if manifest.before is not None:
            self._driver.tell(events.RoundBegan(manifest.before))

    def over(self, outcome: object) -> None:
        """Note that the round of this run has ended."""
        self._driver.tell(events.RoundOver())

    async def _recover(self, wish: Wish, after: StateId, timeout: float, room: Room) -> FetchOutcome:
        self.reach(after.epoch)
        spec = self._spec
        memory = own = await self._own_image(after)

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
                args = memory or memoryview(b""), spec, after, self._verify, room, how
                mean, found = await self._loop.run_in_executor(None, unpack, *args)
                if own is None:
                    self.keep(mean, got.age)
                got = msgspec.structs.replace(got, reason=found.reason, size=mean.size, round=found)
            except (ValueError, FrameRefused) as error:
                unheard = len(got.sources)  # They have it still.
                got = FetchOutcome(ok=False, reason=str(error), sources=got.sources, unheard=unheard)
        log.info("run %s, after epoch %d: %s", spec.name, after.epoch, got.reason)
        self._search.note_mean(got)
        return got

    async def _own_image(self, after: StateId) -> memoryview | None:
        """The image of a mean that is kept here, if it is: this daemon was in the round without its script's state."""
        kept = self._means.get(after)
        if isinstance(kept, ImageId):
            return self._held[kept.digest].data
        return memoryview(await self._loop.run_in_executor(None, kept.image)) if kept else None

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
        if not self._means and not self._held:
            return False
        self.withdraw("the run was left")
        self._driver.tell(events.TrainerLeft())
        return True

    @property
    def kept_bytes(self) -> int:
        """Bytes of all means and snapshots that are kept."""
        means = (mean.size for mean in self._means.values() if isinstance(mean, EncodedMean))
        return sum(means) + sum(image.name.size for image in self._held.values())

    def stop(self, reason: str) -> None:
        """Serve and fetch nothing more."""
        self._left = reason
        self.withdraw(reason)
        for flow in self._flows.values():
            self._sessions.leave(flow)
        self._tasks.cancel()
        self._driver.stop()
        self._held.clear()
        self._means.clear()

    # ---- what the router tells ----

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
        elif isinstance(message, Ask) and not self._looked_up(peer, message):
            if self._asks.admits(peer, self._loop.time()):
                self._tasks.spawn(self._on_ask(peer, message))
        else:
            self._driver.tell(events.RoundsSeen(self._rounds.busy))
            self._driver.tell(events.AskReceived(peer, message))

    def lost(self, peer: str, reason: str) -> None:
        """Note that a peer cannot be reached, and that frames to or from it are lost."""
        self._driver.tell(events.PeerLost(peer, reason))
        if self._download is not None:
            self._download.driver.tell(events.PeerLost(peer, reason))

    # ---- as a donor ----

    async def _digest(self, state: StateId, data: memoryview) -> None:
        image = await self._loop.run_in_executor(None, Image.of, data)
        self._held[image.name.digest] = image
        self._driver.tell(events.SnapshotReady(state, image.name))

    async def _make_image(self, before: StateId) -> None:
        mean = self._means.get(before)
        if not isinstance(mean, EncodedMean):
            return
        image = await self._loop.run_in_executor(None, lambda: Image.of(memoryview(mean.image())))
        if self._means.get(before) is not mean:
            return  # Another has taken its place, or none.
        self._means[before] = image.name
        self._held[image.name.digest] = image
        self._driver.tell(events.MeanReady(before, image.name))

    def _drop(self, before: StateId) -> None:
        kept = self._means.pop(before, None)
        if isinstance(kept, ImageId):
            self._held.pop(kept.digest, None)

    async def _on_ask(self, peer: str, ask: Ask) -> None:
        found = next((one for one in await self._mates() if one.peer == peer), None)
        if found is None or ask.spec != self._spec.hash:
            who = "no peer of this run that is known here" if found is None else "of another spec of this run"
            self._post(peer, messages.Refusal(ask.run, ask.ticket, f"you are {who}"[:MAX_DETAIL_CHARS]))
            return
        if not self._looked_up(peer, ask):
            self._leave(peer)
            flow = self._flows[peer] = flow_of(ask.ticket, peer)
            self._sessions.enter(flow, {peer: found.credential})
        self._driver.tell(events.AskReceived(peer, ask))

    def _looked_up(self, peer: str, ask: Ask) -> bool:
        """True if this asker was found in the directory already, when it first asked for the same."""
        return ask.spec == self._spec.hash and self._flows.get(peer) == flow_of(ask.ticket, peer)

    def _perform(self, action: events.DonorAction) -> None:
        match action:
            case events.Send(peer, message):
                self._post(peer, message)
            case events.SendBody(peer, message):
                self._post_body(peer, message)
            case events.Release(image):
                self._held.pop(image.digest, None)
            case events.MakeImage(before):
                self._tasks.spawn(self._make_image(before))
            case events.Drop(before):
                self._drop(before)
            case events.Forget(peer):
                self._leave(peer)

    def _post(self, peer: str, message: TransferMessage) -> None:
        self._sessions.post(peer, TRANSFER_FRAME + encode(message))

    def _post_body(self, peer: str, message: Item) -> None:
        def sent() -> None:
            # This call takes its turn right after the body, so the server learns that the body has left.
            self._loop.call_soon(self._driver.tell, events.BodySent(peer, self._rounds.busy))

        flow = self._flows.get(peer, b"")
        self._sessions.post_bulk(peer, flow, lambda: self._make(message), late=True)
        self._sessions.post_bulk(peer, flow, sent, late=True)

    def _make(self, message: Item) -> Frame | None:
        image = self._held.get(message.digest)
        if image is None:
            return None
        body = image.data[image.name.span(message.item)] if message.item else image.digests
        return TRANSFER_FRAME + encode(message), body

    def _leave(self, peer: str) -> None:
        if flow := self._flows.pop(peer, None):
            self._sessions.leave(flow)

    # ---- looking ----

    async def _get(self, request: Request, timeout: float, room: Room) -> FetchOutcome:
        if self._download is not None:
            raise ValueError(f"a state of run {self._spec.name!r} is being fetched already: wait for it")
        self._driver.tell(events.FetchChanged(request.wish.after is None))
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
            self._driver.tell(events.FetchChanged(False))

    async def _mates(self) -> list[Candidate]:
        """The other peers of the run with the same spec."""
        found = await self._directory.peers(self._spec.name)
        return [one for one in found if one.peer != self._sessions.peer and one.spec == self._spec.hash]

    async def _look_regularly(self, download: Download) -> None:
        while True:
            mates, is_mute = await self._mates(), self._search.membership.is_mute
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
