"""One run of a daemon: matchmaking for as long as it has joined, and a round each time that a group forms."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from equipoise.averaging.advice import judge
from equipoise.averaging.aio.round_driver import RoundDriver, Shared, Task
from equipoise.averaging.aio.search_driver import SearchDriver
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.claims import Claims
from equipoise.averaging.layout import Vectors
from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.metrics import Report, Values
from equipoise.averaging.outcome import Gathering, Outcome
from equipoise.averaging.sketch import sketch
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT

MAX_HISTORY = 20
"""Most outcomes kept. A gossip run averages its spread over them: few, so that it shows the present spread."""

MAX_TWINS = 8
"""Most pairs of peers with nearly equal contributions that are told of."""

LEAST_WAIT_SECONDS, LEAST_WAIT_SHARE = 0.1, 0.1
"""Least wait for one peer that an outcome names, in seconds and as a share of the whole: less is jitter."""

log = logging.getLogger(__name__)


@dataclass
class RoundCounts:
    """The rounds of a run that have ended here.

    Attributes:
        last: The last outcomes, oldest first.
        ok: Rounds that ended in a mean.
        failed: Rounds that did not.
        in_doubt: Those of them whose mean the others may hold.
    """

    last: deque[Outcome] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    ok: int = 0
    failed: int = 0
    in_doubt: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a round that has ended."""
        self.last.append(outcome)
        self.ok += outcome.ok
        self.failed += not outcome.ok
        self.in_doubt += outcome.in_doubt


