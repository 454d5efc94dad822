"""The asyncio driver of one run's transfers: snapshots and means that it serves, the download that it may be at."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from equipoise.averaging.aio import update_verification
from equipoise.averaging.aio.download import TRANSFER_FRAME, Download, Examine, Room, flow_of
from equipoise.averaging.aio.sessions import Sessions
from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.manifest import Manifest, Verify
from equipoise.averaging.matchmaking.messages import MAX_DETAIL_CHARS
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.ports import Candidate, Directory
from equipoise.averaging.rate_limit import Allowance
from equipoise.averaging.session.fair_queue import Frame
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId, group_state
from equipoise.averaging.statesync.chunks import MAX_IMAGE_BYTES, ImageId, digests_of
from equipoise.averaging.statesync.client import Request
from equipoise.averaging.statesync.events import (
    AskReceived,
    BodySent,
    DonorEvent,
    Drop,
    EpochReached,
    FetchBegan,
    FetchEnded,
    MakeImage,
    MeanKept,
    MeanReady,
    PeerLost,
    Release,
    RoundBegan,
    RoundOver,
    RoundsSeen,
    Send,
    SendBody,
    SnapshotReady,
    SnapshotTaken,
    TrainerLeft,
)
from equipoise.averaging.statesync.messages import (
    Answer,
    Ask,
    Bulk,
    Chunk,
    Refusal,
    ToDonor,
    ToNewcomer,
    TransferMessage,
    encode,
)
from equipoise.averaging.statesync.outcome import FetchOutcome, MeanOutcome
from equipoise.averaging.statesync.quorum_proof import Circle, Prove
from equipoise.averaging.statesync.server import Server
from equipoise.averaging.statesync.update import EncodedMean, MeanError

LOOK_SECONDS = 0.5
"""Between two reads of the directory's cache during a download: who has come, and who has gone."""

KEPT_BYTES = 256 * 1024 * 1024
"""Of all means that a daemon keeps, but the last of each run, which is kept whatever its size: two of 100 million int8
values. Runs share it alike."""

ASKS_SECONDS, MAX_ASKS, MAX_ASKS_OF_ONE = 0.5, 64, 4
"""Bounds how many new questions are looked up in the directory, in so many seconds: in all, and of one peer. A peer
that catches up asks for one mean after another. A question that is dropped comes again a second later."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A snapshot's bytes and the digests of its chunks."""

    image: memoryview
    digests: bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    """A mean, or the image that has been made of it, and what tells the votes for it."""

    mean: EncodedMean | ImageId
    prove: Prove


