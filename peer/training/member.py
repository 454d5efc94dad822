"""One peer's part in a training whose state all peers hold alike: it performs the actions of its `Follower`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from equipoise.averaging.counts import count
from equipoise.averaging.metrics import Evaluation
from equipoise.averaging.outcome import Exchanging, FetchOutcome, Idle, NoPeers, Outcome
from equipoise.averaging.replication import events
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.replication.follower import (
    ATTENDANCE,
    FIRST_SNAPSHOT,
    MAX_MISSED,
    MEETING_WEIGHT,
    Follower,
    FollowerOptions,
)
from equipoise.averaging.replication.lineage import beginning
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.peer.client.accumulate import Accumulator
from equipoise.peer.client.futures import PendingRound
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.client.tensors import Gradients, named_gradients
from equipoise.peer.errors import Refused
from equipoise.peer.training.downloads import FETCH_SECONDS, RECOVER_SECONDS, Downloads
from equipoise.peer.training.image import Image, TrainingState, digest
from equipoise.peer.training.options import CommonOptions
from equipoise.peer.training.progress import ProgressLine
from equipoise.tasks import Driver

CATCH_UP_SECONDS = 5.0
"""Longest time that a step of the training loop waits to find the group's state; then the loop goes on."""

ATTEND_SECONDS = 60.0
"""Longest time that a peer waits to attend a round, which begins when the others have made their batch. A group closes
early for a member whose time is half over, so a peer that attends a slow swarm's round needs much time."""

POLL_SECONDS = 0.05
"""Time between two looks at the download, while a peer waits for a round."""

LOOK_AHEAD_SECONDS = 3.0
"""Longest time that a step of the loop waits for the mean of a round that failed here. The peer needs it now, because
its gradients of that round must not count twice. If it takes longer, the next round tells."""

GONE_SECONDS = 0.25
"""Longest time until a step that waits for a group notices that the last other peer has left."""

SERVE_SECONDS = 0.5
"""Time between two looks, while a peer seeks the group's state, whether it has a place, and newcomers want a state."""

MIN_CONTRIBUTORS = 2
"""Contributors of a mean, before a round has told."""

SMALL_BYTES = 1024 * 1024
"""Bytes of a snapshot below which missed means are fetched first, whatever their size: a snapshot has to be made."""

WAIT_SECONDS = 60.0
"""Longest wait for other peers to join. Sixteen processes that import torch on two cores take half of that time."""

NOTICE_SECONDS = 10.0
"""Longest wait for other peers before a script says what it waits for: they may have joined on other terms."""

LEAST_SECONDS = 0.1
"""Least time for the last look, question or exchange, when the time for all of them is over."""

FINISH_SECONDS = 10.0
"""Longest time, in seconds, that a peer that ends stays for the others: enough for a stalled round, or the snapshot of
a small model. The peer leaves at once if all others are as far."""

log = logging.getLogger(__name__)


class Finished(NamedTuple):
    """The end of a training.

    Attributes:
        in_step: Whether this peer ends with the group's last state, as far as it knows.
        reason: Reason for that, one line.
    """

    in_step: bool
    reason: str

    def without(self, samples: float) -> Finished:
        """The same end; says that the model has no use of the last samples."""
        told = f"{samples:g} samples that no round counted"
        return Finished(self.in_step, f"{self.reason}; {told}") if samples > ATTENDANCE_LIMIT else self


