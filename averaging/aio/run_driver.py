"""One run of a daemon: matchmaking for as long as it has joined, and a round each time that a group forms."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sized

import msgspec

from equipoise.averaging.aio.round_driver import ROUND_FRAME, RoundDriver, Rounds, Task
from equipoise.averaging.aio.sessions import Sessions
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.claims import Claims
from equipoise.averaging.draw import Drawn
from equipoise.averaging.layout import Vectors, fingerprint
from equipoise.averaging.machines import matchmaker
from equipoise.averaging.manifest import NONCE_BYTES, Identity, Join, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as matchmaking_messages
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import LEAST_LATE
from equipoise.averaging.matchmaking.spec_diff import SpecDiff
from equipoise.averaging.metrics import Report, Values
from equipoise.averaging.outcome import FetchOutcome, Gathering, NoPeers, Outcome, RunState
from equipoise.averaging.ports import Directory
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.tasks import Driver, TaskSet

MATCHMAKING_FRAME = b"M"
"""First byte of the header of every matchmaking frame; a message follows."""

MAX_HISTORY = 20
"""Most outcomes kept. A gossip run averages its spread over them: few, so that it shows the present spread."""

MAX_TWINS = 8
"""Most pairs of peers with equal contributions that are told of."""

LEAST_WAIT_SECONDS, LEAST_WAIT_SHARE = 0.1, 0.1
"""Least wait for one peer that an outcome names, in seconds and as a share of the whole: less is jitter."""

REPORT_SECONDS = 0.02
"""Least time between two reports of the accumulated weight, each a signed record to other peers: a script may
accumulate 1,000 times a second."""

DIALABLE_SECONDS = 0.5
"""Time between two looks of a searching peer whether other peers can dial it."""

LOOK_SECONDS = 0.25
"""Time between two reads of the directory's cache, which costs nothing. A group waits for a read before it closes
without a peer that is new here."""

log = logging.getLogger(__name__)


class RunDriver:
    """This daemon's part in one run.

    Args:
        bandwidth: Bytes per second that this peer can send, as its user says; 0 to measure it.
        runs: The runs that the daemon takes part in, which share what it may keep.

    Attributes:
        spec: The run.
        transfer: Gives and takes the state of the run.
        accumulated: Weight accumulated here towards the next contribution.
        history: The last outcomes, oldest first.
        rounds_ok: Rounds that ended in a mean.
        rounds_failed: Rounds that did not.
        rounds_in_doubt: Those of them whose mean the others may hold.
        rounds_counted: Rounds in whose mean this peer's contribution counts.
        first_round: Number of this peer's first round; None before.
        twins: By pair of peers that have made equal contributions, a line about them.
    """

    def __init__(
        self,
        spec: RunSpec,
        sessions: Sessions,
        directory: Directory,
        identity: Identity,
        bandwidth: float,
        rounds: Rounds,
        runs: Sized,
    ) -> None:
        self.spec = spec
        self.accumulated = 0.0
        self.history: deque[Outcome] = deque(maxlen=MAX_HISTORY)
        self.rounds_ok = self.rounds_failed = self.rounds_in_doubt = self.rounds_counted = 0
        self.first_round: int | None = None
        self.twins: dict[tuple[str, str], str] = {}
        self._sessions = sessions
        self._directory = directory
        self._told_bandwidth = bandwidth
        self._rounds = rounds
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        context = Context(spec.name, spec.hash, sessions.peer, spec.needs, identity.sign, identity.verify)
        self._membership = context.membership
        self._machine = matchmaker(spec.strategy, context, sessions.chance)
        self._spec_diff = SpecDiff(spec, sessions.peer, self._loop.time())
        self._claims = Claims(spec.options.group_size)
        self._compared = asyncio.Event()
        self._formed: asyncio.Future[Manifest | Outcome] | None = None
        self._offered: tuple[StateId | None, float] = (None, 0.0)
        self._missed: tuple[Outcome, float] | None = None  # A round, and when its group closed.
        self._round: RoundDriver | None = None
        self._waited: tuple[str, float] | None = None  # The peer that the last group waited for, and seconds.
        self._reported = 0.0
        self._reporting: asyncio.TimerHandle | None = None
        self._announced = events.Announce(False, 0)
        self._driver = Driver(self._machine, self._perform, events.Woke)
        self._differ = Driver(self._spec_diff, self._perform)
        self.transfer = Transfer(spec, sessions, directory, identity.verify, rounds, runs, self._membership)
        self.transfer.on_mean = self._note_mean
        self.transfer.draw = self.draw
        self._tasks = TaskSet()
        self._left = ""

    # ---- the face ----

    async def average(
        self,
        vectors: Vectors,
        weight: float,
        timeout: float,
        state: StateId | None = None,
        metrics: Values | None = None,
        evaluation: Report | None = None,
        compared: bool = False,
    ) -> Outcome:
        """Take part in one round; `Join` describes the other arguments.

        Args:
            vectors: The encoded contribution, which should not be changed until this returns, and the memory for the
                mean, which holds it if the outcome is ok. What no encoder writes fails the round here, when it is met:
                to look for it before would read the vector twice.
            timeout: Seconds for everything; the outcome fails with a reason when they are over.
            compared: Whether a contribution that equals another peer's is worth a warning.

        Raises:
            ValueError: The weight, the metrics, or a vector's size, is not valid, or a round is going on already.
        """
        size = self.spec.layout.encoded_size
        if len(vectors.contribution) != size or len(vectors.mean) != size:
            raise ValueError(f"expected two vectors of {size} bytes, got {list(map(len, vectors[:2]))}")
        began, started = self._loop.time(), time.time()
        join = Join(
            peer=self._sessions.peer,
            spec=self.spec.hash,
            round=0,
            weight=weight,
            bandwidth=0.0,
            dialable=False,
            nonce=b"",
            credential=b"",
            state=state,
            signature=b"",
            fit=metrics or {},
            evaluation=evaluation,
            fingerprint=fingerprint(vectors.contribution) if compared and weight > ATTENDANCE_LIMIT else b"",
        )
        manifest = await self._match(join, timeout)
        matched = self._loop.time() - began
        if isinstance(manifest, Outcome):
            outcome = manifest
        else:
            self._note_twins(manifest)
            left = max(timeout - matched, 0.0)
            task = Task(self.spec, manifest, vectors, left, self._identity)
            outcome = await self._exchange(task)
        return self._ended(outcome, matched, self._loop.time() - began, started)

    def _ended(self, outcome: Outcome, matched: float, took: float, started: float) -> Outcome:
        """Count a round that has ended, and say of it what only the run knows; times are seconds."""
        reason, notes, there = outcome.reason, outcome.events, self._membership.count + 1
        if outcome.ok and (short := self._claims.settle(outcome.contributors)):
            log.warning("run %s: round %d: %s", self.spec.name, outcome.round, short)
            notes = (*notes, short)
        if outcome.ok and not self._membership.places and there > len(outcome.group):
            reason = f"{reason}; {there} peers are in the run"
        waits = {"matchmaking": self._waited} if self._waited and outcome.group else {}
        least = max(LEAST_WAIT_SECONDS, took * LEAST_WAIT_SHARE)
        outcome = msgspec.structs.replace(
            outcome,
            reason=reason,
            seconds={"matchmaking": matched, **outcome.seconds, "total": took},
            started=started,
            events=notes,
            waits={phase: wait for phase, wait in {**waits, **outcome.waits}.items() if wait[1] >= least},
        )
        self.history.append(outcome)
        self.first_round = outcome.round if self.first_round is None else self.first_round
        self.rounds_counted += self._sessions.peer in outcome.givers
        self.rounds_ok += outcome.ok
        self.rounds_failed += not outcome.ok
        self.rounds_in_doubt += outcome.in_doubt
        return outcome

    @property
    def state(self) -> RunState:
        """State of the next round."""
        state = self._machine.state
        return NoPeers(self.reason) if isinstance(state, NoPeers) and self._spec_diff.reason else state

    @property
    def gathering(self) -> Gathering | None:
        """The next round while it gathers, as far as this peer knows, whether or not it looks for a group itself."""
        return self._machine.gathering if self._round is None else None

    @property
    def others(self) -> int:
        """Number of other peers of the run that answer."""
        return self._membership.count

    @property
    def reason(self) -> str:
        """Reason for the state, one line; if all other peers have another spec, the difference."""
        alone = isinstance(self._machine.state, NoPeers)
        return (alone and self._spec_diff.reason) or self._machine.reason

    def difference(self, peer: str) -> str:
        """Return how another peer's spec differs, one line; empty if it does not, or the difference is not known."""
        return self._spec_diff.difference(peer)

    async def objection(self, timeout: float) -> str:
        """Return why this peer should not take part with its spec, one line; empty if it may.

        Waits up to `timeout` seconds until the known peers with another spec have described theirs.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._spec_diff.settled(self._loop.time()):
                    self._compared.clear()
                    await self._compared.wait()
        return self._spec_diff.objection()

    @property
    def round(self) -> int:
        """Number of this peer's next round."""
        return self._machine.round

    def draw(self, state: StateId) -> Drawn:
        """The peers that are to train from an agreed state, as far as this peer knows now, and the live peers."""
        return self._machine.draw(state, self._loop.time())

    @property
    def waits(self) -> str:
        """Why this peer contributes to no group, one line; empty if it has a place, or if draws decide."""
        size = self.spec.options.group_size
        if self.spec.strategy.least or not self._membership.waits(self._machine.round):
            return ""
        return f"{size} of {size} places are taken; this peer waits for a place and follows the state"

    def stop_search(self, why: str, late: float = 0.0) -> None:
        """End the search for a group, if one goes on: its outcome is not ok, says `why`, and has `late`.

        A round that has begun goes on.
        """
        if self._formed is not None and not self._formed.done():
            self._formed.set_result(self._failed(why, late))
            self._driver.tell(events.Withdrew())

    def withdraw(self, reason: str) -> None:
        """End the search or the round that goes on; its outcome says why, and whether it is in doubt."""
        self.stop_search(reason)
        if self._round is not None:
            self._round.withdraw(reason)

    def report_accumulated(self, weight: float) -> None:
        """Publish the weight accumulated towards the next contribution, at most once in `REPORT_SECONDS`."""
        self.accumulated = weight
        if self._reporting is None:
            self._report()

    def _report(self) -> None:
        self._reporting = None
        if self.accumulated != self._reported and self.spec.strategy.batches and not self._left:
            self._publish()
            self._reporting = self._loop.call_later(REPORT_SECONDS, self._report)

    async def others_accumulated(self, target: float | None = None) -> float:
        """Weight that the others have accumulated towards the next round, as far as their word counts.

        Args:
            target: Weight that all together are to accumulate; a newcomer's claim counts up to its share of it.
        """
        round = self._machine.round
        claimed = {
            one.peer: one.accumulated if one.round == round else 0.0
            for one in await self._directory.peers(self.spec.name)
            if one.spec == self.spec.hash and self._membership.answers(one.peer)
        }
        return self._claims.count(claimed, target)

    def start(self, observes: bool) -> None:
        """Make this peer known in the run; `observes` if it trains nothing there, so that no draw takes it."""
        self._membership.observes = observes
        self._tasks.keep(self._look_regularly)
        self._driver.tell(events.Woke())
        self._publish()

    async def leave(self, reason: str, serves: bool) -> None:
        """Stop taking part; an open round fails with `reason`. The directory learns whether the daemon `serves` on."""
        self._left = reason
        self.withdraw(reason)
        self._driver.stop()
        self._differ.stop()
        await self._tasks.stop()
        if serves:
            await self._announce()
        else:
            await self._directory.withdraw(self.spec.name)

    # ---- one round ----

    async def _match(self, join: Join, timeout: float) -> Manifest | Outcome:
        if self._formed is not None or self._round is not None:
            raise ValueError(f"a round of run {self.spec.name!r} is going on already: wait for its outcome")
        if self._left:
            return self._failed(self._left)
        self._claims.begin()
        self._offered = join.bound, self._loop.time()
        if late := self._lateness():  # The mean came while this peer still trained.
            return self._failed(_too_late(late), late)
        self._formed = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout):
                formed = await self._seek(self._formed, join, timeout)
            # Having left in the very moment in which its group formed, it begins no round.
            return self._failed(self._left) if self._left else formed
        except TimeoutError:
            alone = isinstance(self._machine.state, NoPeers)
            lacks = (alone and self._spec_diff.reason) or self._machine.shortage
            reason = f"no group within {timeout:.3g} s: {lacks}"
            self._driver.tell(events.Withdrew())
            return self._failed(reason)
        except asyncio.CancelledError:
            self._driver.tell(events.Withdrew())
            raise
        finally:
            self._formed = None

    async def _seek(
        self, formed: asyncio.Future[Manifest | Outcome], join: Join, timeout: float
    ) -> Manifest | Outcome:
        """Wait for a group. The join states whether others can dial this peer, so sign it again when that changes."""
        until = self._loop.time() + timeout
        dialable: bool | None = None
        while True:
            again, dialable = dialable is not None, self._sessions.dialable
            join = msgspec.structs.replace(
                join,
                nonce=self._sessions.chance.randbytes(NONCE_BYTES),
                bandwidth=self._bandwidth,
                credential=self._sessions.credential,
                dialable=dialable,
            )
            self._driver.tell(events.BecameReady(join, max(0.0, until - self._loop.time())))
            if again:
                # The machine takes its record for published; that others can dial this peer is not its concern.
                self._publish()
            while self._sessions.dialable == dialable:
                await asyncio.wait({formed}, timeout=DIALABLE_SECONDS)
                if formed.done():
                    return formed.result()

    def _note_twins(self, manifest: Manifest) -> None:
        for pair in manifest.twins:
            if pair not in self.twins and len(self.twins) < MAX_TWINS:
                gave = f"peers {' and '.join(pair)} made equal contributions to round {manifest.round}"
                advice = "they may train on the same data in the same order: give each peer another seed"
                self.twins[pair] = f"run {self.spec.name}: {gave}; {advice}"
                log.warning(self.twins[pair])

    def _note_mean(self, found: FetchOutcome) -> None:
        """Keep the round whose mean came; end the search of a federated contribution that is late for it."""
        if found.round is None:
            return
        self._missed = found.round, self._loop.time() - found.age
        self._driver.tell(events.MeanHeld(found.round))
        if late := self._lateness():
            self.stop_search(_too_late(late), late)

    def _lateness(self) -> float:
        """Seconds by which the offered contribution is late for the round whose mean this peer has; 0 if it is not."""
        if self._missed is None or not self.spec.strategy.least:
            return 0.0
        (state, offered_at), (mean, closed_at) = self._offered, self._missed
        overtaken = mean.state == state and not mean.counted(self._sessions.peer)
        return max(offered_at - closed_at, LEAST_LATE) if overtaken else 0.0

    @property
    def _bandwidth(self) -> float:
        """Bytes per second that this peer claims to send: its user's figure, else the measured one; 0 if unknown."""
        return self._told_bandwidth or self._sessions.bandwidth.estimate

    async def _exchange(self, task: Task) -> Outcome:
        self.transfer.begin(task.manifest)
        self._round = self._rounds.begin(task, self.transfer.keep)
        self._round.outcome.add_done_callback(self.transfer.over)
        ok = False
        try:
            outcome = await asyncio.shield(self._round.outcome)
            ok = outcome.ok
            if ok:
                self._driver.tell(events.MeanHeld(outcome))
            if outcome.counted(self._sessions.peer):
                # Before the next round's number is announced: no weight may count towards two rounds. The same weight
                # again is news then.
                self.accumulated = self._reported = 0.0
            return outcome
        except asyncio.CancelledError:
            self._round.withdraw("cancelled")
            raise
        finally:
            self._round = None
            self._driver.tell(events.RoundEnded(task.manifest.round, ok))

    def _failed(self, reason: str, late: float = 0.0) -> Outcome:
        return Outcome(ok=False, reason=reason, run=self.spec.name, round=self._machine.round, late=late)

    # ---- between the machine and the world ----

    def receive(self, peer: str, message: matchmaking_messages.MatchmakingMessage) -> None:
        """Take a matchmaking message of this run."""
        if isinstance(message, matchmaking_messages.SpecMessage):
            self._compare(events.MessageReceived(peer, message))
        else:
            self._driver.tell(events.MessageReceived(peer, message))

    def lost(self, peer: str) -> None:
        """Note that a peer cannot be reached."""
        self._driver.tell(events.PeerLost(peer))
        self._compare(events.PeerLost(peer))

    def speaks_of_a_round(self, peer: str) -> None:
        """Note that a peer has sent a frame of a round that this daemon does not know."""
        if self._formed is not None:
            self._driver.tell(events.RoundHeard(peer))

    def _compare(self, event: events.Event) -> None:
        before = self._spec_diff.reason
        self._differ.tell(event)
        if self._spec_diff.reason != before and self._spec_diff.reason:
            log.warning("run %s: %s", self.spec.name, self._spec_diff.reason)
        self._compared.set()

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.Send(peer, message):
                self._sessions.post(peer, MATCHMAKING_FRAME + matchmaking_messages.encode(message))
            case events.Form(manifest, reason, last, waited):
                log.info("run %s: %s", self.spec.name, reason)
                self._waited = (last, waited) if last else None
                if self._formed is not None and not self._formed.done():
                    self._formed.set_result(manifest)
            case events.Late(seconds, reason):
                if self._formed is not None and not self._formed.done():
                    failed = self._failed(f"too late by {seconds:.3g} s: {reason}", seconds)
                    self._formed.set_result(failed)
            case events.Decline(peer, round_id):
                gone = wire.GiveUp("it was not ready for this group")
                self._sessions.post(peer, ROUND_FRAME + round_id + wire.encode(gone))
            case events.Announce():
                self._announced = action
                self._publish()

    def _publish(self) -> None:
        if not self._left:
            self._tasks.spawn(self._announce())

    async def _announce(self) -> None:
        """Announce where this peer stands; once it has left, stragglers may still ask it, and no peer waits for it."""
        left = bool(self._left)
        self._reported = self.accumulated
        await self._directory.announce(
            self.spec.name,
            spec=self.spec.hash,
            ready=not left and self._announced.ready,
            round=self._machine.round,
            accumulated=0.0 if left else self._reported,
            bandwidth=0.0 if left else self._bandwidth,
            left=left,
            observes=self._membership.observes,
        )

    async def _look_regularly(self) -> None:
        while True:
            found = await self._directory.peers(self.spec.name)
            seen = events.CandidatesSeen([one for one in found if not one.left])
            self._driver.tell(seen)
            self._compare(seen)
            await asyncio.sleep(LOOK_SECONDS)


def _too_late(seconds: float) -> str:
    return f"too late by {seconds:.3g} s: this peer has the mean of its round"