class Transfer:
    """State of one run, and the means that led to it, given and taken.

    Args:
        spec: The run.
        sessions: Sends frames.
        directory: Who else is in the run.
        verify: Checks the signatures under a mean.
        busy: Whether a round exchanges at this daemon now.
        runs: How many runs share what means may be kept.
        is_mute: Whether a peer did not answer, and has never said anything: no download asks it, or waits for it.
    """

    def __init__(
        self,
        spec: RunSpec,
        sessions: Sessions,
        directory: Directory,
        verify: Verify,
        busy: Callable[[], bool] = lambda: False,
        runs: Callable[[], int] = lambda: 1,
        is_mute: Callable[[str], bool] = lambda peer: False,
    ) -> None:
        self._spec = spec
        self._sessions = sessions
        self._directory = directory
        self._verify = verify
        self._busy = busy
        self._runs = runs
        self._is_mute = is_mute
        self._loop = asyncio.get_running_loop()
        self._donor = Server()
        self._asks = Allowance(ASKS_SECONDS, MAX_ASKS, MAX_ASKS_OF_ONE)
        self._held: dict[bytes, _Held] = {}
        self._means: dict[StateId, _Kept] = {}
        self._circle = self._attended = Circle()
        self._flows: dict[str, bytes] = {}
        self._download: Download | None = None
        self._offering = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._left = ""

    # ---- the face ----

    @property
    def wanted(self) -> int | None:
        """Epoch of which a newcomer wants a snapshot."""
        return self._donor.wanted

    @property
    def values(self) -> int:
        """Of a mean of this run, padding included."""
        return self._spec.layout.size

    @property
    def standing(self) -> str:
        """What is being fetched or served, and why, in one line; empty if nothing."""
        fetching = self._download.standing if self._download is not None else ""
        return "; ".join(line for line in (fetching, self._donor.standing) if line)

    def reach(self, epoch: int) -> None:
        """This peer's trainer stands at that epoch."""
        self._tell(EpochReached(epoch))

    async def offer(self, state: StateId, image: memoryview) -> None:
        """Serve a snapshot, once its digest is known; it takes the place of the one before.

        Returns at once, unless the digest of the one before is still being computed: so a trainer that offers too often
        waits, and no images queue.

        Args:
            state: What it is a snapshot of.
            image: Its bytes, not to be changed; kept until nobody downloads it any more.

        Raises:
            ValueError: It is empty, or larger than can be served.
        """
        if not 0 < len(image) <= MAX_IMAGE_BYTES:
            raise ValueError(f"expected an image of 1 to {MAX_IMAGE_BYTES} bytes, got {len(image)}")
        await self._offering.acquire()
        if self._left:
            self._offering.release()
            return
        self._tell(SnapshotTaken(state))
        # Not within the task: one that is cancelled before its first step runs nothing of its own.
        self._spawn(self._digest(state, image)).add_done_callback(lambda _: self._offering.release())

    async def fetch(
        self, at_least: int, limit: int, timeout: float, room: Room, among: frozenset[str] = frozenset()
    ) -> FetchOutcome:
        """Download a snapshot of epoch `at_least` or later from all who have it.

        Args:
            at_least: The first epoch that is of use.
            limit: Most bytes of the image.
            timeout: Seconds for everything; the outcome fails with a reason when they are over.
            room: Makes memory for the image.
            among: PeerIDs of the only peers to take it from, while any of them is there.

        Raises:
            ValueError: A download of this run is going on already.
        """
        name, ticket = self._spec.name, Download.ticket()
        request = Request(name, self._spec.hash, ticket, at_least, limit, circle=among)
        self._require_idle()
        self._tell(FetchBegan())
        try:
            download = await self._get(request, timeout, room)
        finally:
            self._tell(FetchEnded())
        outcome = download.outcome.result()
        if outcome.ok:
            self._circle = Circle(outcome.state, download.voters)
        log.info("run %s: %s", self._spec.name, _told(outcome))
        return outcome

    def keep(self, mean: EncodedMean, prove: Prove) -> None:
        """A round has come to a mean: keep it for those who missed it, if there is a state that it leads on from."""
        before = mean.before
        if before is not None and not self._left:
            self._circle = self._circle.ended(before, mean.manifest, self._sessions.peer)
            self._attended = Circle.attended(before, mean.manifest, self._sessions.peer)
            self._drop(before)
            self._means[before] = _Kept(mean, prove)
            self._tell(MeanKept(before, mean.size, KEPT_BYTES // max(self._runs(), 1)))

    def begin(self, manifest: Manifest) -> None:
        """A round of this run exchanges values here; `over` is called when it has ended."""
        self._circle = self._circle.begun(manifest, self._sessions.peer)
        before = group_state(join.state for join in manifest.members if join.state is not None)
        if before is not None:
            self._tell(RoundBegan(before))

    def over(self, outcome: object) -> None:
        """It has ended."""
        self._tell(RoundOver())

    async def recover(
        self,
        after: StateId,
        timeout: float,
        result: Callable[[], torch.Tensor],
        proved: bool = False,
        patient: bool = False,
    ) -> MeanOutcome:
        """Get the mean that the group applied to the state `after`, where this peer missed it.

        Args:
            after: A state.
            timeout: Seconds for everything.
            result: Makes room for the mean, f32 [D], once it is here and proved; called in a thread.
            proved: Whether who asks will know by its digest whether it is the group's; if not, this peer stands at that
                state, and those tell by whom it knows it.
            patient: Where nobody has it: whether to wait for those who are not as far.

        Raises:
            ValueError: A download of this run is going on already.
        """
        if not proved:
            self.reach(after.epoch)
            if self._attended.knows(after) and not self._circle.knows(after):
                self._circle = self._attended
        found: list[Outcome] = []
        wanted = update_verification.Wanted(self._spec, after, None if proved else self._circle)

        async def examine(image: memoryview, proofs: Sequence[Commit]) -> str:
            decode = partial(update_verification.decode, image, wanted, proofs, self._verify, result)
            try:
                found.append(await self._loop.run_in_executor(None, decode))
            except MeanError as error:
                return str(error)
            return ""

        ticket, limit = Download.ticket(), update_verification.most_bytes(self._spec)
        near = self._circle.peers
        request = Request(self._spec.name, self._spec.hash, ticket, 0, limit, after, near, patient, proved)
        download = await self._get(request, timeout, update_verification.room, examine)
        got = download.outcome.result()
        if got.ok and not proved:
            self._circle = self._circle.followed(after)
        round_ = found[-1] if got.ok else Outcome(ok=False, reason=got.reason, run=self._spec.name)
        log.info("run %s, after epoch %d: %s", self._spec.name, after.epoch, round_.reason)
        return MeanOutcome(round=round_, sources=got.sources, behind=got.behind, unheard=got.unheard)

    def withdraw(self, reason: str) -> None:
        """End the download that is going on, if any."""
        if self._download is not None:
            self._download.withdraw(reason)

    def retire(self) -> bool:
        """Fetch nothing more, and serve what is kept, as the trainer has left; returns whether anything is kept."""
        if not self._means and not self._held:
            return False
        self.withdraw("the run was left")
        self._tell(TrainerLeft())
        return True

    @property
    def kept_bytes(self) -> int:
        """Bytes of all means and snapshots that are kept."""
        means = (kept.mean.size for kept in self._means.values() if isinstance(kept.mean, EncodedMean))
        return sum(means) + sum(len(held.image) for held in self._held.values())

    def stop(self, reason: str) -> None:
        """Serve and fetch nothing more."""
        self._left = reason
        self.withdraw(reason)
        for flow in self._flows.values():
            self._sessions.leave(flow)
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._held.clear()
        self._means.clear()

    # ---- what the router tells ----

    def place(self, peer: str, message: TransferMessage, size: int) -> memoryview:
        """Where the body of a frame goes.

        Raises:
            FrameRefused: It is not what was asked for.
        """
        if self._download is None or not isinstance(message, Bulk):
            return self._sessions.scratch(size)
        return self._download.place(peer, message, size)

    def frame(self, peer: str, message: TransferMessage, body: memoryview) -> None:
        """A frame has come."""
        if isinstance(message, ToNewcomer):
            if self._download is not None:
                self._download.frame(peer, message, body)
        elif isinstance(message, Ask):
            if self._looked_up(peer, message):
                self._tell(AskReceived(peer, message))
            elif self._asks.admits(peer, self._loop.time()):
                self._spawn(self._on_ask(peer, message))
        else:
            self._tell(RoundsSeen(self._busy()))
            self._tell(AskReceived(peer, message))

    def lost(self, peer: str, reason: str) -> None:
        """Frames to or from a peer may have been lost."""
        self._tell(PeerLost(peer, reason))
        if self._download is not None:
            self._download.lost(peer, reason)

    # ---- as a donor ----

    async def _digest(self, state: StateId, image: memoryview) -> None:
        digests = await self._loop.run_in_executor(None, digests_of, image)
        if not self._left:
            name = ImageId.of(len(image), digests)
            self._held[name.digest] = _Held(image, digests)
            self._tell(SnapshotReady(state, name))

    async def _make_image(self, before: StateId) -> None:
        kept = self._means.get(before)
        if kept is None or isinstance(kept.mean, ImageId):
            return
        made: update_verification.Imaged | None = None
        try:
            made = await self._loop.run_in_executor(None, update_verification.Imaged.of, kept.mean)
        except MemoryError:
            name, epoch = self._spec.name, before.epoch
            log.warning("run %s: the mean after epoch %d is not passed on: no memory", name, epoch)
        if self._means.get(before) is not kept:
            return  # Another has taken its place, or none.
        if made is not None:
            self._means[before] = _Kept(made.name, kept.prove)
            self._held[made.name.digest] = _Held(made.image, made.digests)
        self._tell(MeanReady(before, None if made is None else made.name))

    def _drop(self, before: StateId) -> None:
        kept = self._means.pop(before, None)
        if kept is not None and isinstance(kept.mean, ImageId):
            self._held.pop(kept.mean.digest, None)

    async def _on_ask(self, peer: str, ask: Ask) -> None:
        found = next((one for one in await self._mates() if one.peer == peer), None)
        if found is None or ask.spec != self._spec.hash:
            known = (
                "no peer of this run that is known here" if found is None else "of another spec of this run"
            )
            self._post(peer, Refusal(ask.run, ask.ticket, f"you are {known}"[:MAX_DETAIL_CHARS]))
            return
        if not self._looked_up(peer, ask):
            self._leave(peer)
            flow = self._flows[peer] = flow_of(ask.ticket, peer)
            self._sessions.enter(flow, {peer: found.credential})
        self._tell(AskReceived(peer, ask))

    def _looked_up(self, peer: str, ask: Ask) -> bool:
        """Whether this asker was found in the directory already, when it first asked for the same."""
        return ask.spec == self._spec.hash and self._flows.get(peer) == flow_of(ask.ticket, peer)

    def _wake(self) -> None:
        self._tell(RoundsSeen(self._busy()))

    def _tell(self, event: DonorEvent) -> None:
        if self._left:
            return
        for action in self._donor.handle(event, self._loop.time()):
            match action:
                case Send(peer, message):
                    self._post(peer, message)
                case SendBody(peer, message):
                    self._post_body(peer, message)
                case Release(image):
                    self._held.pop(image.digest, None)
                case MakeImage(before):
                    self._spawn(self._make_image(before))
                case Drop(before):
                    self._drop(before)
        for peer in [peer for peer in self._flows if not self._donor.serves(peer)]:
            self._leave(peer)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._donor.deadline != float("inf"):
            self._timer = self._loop.call_at(self._donor.deadline, self._wake)

    def _post(self, peer: str, message: ToDonor | ToNewcomer) -> None:
        if isinstance(message, Answer):
            message = self._proved(message)
        self._sessions.post(peer, TRANSFER_FRAME + encode(message))

    def _proved(self, answer: Answer) -> Answer:
        """With all votes for the mean that it offers that are known by now."""
        image = answer.offers[0].image if answer.offers else None
        prove = next((one.prove for one in self._means.values() if one.mean == image), None)
        return answer if prove is None else msgspec.structs.replace(answer, proof=prove())

    def _post_body(self, peer: str, message: Bulk) -> None:
        flow = self._flows.get(peer, b"")
        self._sessions.post_bulk(peer, flow, lambda: self._make(message), late=True)
        self._sessions.post_bulk(peer, flow, lambda: self._sent(peer), late=True)

    def _make(self, message: Bulk) -> Frame | None:
        held = self._held.get(message.digest)
        if held is None:
            return None
        header = TRANSFER_FRAME + encode(message)
        if isinstance(message, Chunk):
            name = ImageId(message.digest, len(held.image))
            return header, held.image[name.span(message.chunk)]
        return header, held.digests

    def _sent(self, peer: str) -> None:
        """Takes its turn after a body: that one has left."""
        self._loop.call_soon(self._tell, BodySent(peer, self._busy()))

    def _leave(self, peer: str) -> None:
        if flow := self._flows.pop(peer, None):
            self._sessions.leave(flow)

    # ---- looking ----

    def _require_idle(self) -> None:
        if self._download is not None:
            raise ValueError(f"a state of run {self._spec.name!r} is being fetched already: wait for it")

    async def _get(
        self, request: Request, timeout: float, room: Room, examine: Examine | None = None
    ) -> Download:
        self._require_idle()
        download = self._download = Download(request, self._sessions, timeout, room, examine)
        if self._left:
            download.withdraw(self._left)
        looking = self._spawn(self._look_regularly(download))
        try:
            await asyncio.shield(download.outcome)
            return download
        except asyncio.CancelledError:
            download.withdraw("cancelled")
            raise
        finally:
            self._download = None
            looking.cancel()

    async def _mates(self) -> list[Candidate]:
        """The other peers of the run with the same spec."""
        found = await self._directory.peers(self._spec.name)
        return [one for one in found if one.peer != self._sessions.peer and one.spec == self._spec.hash]

    async def _look_regularly(self, download: Download) -> None:
        while True:
            mates = await self._mates()
            download.see({one.peer: one.credential for one in mates if not self._is_mute(one.peer)})
            await asyncio.sleep(LOOK_SECONDS)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("run %s: a background task failed", self._spec.name, exc_info=task.exception())


def _told(outcome: FetchOutcome) -> str:
    if not outcome.ok or outcome.state is None:
        return f"no state fetched: {outcome.reason}"
    megabytes = outcome.size / 1e6
    return (
        f"fetched the state of epoch {outcome.state.epoch}, {megabytes:.1f} MB from {len(outcome.sources)} peers "
        f"in {outcome.seconds:.2f} s ({outcome.reason})"
    )
