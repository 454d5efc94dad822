"""A swarm of training scripts in one process and in virtual time, deterministic: one thread runs at once.

Each peer is a function in a thread of its own, as a user would write it. It runs until it waits for something; then
the one goes on whose wait is over first. The runs are real ones down to the daemon: what the daemons do is done here.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median_low
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from equipoise.averaging.matchmaking.topology import seats
from equipoise.averaging.metrics import Report, Values, averaged
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import FetchOutcome, Idle, NoPeers, Outcome, RunState
from equipoise.averaging.replication.server import KEPT_MEANS
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import parse_strategy
from equipoise.averaging.weights import ATTENDANCE_LIMIT, CAPPED, cap_of, counted_weights
from equipoise.compression import parse_codec
from equipoise.peer.client.tensors import Binding, Tensors
from equipoise.peer.control.messages import AgreeRun, JoinRun, LeaveRun, ReportAccumulated, StartRound
from equipoise.peer.run import Run
from equipoise.peer.shared_memory import Region

LIMIT_SECONDS = 100_000.0
"""Of virtual time; a test that gets there hangs."""


class Killed(BaseException):
    """What a peer dies of."""


class Actor:
    """One peer's thread."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.turn = threading.Semaphore(0)
        self.over = self.killed = False
        self.until: Callable[[], bool] = lambda: False
        self.wake = 0.0
        self.work = work