class Member:
    """Accumulates gradients, takes part in rounds, applies means, fetches and offers snapshots.

    Attributes:
        last: The last outcome; after an update made alone, an outcome that is not ok and says so.
        outcomes: Number of rounds that have ended.
        gave: Whether the last round has a contribution of this peer, which observes the others.
        limit: Most bytes that an image of the state takes.
        clock: Seconds on a steady clock.
    """

    def __init__(
        self,
        run: JoinedRun,
        state: TrainingState,
        options: CommonOptions,
        update: Callable[[Mapping[str, torch.Tensor], StateId, Outcome | None], None],
        target: float | None = None,
    ) -> None:
        """Take part.

        Args:
            state: The whole state that all peers hold alike.
            update: Applies the update that all peers apply alike. Takes the mean, fp32, by name, the state before it,
                and the outcome of its round, None if this peer is alone.
            target: Samples, of all peers together, that make an update. Without a target, the loop's steps decide when
                a round is due. Then this peer also attends rounds while it fetches missed means: only the end of a
                round tells at which step the others are.
        """
        self.last: Outcome | None = None
        self.outcomes = 0
        self.limit = state.model.limit
        state.require_writable()
        self._run = run
        self._state = state
        self._update = update
        self._contributors = MIN_CONTRIBUTORS
        self._options, self._seconds = options, options.timeout
        self._target = target
        self.clock = run.core.clock
        start = beginning(state.digest())
        self._start_from(start)
        self._whole: StateId | None = start
        self._own: Accumulator | None = None
        self._pending: PendingRound | None = None
        self.gave = self._asks = False
        self._claimed: StateId | None = None
        self._news: deque[events.Event] = deque()
        self._downloads = Downloads(run, state)
        self._progress = ProgressLine(run.name)
        self._ends_at: float | None = None
        self._offered = -1
        self._told = ""
        self._waits = ""
        self._served_at = self.clock()
        self._looks_from: StateId | None = None
        self._why_alone = ""

    @property
    def id(self) -> StateId:
        """Id of the state that this peer holds."""
        return self._follower.state

    @property
    def in_step(self) -> bool:
        """Whether that is the group's state, as far as this peer knows."""
        return self._follower.follows

    @property
    def behind(self) -> bool:
        """Whether this peer knows that the group holds another state."""
        return self._follower.behind

    @property
    def reason(self) -> str:
        """The reason for this peer's phase, and warnings, one line."""
        return "; ".join(filter(None, (self._follower.reason, self._why_alone, self._waits)))

    @property
    def pending(self) -> bool:
        """Whether a round goes on."""
        return self._pending is not None

    @property
    def round_done(self) -> bool:
        """Whether `collect` would not have to wait: no round goes on, or it has ended."""
        return self._pending is None or self._pending.done()

    @property
    def accumulated(self) -> float:
        """Weight accumulated here towards the next update."""
        return self._run.accumulated if self.in_step else (self._own.weight if self._own else 0.0)

    def accumulate(self, gradients: Gradients, weight: float) -> None:
        """Add weight * gradient to the next contribution. Unless in step, keep it here until the state is the group's.

        A peer that waits for a place adds nothing: `reason` says so.

        Raises:
            SchemaError: A gradient has a wrong shape, or holds NaN or Inf; nothing was added.
        """
        if self._waits:
            return
        if self.in_step:
            self._run.accumulate(gradients, weight)
            return
        if self._own is None:
            self._own = Accumulator(self._state.model.tensors)
        self._own.add(named_gradients(gradients), weight)

    def serve(self) -> float:
        """Offer a snapshot if a newcomer wants one; returns the weight that the swarm has accumulated."""
        progress, self._served_at = self._run.progress(self._target), self.clock()
        self._offer(progress.wanted)
        if progress.waits != self._waits:
            self._waits = progress.waits
            self.drop()
            self._tell()
        return progress.swarm

    def show(self, part: str) -> None:
        """Show on a terminal where the training is; `part` says how far the next update is."""
        self._progress.show(self.id.epoch, part, self.last)

    @property
    def waits(self) -> bool:
        """Whether this peer has no place in the group, and only follows its state."""
        return bool(self._waits)

    def drop(self) -> None:
        """Forget the accumulated gradients."""
        self._own = None
        self._run.take()

    def written(self, reason: str) -> None:
        """Note that the script has written to the state: no other peer holds it, and no gradient of before fits it."""
        self.drop()
        self._hear(events.Written(self._state.digest(), reason))

    def finish(self, timeout: float = FINISH_SECONDS) -> Finished:
        """End together with the others, within `timeout` seconds: collect the open round, catch up with means that this
        peer missed, and stay while others are not as far, because they may have missed a mean.
        """
        deadline = self.clock() + timeout
        while not self.ends(deadline):
            pass
        self._state.model.restore()
        return self.ended()

    def ends(self, deadline: float) -> bool:
        """Do one step of `finish`, which must end at `deadline`; return whether it has ended."""
        now = self.clock()
        if self._pending is not None and self.gave and self._claimed == self.id:
            if not self.has_company():
                self._stop_search()
            if not self._pending.wait(max(min(POLL_SECONDS, deadline - now), 0.0)):
                return now >= deadline
            self.collect()
        if now >= deadline:
            return True
        self.serve()
        return self._has_all(deadline)

    def ended(self) -> Finished:
        """Return the end of the training, and stop downloads that have not ended."""
        self._ends_at = None
        self._progress.clear()
        self._downloads.stop()
        self._hear(events.Stopped())
        behind, unheard = self._downloads.behind, self._downloads.unheard
        notes = [self.reason]
        notes += [f"{count(behind, 'peer')} not as far"] if behind else []
        notes += [f"{count(unheard, 'peer')} did not say"] if unheard else []
        return Finished(self.in_step, "; ".join(notes))

    def _has_all(self, deadline: float) -> bool:
        """Look for means after this peer's state; returns whether no peer has more."""
        self._ends_at = deadline
        if self._pending is not None and self._pending.done():
            self.collect()
        if not self._downloads.busy:
            self._hear(events.Ending())
        if not self._downloads.busy:
            return True
        self._downloads.wait(POLL_SECONDS)
        recovering, event = self._downloads.recovering, self._downloads.ended()
        if event is None:
            return False
        self._hear(event)
        return recovering and event.outcome.round is None and not self._follower.behind

    def find_group(self, seconds: float = CATCH_UP_SECONDS) -> None:
        """For at most `seconds`: find out whether this peer holds the group's state, and catch up if it does not."""
        deadline = self.clock() + seconds
        while not self.in_step:
            company = self.has_company()
            if not company and not self._downloads.busy:
                break
            left = min(POLL_SECONDS, max(deadline - self.clock(), 0.0))
            if not company:
                self._downloads.wait(left)
                self._look_for_download()
            else:
                if self._pending is None:
                    self._attend()
                elif self.clock() >= self._served_at + SERVE_SECONDS:
                    self.serve()
                if self._waits:  # The group has no room for it: only a snapshot can bring the state.
                    self._hear(events.Overdue(max(FIRST_SNAPSHOT, self.id.epoch)))
                self.wait(left)
            if self.clock() >= deadline or (self._follower.gives_up and not self.pending):
                break
        self._look_for_download()  # The snapshot that put this peer in step may be older than the group's last mean.
        late = self._run.core.strategy.late == "next"
        made_good = self.in_step and (self._target is not None or self.waits or late)
        if self._pending is not None and not self.gave and (made_good or not self.has_company()):
            self._stop_search()
            if late:  # Where the others are in their steps does not matter: this peer may be late.
                self.collect()
                self._await_mean()

    def look_back(self) -> None:
        """Catch up with the means that the others have left behind, now that no other peer is known."""
        self._hear(events.Deserted())

    def meet(self, wait: bool = True, seconds: float | None = None, whole: bool = True) -> None:
        """Make the due update, with the group or alone, if the follower says so; `wait=False` only starts the round.

        The round has `seconds`; by default the option `timeout`. Unless its contribution is `whole`, this peer makes no
        update of it alone.
        """
        before, self._looks_from = self._pending, self.id
        self._seconds = self._options.timeout if seconds is None else seconds
        if self._waits and self._downloads.recovering:
            self._await_mean()
        self._hear(events.Due(self.has_company(), not self._waits, whole))
        if wait and self._pending is not before:
            self.collect()

    def collect(self) -> None:
        """Wait for the open round and handle its outcome; stop waiting if this peer gets to a later state meanwhile."""
        if self._pending is None or not self._comes(self._pending):
            return
        pending, self._pending = self._pending, None
        outcome = pending.result()
        if pending.stopped and not outcome.group and not outcome.late:
            return  # This peer itself ended the search.
        self.last = outcome
        self.outcomes += 1
        of, was_in_step = outcome.state, self.in_step
        moved = was_in_step and self._claimed != self.id
        if outcome.ok and moved and of is not None and of.epoch < self.id.epoch:
            return  # A download has brought a later state: this mean is of no more use.
        missing = 0
        self._contributors = len(outcome.shares) or self._contributors
        missed = outcome.late or (outcome.ok and outcome.state != self.id)
        if outcome.ok and isinstance(state := self._run.state, Idle):
            # The number of known peers that were not in the group, and for which it had places. While its members begin
            # from different parameters, the next group may have other members.
            alike = 2 * sum(one == outcome.state for one in outcome.states.values()) > len(outcome.states)
            most = state.peers + 1
            if alike or not self._run.core.strategy.batches:
                most = min(most, self._run.options.group_size)
            missing = max(most - len(outcome.group), 0)
        awaits = outcome.ok and self._follower.known.awaits(outcome)
        elsewhere = awaits and self._run.progress(self._target).awaited
        self._hear(events.RoundEnded(outcome, missing, elsewhere, self._most_missed() if missed else None))
        if not outcome.ok and self._downloads.recovering:
            self._await_mean()  # Asked for before the round ended. The next contribution needs it.
        if was_in_step != self.in_step:
            self._move_accumulated()
        if self.in_step and not self._downloads.recovering:
            self._downloads.stop()  # It needs no snapshot any more.

    def _most_missed(self) -> int:
        """The number of means, each of as many contributors as the last, that are together no larger than a snapshot.

        It is 0 if the snapshot is the smaller one.
        """
        snapshot, layout = self._state.size(), self._run.core.binding.steps.layout
        return MAX_MISSED if snapshot < SMALL_BYTES else snapshot // layout.mean_size(self._contributors)

    def _comes(self, pending: PendingRound) -> bool:
        """Wait for a round; returns whether it has ended. If not, a download has brought its mean meanwhile."""
        before, since = self.id, self.clock()
        while not pending.wait(GONE_SECONDS):
            self._look_for_download()
            state, now = self._run.state, self.clock()
            if isinstance(state, Exchanging):
                continue
            if isinstance(state, NoPeers):
                self._stop_search()
            elif self.gave and self._ends_at is None and now - since >= LOOK_AHEAD_SECONDS:
                self._hear(events.Overdue())
                since = self.clock()
            if self.id != before:
                self._stop_search()
                return False
        return True

    def _stop_search(self, why: str = "") -> None:
        """End the search for a group if none has formed: this peer does not need the round any more."""
        if self._pending is not None and not self._pending.stopped:
            caught_up = "this peer has caught up with the group"
            self._pending.stop_search(why or (caught_up if self.in_step else "no other peer is left"))

    # ---- rounds that last for minutes: none of these calls waits for one ----

    def give(
        self,
        gradients: Mapping[str, torch.Tensor],
        weight: float,
        seconds: float,
        metrics: Mapping[str, float],
        evaluation: Evaluation | None,
    ) -> None:
        """Begin a round with this contribution alone; this peer is in step, and no round goes on. See `Run.step`.

        Raises:
            SchemaError: A gradient has a wrong shape, or holds NaN or Inf; no round has begun.
        """
        self._run.take()
        self._run.accumulate(gradients, weight)
        self._start(seconds, metrics, evaluation)
        self.gave = True

    def observe(self, seconds: float, evaluation: Evaluation | None) -> None:
        """Begin a round without a contribution, unless one goes on; a peer that knows no group's state attends it."""
        if self._pending is None:
            self._begin_attending(ATTENDANCE if self._follower.joins else 0.0, seconds, evaluation)

    def wait(self, seconds: float) -> None:
        """Wait for the open round for a moment, and handle the ends of the round and of a download."""
        if self._pending is not None and self._pending.wait(seconds):
            self.collect()
        self._look_for_download()

    def withdraw(self, why: str) -> None:
        """End the search for a group, or collect the round that has begun."""
        self._stop_search(why)
        self.collect()

    def look_ahead(self, at_least: int = 0) -> None:
        """Look for the others' state: a mean that this peer lacks, or a snapshot if it knows no group's state.

        Such a snapshot is of epoch `at_least`.
        """
        self._hear(events.Overdue(max(self.id.epoch, at_least), self._follower.joins))

    def offer(self) -> None:
        """Offer a snapshot of this state to newcomers, whether or not one wants it yet."""
        if self.in_step:
            self._offer(self.id.epoch)

    def read(self, image: torch.Tensor) -> Image:
        """Check all of an image. Its `load` makes this peer take on the state; the next round tells whether it is the
        group's.

        Raises:
            ImageError: The image is damaged or does not fit.
        """
        read = self._state.read(image)

        def load() -> None:
            self._whole = None
            try:
                read.load()
            except BaseException:
                self._new_driver().tell(events.Interrupted())
                raise
            self._start_from(read.id)
            self._own, self._whole = None, read.id
            self._run.take()

        return Image(read.id, load)

    @property
    def whole(self) -> bool:
        """Whether memory holds the state of `id`; False after an interrupted update, or a write of the script."""
        return self._whole == self.id and not self._follower.doubts

    def image(self) -> torch.Tensor:
        """The state that this peer holds, u8 [bytes]: one copy in memory."""
        return self._state.image(self.id)

    def has_company(self) -> bool:
        """Whether any other peer of the run is known."""
        standing = self._run.state
        # The follower's reason covers the default reason of `NoPeers`.
        self._why_alone = standing.reason if isinstance(standing, NoPeers) and standing != NoPeers() else ""
        return not isinstance(standing, NoPeers)

    def _start_from(self, state: StateId) -> None:
        options = self._options
        named, late = self._run.core.link.welcome.named, self._run.core.strategy.late == "next"
        how = FollowerOptions(options.alone, options.patience, options.trust, named, late)
        self._follower = Follower(self._run.peer, state, self.clock(), how)

    def _attend(self) -> None:
        """Take part in a round without a contribution, to learn the group's state, or its mean."""
        self._run.take()
        state = self._run.state
        several = isinstance(state, Idle) and state.peers > 1
        others_give = several and self.serve() >= MEETING_WEIGHT
        if others_give:
            self._hear(events.Overdue(FIRST_SNAPSHOT))
        weight = 0.0 if self._waits else self._follower.attendance(others_give)
        self._begin_attending(weight, ATTEND_SECONDS)

    def _begin_attending(self, weight: float, seconds: float, evaluation: Evaluation | None = None) -> None:
        self._run.take()
        if weight:
            self._run.accumulate(dict.fromkeys(self._state.model.tensors), weight)
        self._start(seconds, evaluation=evaluation)
        self.gave = False

    def _start(
        self,
        seconds: float,
        metrics: Mapping[str, float] = MappingProxyType({}),
        evaluation: Evaluation | None = None,
    ) -> None:
        if not all(bool(torch.isfinite(buffer).all()) for buffer in self._state.model.buffers.values()):
            log.warning(
                "run %s: its averaged buffers hold NaN or Inf: it takes the group's, and adds nothing",
                self._run.name,
            )
            self._run.take()
        self._claimed = self._follower.claim
        self._pending = self._run.step(
            seconds, wait=False, state=self._claimed, metrics=metrics, evaluation=evaluation
        )

    def _move_accumulated(self) -> None:
        """In step, move the accumulated gradients into the run; otherwise drop those in the run: they do not fit."""
        if not self.in_step:
            self._run.take()
            return
        own, self._own = self._own, None
        if own is not None and own.weight > 0:
            self._run.accumulate(own.mean(), own.weight)

    def _hear(self, event: events.Event) -> None:
        """Tell the follower an event, as `_take` does; then wait for the mean that it asks for."""
        self._asks = False
        self._take(event)
        if self._asks:
            self._await_mean()

    def _take(self, event: events.Event) -> None:
        """Tell the follower an event, and perform its actions; what these bring about, it hears after them."""
        self._news.append(event)
        try:
            while self._news:
                self._new_driver().tell(self._news.popleft())
        except BaseException:
            self._news.clear()
            if self._whole is None:  # In the middle of a change.
                self._new_driver().tell(events.Interrupted())
            raise
        self._whole = self.id
        self._tell()

    def _new_driver(self) -> Driver[events.Event, events.Action]:
        """A driver that stays would keep this member and its tensors from being freed."""
        return Driver(self._follower, self._perform, clock=self.clock)

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.Commit():
                self._commit(action)
            case events.Check():
                self._news.append(events.Checked(digest(self._state.model.tensors)))
            case events.FetchSnapshot(at_least):
                wish = Wish(at_least, self.limit, None, self._follower.donors, self._follower.known.trained)
                self._downloads.begin(wish, FETCH_SECONDS)
            case events.FetchMean(after):
                self._recover(after)
            case events.Heal():
                assert self._downloads.image is not None, "it was fetched"
                self._whole = None
                self._downloads.image.load()
            case events.Meet():
                self._meet()
            case events.StepAlone():
                self._step_alone()

    def _tell(self) -> None:
        """Let the log and `status` have the reason, if it is news."""
        if self.reason != self._told:
            self._told = self.reason
            log.info("run %s: %s", self._run.name, self.reason)
            self._run.core.tell("training", self.reason)

    def _meet(self) -> None:
        if self.in_step and self._pending is None:
            if not self._run.accumulated:
                # This peer has just come into step. Beside a single contributor it needs a weight above 0.
                self._run.accumulate(dict.fromkeys(self._state.model.tensors), ATTENDANCE)
            self._start(self._seconds)
            self.gave = True

    def _commit(self, mean: events.Commit) -> None:
        self._own = None  # These gradients are of the state before.
        self._whole = None
        if isinstance(mean.values, memoryview):
            binding = self._run.core.binding
            binding.read_step(mean.values, binding.stepped(), self._run.mean, False, mean.outcome.shares)
            if mean.outcome.counted(self._run.peer):
                self._run.take()  # This contribution, to a round that failed here, is in the mean.
        self._update(self._run.mean, mean.before, mean.outcome)
        self._state.model.settle()
        if self._run.peer not in mean.outcome.givers:
            self._state.model.adopt()

    def _step_alone(self) -> None:
        own, self._own = self._run.take(), self._own
        if own is not None and self._own is not None:
            own.merge(self._own)
        own, self._own = own or self._own, None
        if own is None or own.weight == 0:
            return
        mean = own.mean()
        self._whole = None
        self._update(mean, self.id, None)
        self._state.model.count()
        self._state.model.settle()
        self.last = Outcome(ok=False, reason=self.reason, run=self._run.name)
        self._news.append(events.SteppedAlone(digest(mean)))

    def _offer(self, wanted: int | None) -> None:
        """Offer the wanted state; in memory there are, for a moment, the image here and the daemon's copy."""
        if (
            wanted is None
            or self._offered >= wanted
            or self.id.epoch < wanted
            or self._follower.claim is None
        ):
            return
        self._offered = self.id.epoch
        try:
            self._run.core.offer(self.id, self.image().numpy().data)
        except (ImageError, Refused) as error:  # Other donors may have the memory for it.
            log.warning("run %s: no snapshot is offered: %s", self._run.name, error)

    def _recover(self, after: StateId) -> None:
        """Begin to fetch a mean; the next contribution may need it."""
        astray, left, patient = self._follower.behind, RECOVER_SECONDS, False
        if self._ends_at is not None:
            left = max(self._ends_at - self.clock(), LEAST_SECONDS)
            patient = not astray and self.has_company()
        wish = Wish(0, 0, after, frozenset(self._follower.circle), patient=patient)
        self._downloads.begin(wish, left)
        self._asks = True

    def _await_mean(self) -> None:
        """Wait for means that are being fetched, unless this peer is astray, ends, or is in a round."""
        while self._downloads.recovering and not self._follower.behind:
            if self._ends_at is not None or self._pending is not None:
                return
            # A peer that follows the others waits for one mean, and takes those that are there.
            seconds = GONE_SECONDS if self._waits and self.id != self._looks_from else LOOK_AHEAD_SECONDS
            self._downloads.wait(seconds)
            event = self._downloads.ended()
            if event is None:
                self._downloads.stop()
                event = events.Fetched(FetchOutcome(ok=False, reason=f"not within {seconds:g} s", unheard=1))
            self._take(event)

    def _look_for_download(self) -> None:
        event = self._downloads.ended()
        if event is None:
            return
        self._hear(event)
        if self.in_step:
            self._own = None  # These gradients are of the state before.


def require_places(run: JoinedRun, others: int) -> None:
    """Check that this peer and those it waits for fit into one group.

    Raises:
        Refused: They do not; peers beyond the group would only follow its state.
    """
    places = run.options.group_size
    if others >= places:
        told = f"expected wait_for below group_size={places}, got {others}: the others would have no place"
        raise Refused(told, f"join the run with group_size >= {others + 1}, or wait for fewer")


def wait_for(runs: Sequence[JoinedRun], peers: int) -> None:
    """Wait until `peers` others have joined each run on equal terms, at most `WAIT_SECONDS`; late peers come later."""
    deadline, others = runs[0].core.clock() + WAIT_SECONDS, count(peers, "other peer")
    for run in runs if peers else ():
        if run.wait_for(peers, min(NOTICE_SECONDS, max(deadline - run.core.clock(), LEAST_SECONDS))):
            continue
        reason = getattr(run.state, "reason", "not as many have come yet")
        log.warning("run %s: waits for %s: %s", run.name, others, reason)
        if not run.wait_for(peers, max(deadline - run.core.clock(), LEAST_SECONDS)):
            told = "run %s: after %g s it goes on without waiting for %s"
            log.warning(told, run.name, WAIT_SECONDS, others)