class RunDriver:
    """This daemon's part in one run.

    Attributes:
        spec: The run.
        search: Finds groups.
        transfer: Gives and takes the state of the run.
        counts: The rounds that have ended.
        twins: By pair of peers whose contributions to two rounds in a row were nearly equal, a line about them.
    """

    def __init__(self, spec: RunSpec, shared: Shared) -> None:
        self.spec = spec
        self.search = SearchDriver(spec, shared)
        self.counts = RoundCounts()
        self.twins: dict[tuple[str, str], str] = {}
        self._near: set[tuple[str, str]] = set()
        self._shared = shared
        self._sessions = shared.sessions
        self._loop = asyncio.get_running_loop()
        self._claims = Claims(spec.options.group_size)
        self._round: RoundDriver | None = None
        self._left = ""
        self.transfer = Transfer(spec, shared, self.search)

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
            vectors: The encoded contribution, which should not be changed until this returns, and memory for the mean
                of a full group, which holds it if the outcome is ok. What no encoder writes fails the round here, when
                it is met: to look for it before would read the vector twice.
            timeout: Seconds for everything; the outcome fails with a reason when they are over.
            compared: Whether a contribution that nearly equals another peer's is worth a warning.

        Raises:
            ValueError: The weight, the metrics, or a vector's size, is not valid, or a round is going on already.
        """
        layout, got = self.spec.layout, tuple(map(len, vectors[:2]))
        sizes = layout.encoded_size, layout.mean_size(self.spec.options.group_size)
        if got != sizes:
            raise ValueError(
                f"expected vectors of {sizes[0]} and {sizes[1]} bytes, got {got[0]} and {got[1]}"
            )
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
            sketch=sketch(layout, vectors.contribution) if compared and weight > ATTENDANCE_LIMIT else b"",
            norm=vectors.norm,
        )
        manifest = await self._match(join, timeout)
        matched = self._loop.time() - began
        if isinstance(manifest, Outcome):
            outcome = manifest
        else:
            self._note_twins(manifest)
            left = max(timeout - matched, 0.0)
            task = Task(self.spec, manifest, vectors, left, self._shared.identity)
            outcome = await self._exchange(task)
        return self._ended(outcome, matched, self._loop.time() - began, started)

    def _ended(self, outcome: Outcome, matched: float, took: float, started: float) -> Outcome:
        """Count a round that has ended, and say of it what only the run knows; times are seconds."""
        reason, notes, there = outcome.reason, outcome.events, self.search.membership.count + 1
        if outcome.ok and (short := self._claims.settle(outcome.contributors)):
            log.warning("run %s: round %d: %s", self.spec.name, outcome.round, short)
            notes = (*notes, short)
        if outcome.ok and not self.search.membership.places and there > len(outcome.group):
            reason = f"{reason}; {there} peers are in the run"
        waits = {"matchmaking": self.search.waited} if self.search.waited and outcome.group else {}
        least = max(LEAST_WAIT_SECONDS, took * LEAST_WAIT_SHARE)
        outcome = msgspec.structs.replace(
            outcome,
            reason=reason,
            seconds={"matchmaking": matched, **outcome.seconds, "total": took},
            started=started,
            events=notes,
            waits={phase: wait for phase, wait in {**waits, **outcome.waits}.items() if wait[1] >= least},
        )
        self.counts.add(outcome)
        return outcome

    @property
    def gathering(self) -> Gathering | None:
        """The next round while it gathers, as far as this peer knows, whether or not it looks for a group itself."""
        return self.search.machine.gathering if self._round is None else None

    @property
    def round(self) -> int:
        """Number of this peer's next round."""
        return self.search.machine.round

    @property
    def waits(self) -> str:
        """Why this peer contributes to no group, one line; empty if it has a place, or if draws decide."""
        size = self.spec.options.group_size
        if self.spec.strategy.least or not self.search.membership.waits(self.round):
            return ""
        return f"{size} of {size} places are taken; this peer waits for a place and follows the state"

    @property
    def advice(self) -> str:
        """The plan of exchanges beside the last ones, and the better setting, one line; empty if they take no time."""
        if self.spec.strategy.pairs or self.spec.strategy.least:
            return ""
        upload, download = self._sessions.meter.upload.told, self._sessions.meter.download.told
        return judge(self.counts.last, self.spec.layout.size, self.spec.options.codec, upload, download)

    def withdraw(self, reason: str) -> None:
        """End the search or the round that goes on; its outcome says why, and whether it is in doubt."""
        self.search.stop(reason)
        if self._round is not None:
            self._round.withdraw(reason)

    async def others_accumulated(self, target: float | None = None) -> float:
        """Weight that the others have accumulated towards the next round, as far as their word counts.

        Args:
            target: Weight that all together are to accumulate; a newcomer's claim counts up to its share of it.
        """
        round = self.round
        claimed = {
            one.peer: one.accumulated if one.round == round else 0.0
            for one in await self._shared.directory.peers(self.spec.name)
            if one.spec == self.spec.hash and self.search.membership.answers(one.peer)
        }
        return self._claims.count(claimed, target)

    async def leave(self, reason: str, serves: bool) -> None:
        """Stop taking part; an open round fails with `reason`. The directory learns whether the daemon `serves` on."""
        self._left = reason
        self.search.announcer.has_left = True
        self.withdraw(reason)
        await self.search.leave(serves)

    # ---- one round ----

    async def _match(self, join: Join, timeout: float) -> Manifest | Outcome:
        if self._round is not None:
            raise ValueError(f"a round of run {self.spec.name!r} is going on already: wait for its outcome")
        if self._left:
            return self.search.failed(self._left)
        self._claims.begin()
        formed = await self.search.find(join, timeout)
        # Having left in the very moment in which its group formed, it begins no round.
        return self.search.failed(self._left) if self._left else formed

    def _note_twins(self, manifest: Manifest) -> None:
        """Tell of pairs of peers that were near in two rounds in a row.

        In a first round, large batches of different data may be near too.
        """
        near = manifest.twins
        for pair in sorted(near & self._near - self.twins.keys())[: MAX_TWINS - len(self.twins)]:
            gave = f"peers {' and '.join(pair)} gave nearly equal contributions to round {manifest.round}"
            advice = "they train on the same data: give each other data or another seed, or use Shares"
            self.twins[pair] = f"run {self.spec.name}: {gave} and to the one before; {advice}"
            log.warning(self.twins[pair])
        self._near = near

    async def _exchange(self, task: Task) -> Outcome:
        self.transfer.donor.begin(task.manifest)
        self._round = self._shared.rounds.begin(task, self.transfer.donor.keep)
        self._round.outcome.add_done_callback(self.transfer.donor.over)
        ok, faults = False, {}
        try:
            outcome = await asyncio.shield(self._round.outcome)
            ok, faults = outcome.ok, outcome.faults
            if ok:
                self.search.hold(outcome)
            if outcome.counted(self._sessions.peer):
                # Before the next round's number is announced: no weight may count towards two rounds.
                self.search.announcer.count()
            return outcome
        except asyncio.CancelledError:
            self._round.withdraw("cancelled")
            raise
        finally:
            self._round = None
            self.search.ended(task.manifest.round, ok, faults)