class FakeSwarm:
    """Peers, their runs, and the clock.

    Attributes:
        now: Virtual seconds.
        round_seconds: What a round takes.
        fetch_seconds: What the download of a snapshot takes.
        recover_seconds: And of a mean that was missed.
        gather_seconds: How long a group that could begin waits for those who are still computing.
        group_size: Most peers that average together in one round.
        strategy: Spec of the runs' strategy; only `fakes.federated` forms groups by it.
        made: By run, the epoch of the last state that a round has made, and who made it.
        kept: Means that one who missed them can have, by the state that each leads on from.
        recovered: Who had which of them.
        spoils: Called with the round's number: whether its mean holds infinities, as sums of fp16 may.
        lingers: Whether daemons serve what they kept when their scripts have left.
        fails: Called with the round's number and a peer; whether the round fails for that one, though not for others.
    """

    def __init__(self, codec: str = "fp32") -> None:
        self.now = 0.0
        self.round_seconds = 0.1
        self.fetch_seconds = 0.5
        self.recover_seconds = 0.1
        self.gather_seconds = 1.0
        self.group_size = 16
        self.strategy = "allreduce"
        self.lingers = False
        self.fails: Callable[[int, str], bool] = lambda number, peer: False
        self.spoils: Callable[[int], bool] = lambda number: False
        self.codec = parse_codec(codec)
        self.runs: dict[str, dict[str, FakeRun]] = {}
        self.rounds = 0
        self.made: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.bytes: Counter[str] = Counter()
        self.kept: dict[StateId, tuple[Outcome, memoryview]] = {}
        self.recovered: list[tuple[str, StateId]] = []
        self._actors: dict[str, Actor] = {}
        self._scheduler = threading.Semaphore(0)
        self._local = threading.local()

    def clock(self) -> float:
        return self.now

    @property
    def makes(self) -> type[FakeRun]:
        return FakeRun

    def join(self, peer: str, name: str, tensors: Tensors, carrier: Tensors | None = None) -> FakeRun:
        run = self.makes(self, peer, name, tensors, carrier)
        self.runs.setdefault(run.key, {})[peer] = run
        return run

    def peer(self, name: str, work: Callable[[], None], at: float = 0.0) -> None:
        """Have a peer begin at some time; also while others run."""
        actor = self._actors[name] = Actor(name, work)
        actor.wake = at
        threading.Thread(target=self._live, args=(actor,), name=name, daemon=True).start()

    def kill(self, name: str) -> None:
        self._actors[name].killed = True
        for members in self.runs.values():
            members.pop(name, None)

    def seated(self, key: str) -> tuple[str, ...]:
        """Who has the places of a run's next round."""
        members, (epoch, holders) = self.runs.get(key, {}), self.made.get(key, (0, ()))
        return seats(members, holders, str(epoch), max(self.group_size, 0))

    def run(self) -> None:
        """Until all peers are through; raises what one of them raised."""
        while living := [actor for actor in self._actors.values() if not actor.over]:
            for members in self.runs.values():
                self._form(members)
            actor = min(living, key=self._due)
            self.now = max(self.now, self._due(actor))
            assert self.now < LIMIT_SECONDS, "nobody makes progress"
            actor.turn.release()
            self._scheduler.acquire()
            if actor.error is not None:
                raise actor.error

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Give way to the others until a condition holds, or for so long; returns whether it holds."""
        actor: Actor = self._local.actor
        actor.until, actor.wake = until, self.now + seconds
        self._scheduler.release()
        actor.turn.acquire()
        if actor.killed:
            raise Killed
        return until()

    def compute(self, seconds: float) -> None:
        """What a forward and a backward pass take."""
        end = self.now + seconds
        while self.now < end:
            self.wait(lambda: False, end - self.now)

    def _due(self, actor: Actor) -> float:
        if actor.killed:
            return self.now
        runs = [run for members in self.runs.values() for run in members.values()]
        events = [run.waits_since + self.gather_seconds if run.waiting else run.ready_at for run in runs]
        if actor.until():
            return self.now
        # What it waits for may come about when a round or a download ends: look again then.
        return min([actor.wake, *(at for at in events if at > self.now)])

    def _live(self, actor: Actor) -> None:
        self._local.actor = actor
        actor.turn.acquire()
        try:
            if not actor.killed:
                actor.work()
        except Killed:
            pass
        except BaseException as error:
            actor.error = error
        for members in self.runs.values():
            members.pop(actor.name, None)
        actor.over = True
        self._scheduler.release()

    def _form(self, members: Mapping[str, FakeRun]) -> None:
        """Let those meet who wait for a group, if all do, or some have for long enough."""
        waiting = {peer: run for peer, run in sorted(members.items()) if run.waiting}
        contributors = [run for run in waiting.values() if run.weight > 0]
        if len(contributors) < 2:
            return
        seated = self.seated(contributors[0].key)
        if not waiting.keys() & set(seated):
            return
        first = sorted(waiting, key=lambda peer: peer not in seated)[: self.group_size]
        waiting = {peer: waiting[peer] for peer in sorted(first)}
        since = sorted(run.waits_since for run in contributors)[
            1
        ]  # Before that there was no group to be late for.
        patient = self.now - since >= self.gather_seconds
        if len(waiting) < len(members) and not patient:
            return
        self.rounds += 1
        outcome, mean = self._exchange(waiting)
        before = outcome.state
        if before is not None and max(outcome.contributors.values()) > ATTENDANCE_LIMIT:
            held = tuple(peer for peer in outcome.contributors if outcome.states.get(peer) == before)
            self.made[next(iter(waiting.values())).key] = before.epoch + 1, held
        if outcome.state is not None and not all(self.fails(self.rounds, peer) for peer in waiting):
            self.kept[outcome.state] = outcome, mean
            for old in list(self.kept)[:-KEPT_MEANS]:
                del self.kept[old]
        for peer, run in waiting.items():
            waited = {"matchmaking": self.now - run.waits_since, "total": self.now - run.waits_since}
            if self.fails(self.rounds, peer):
                run.end(
                    msgspec.structs.replace(outcome, ok=False, reason="as the test says", contributors={}),
                    None,
                )
            else:
                run.end(msgspec.structs.replace(outcome, seconds=waited), mean)

    def _exchange(self, group: Mapping[str, FakeRun]) -> tuple[Outcome, memoryview]:
        """The weighted mean, encoded: the same bytes for all."""
        claimed = {peer: run.weight for peer, run in group.items() if run.weight > 0}
        counted = counted_weights(list(claimed.values()), (1 << len(claimed)) - 1, cap_of(CAPPED))
        weights = dict(zip(claimed, counted, strict=True))
        layout = next(iter(group.values()))._binding.steps.layout
        mean = memoryview(bytearray(layout.encoded_size))
        for part in layout.cut([1.0], max(layout.size, 1)):
            codec, total = layout.codec_of(part), torch.zeros(part.size)
            place = layout.encoded(part.start, part.stop)
            for peer, weight in weights.items():
                codec.accumulate(group[peer].contribution[place], weight, total)
            codec.encode(total / torch.tensor(sum(weights.values()), dtype=torch.float32), mean[place])
        sent = 2 * layout.encoded_size * (len(group) - 1) // len(group)
        for peer in group:
            self.bytes[peer] += sent
        content = hashlib.sha256(repr(sorted(weights.items())).encode() + mean)
        return Outcome(
            ok=True,
            reason="all contributed",
            run=next(iter(group.values())).name,
            round=self.rounds,
            group=tuple(group),
            contributors=weights,
            capped={peer: weight for peer, weight in claimed.items() if weight > weights[peer]},
            digest=content.hexdigest(),
            bytes_sent=sent,
            bytes_received=sent,
            states={peer: run.claim for peer, run in group.items() if run.claim is not None},
            metrics=averaged(((weight, group[peer].metrics) for peer, weight in weights.items()), False),
            evaluation=averaged(
                ((one.weight, one.values) for run in group.values() if (one := run.evaluation)), False
            ),
        ), mean


class FakeRun(Run):
    """A run whose daemon is the swarm above."""

    def __init__(
        self, swarm: FakeSwarm, peer: str, name: str, tensors: Tensors, carrier: Tensors | None = None
    ) -> None:
        self.swarm, self.peer_name = swarm, peer
        binding = Binding(tensors, swarm.codec, carrier)
        options = RunOptions(group_size=swarm.group_size, strategy=parse_strategy(swarm.strategy).spec)
        link: Any = SimpleNamespace(
            welcome=SimpleNamespace(peer_id=peer, home=""),
            lost=None,
            start=self._start_request,
            ask=self._ask_request,
            clock=time.monotonic,
            sleep=swarm.compute,
        )
        super().__init__(
            link,
            JoinRun(name, options, binding.schema, binding.gradients, binding.size),
            binding,
            Region.create(binding.size),
            lambda options, name, tensors, carrier: swarm.join(peer, name, tensors, carrier),
        )
        self._region.memory.close()
        self.terms: Mapping[str, str] = {}
        self.waiting = False
        self.waits_since = self.weight = 0.0
        self.claim: StateId | None = None
        self.metrics: Values = {}
        self.evaluation: Report | None = None
        self.contribution = b""
        self.reported = 0.0
        self.offered: tuple[StateId, bytes] | None = None
        self.wants: int | None = None
        self.ready_at = 0.0
        self.ended: tuple[Outcome, memoryview | None] | None = None
        self.offers = 0
        self.stands = 0

    @property
    def key(self) -> str:
        """Only runs of equal name, shapes and terms meet."""
        return f"{self.name} {self._binding.gradients} {self._binding.buffers} {sorted(self.terms.items())}"

    @property
    def size(self) -> int:
        return self._binding.steps.layout.encoded_size

    def others(self) -> list[FakeRun]:
        members = self.swarm.runs.get(self.key, {})
        return [run for peer, run in members.items() if peer != self.peer_name]

    def agree(self, terms: Mapping[str, str], buffers: bool = False, observes: bool = False) -> None:
        self.swarm.runs[self.key].pop(self.peer_name)
        super().agree(terms, buffers, observes)
        self.terms = dict(terms)
        self.swarm.runs.setdefault(self.key, {})[self.peer_name] = self

    @property
    def state(self) -> RunState:
        return Idle(peers=len(self.others())) if self.others() else NoPeers()

    def progress(self, target: float | None = None) -> Any:
        wanted = [run.wants for run in self.others() if run.wants is not None]
        swarm = self.accumulated + sum(run.reported for run in self.others() if not run.left)
        return SimpleNamespace(
            local=self.accumulated, swarm=swarm, wanted=max(wanted, default=None), waits=self.waits
        )

    @property
    def waits(self) -> str:
        """As the daemon says it, which sees all peers at once here."""
        size, placed = self.swarm.group_size, self.peer_name in self.swarm.seated(self.key)
        return "" if placed else f"{size} of {size} places are taken; this peer waits for a place"

    def offer(self, state: StateId, image: bytes | bytearray | memoryview) -> None:
        self.offered, self.offers = (state, bytes(image)), self.offers + 1

    def fetch(
        self,
        at_least: int,
        limit: int,
        timeout: float = 600.0,
        among: tuple[str, ...] = (),
        barred: tuple[str, ...] = (),
    ) -> Any:
        return FakeFetch(self, at_least, timeout, among, barred)

    def recover(
        self,
        after: StateId,
        timeout: float = 60.0,
        circle: tuple[str, ...] = (),
        proved: bool = False,
        patient: bool = False,
    ) -> Any:
        return FakeRecovery(self, after, timeout if patient or (self.waits and not proved) else 0.0)

    def end(self, outcome: Outcome, mean: memoryview | None) -> None:
        self.waiting = False
        self.ended = (outcome, mean)
        self.ready_at = self.swarm.now + self.swarm.round_seconds

    def _start(
        self,
        request: StartRound,
        deadline: float,
        settle: Callable[[Outcome | None], None],
        began: float,
    ) -> Any:
        self.weight, self.claim = request.weight, request.state
        self.waiting, self.waits_since = True, self.swarm.now
        self.metrics, self.evaluation = request.metrics, request.evaluation
        self.stands = self.stands if request.state is None else request.state.epoch
        self.contribution = bytes(self._region.contribution[: self.size])
        self.ended = None
        self.pending = FakePending(self, settle, deadline - time.monotonic())  # type: ignore[assignment]
        return self.pending

    def _start_request(self, request: Any) -> None:
        if isinstance(request, ReportAccumulated):
            self.reported = request.weight

    def _ask_request(self, request: Any, timeout: float = 0.0) -> None:
        assert isinstance(request, AgreeRun | LeaveRun)


class FakePending:
    """A round that goes on."""

    def __init__(self, run: FakeRun, settle: Callable[[Outcome | None], None], timeout: float = 30.0) -> None:
        self._run, self._settle = run, settle
        self._deadline = run.swarm.now + timeout
        self._outcome: Outcome | None = None
        self._stopped = ""

    def done(self) -> bool:
        run = self._run
        ended = run.ended is not None and run.swarm.now >= run.ready_at
        return bool(self._outcome or ended or self._stopped) or run.swarm.now >= self._deadline

    def wait(self, timeout: float) -> bool:
        return self.done() or self._run.swarm.wait(self.done, timeout)

    def stop_search(self, why: str) -> None:
        if self._run.waiting:
            self._run.waiting, self._stopped = False, why

    def result(self) -> Outcome:
        if self._outcome is not None:
            return self._outcome
        run = self._run
        while not self.done() and run.swarm.now < self._deadline:
            run.swarm.wait(self.done, self._deadline - run.swarm.now)
        run.waiting = False
        failed = Outcome(ok=False, reason=self._stopped or "no group within 30 s", run=run.name), None
        self._outcome, mean = run.ended or failed
        if mean is not None:
            run._region.mean[: run.size] = mean
        self._settle(self._outcome)
        if mean is not None and run.swarm.spoils(self._outcome.round):
            next(iter(run.mean.values())).view(-1)[0] = torch.inf
        return self._outcome


class FakeFetch:
    """A download that goes on: from when somebody offers what is wanted."""

    def __init__(
        self,
        run: FakeRun,
        at_least: int,
        timeout: float,
        among: tuple[str, ...] = (),
        barred: tuple[str, ...] = (),
    ) -> None:
        self._run, self._at_least, self._among, self._barred = run, at_least, among, barred
        self._deadline = run.swarm.now + timeout
        self._since: float | None = None
        self._image: tuple[StateId, bytes] | None = None
        self.content = memoryview(b"")
        run.wants = at_least

    def done(self) -> bool:
        swarm = self._run.swarm
        if self._image is None:
            others = [run for run in self._run.others() if run.peer_name not in self._barred]
            donors = [run for run in others if run.peer_name in self._among] or others
            offered = Counter(run.offered for run in donors if run.offered is not None)
            fitting = [offer for offer in offered if offer[0].epoch >= self._at_least]
            if fitting:
                self._image, self._since = max(fitting, key=lambda offer: offered[offer]), swarm.now
                self._run.wants = None
        if self._since is not None:
            return swarm.now >= self._since + swarm.fetch_seconds
        left = any(run.peer_name not in self._barred for run in self._run.others())
        return not left or swarm.now >= self._deadline

    def wait(self, timeout: float) -> bool:
        return self.done() or self._run.swarm.wait(self.done, timeout)

    def cancel(self) -> None:
        self._run.wants = None

    def result(self) -> Any:
        self._run.wants = None
        if self._image is None:
            return FetchOutcome(ok=False, reason="nobody offers it")
        state, image = self._image
        self.content = memoryview(bytearray(image))
        donors = {run.peer_name: 0 for run in self._run.others() if run.offered == self._image}
        return FetchOutcome(ok=True, reason="", state=state, size=len(image), sources=donors)


class FakeRecovery:
    """The download of a mean: from when it is asked for, or is there."""

    def __init__(self, run: FakeRun, after: StateId, patience: float) -> None:
        self._run, self._after = run, after
        self._at = run.swarm.now + (run.swarm.recover_seconds if self._donors else 0.0)
        self._until = run.swarm.now + patience
        self.content = memoryview(b"")
        run.stands = after.epoch

    @property
    def behind(self) -> int:
        return sum(other.stands < self._after.epoch for other in self._run.others())

    @property
    def beyond(self) -> int:
        """What most of those in step have reached."""
        there = [one.stands for one in self._run.others() if one.peer_name in self._run.swarm.seated(one.key)]
        reached = median_low(there or [0])
        return reached if reached > self._after.epoch else 0

    @property
    def _donors(self) -> bool:
        return bool(self._run.others()) or self._run.swarm.lingers

    def done(self) -> bool:
        now = self._run.swarm.now
        behind = self.behind or bool(self._run.waits)
        behind = behind and not (self._run.waits and self.beyond)
        waits = now < self._until and behind and self._after not in self._run.swarm.kept
        return now >= self._at and not waits

    def wait(self, timeout: float) -> bool:
        return self.done() or self._run.swarm.wait(self.done, timeout)

    def cancel(self) -> None:
        pass

    def result(self) -> Any:
        run, swarm = self._run, self._run.swarm
        found = swarm.kept.get(self._after)
        if found is None or not self._donors:
            return FetchOutcome(ok=False, reason="nobody keeps it", behind=self.behind, beyond=self.beyond)
        outcome, self.content = found
        swarm.recovered.append((run.peer_name, self._after))
        run.stands = self._after.epoch + 1
        return FetchOutcome(ok=True, reason="", round=outcome)
