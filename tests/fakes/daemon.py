"""A swarm in memory with the face of the real one, so that the program can be tested without a network."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from equipoise.averaging.aio.transfer import Room
from equipoise.averaging.draw import Drawn, draw
from equipoise.averaging.layout import Vectors
from equipoise.averaging.matchmaking.spec_diff import answer_of, differences
from equipoise.averaging.metrics import Report, Values, averaged
from equipoise.averaging.outcome import (
    Exchanging,
    FetchOutcome,
    Gathering,
    Idle,
    NoPeers,
    Outcome,
    RunState,
)
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import Federated
from equipoise.averaging.weights import cap_of, counted_weights
from equipoise.dht.state import DirectStatus, ReachStatus, SwarmStatus
from equipoise.peer.config import Config
from fakes.vectors import decoded, encoded


@dataclass
class Member:
    """What the network knows of one peer of a run."""

    peer: str
    spec: str
    described: RunSpec
    accumulated: float = 0.0
    left: bool = False
    ready: bool = False
    round: int = 0
    dialable: bool = True
    bandwidth: float = 0.0
    credential: bytes = b""
    tags: tuple[str, ...] = ()
    observes: bool = False


class Formed(NamedTuple):
    """What a group came to."""

    mean: torch.Tensor
    weights: dict[str, float]
    capped: dict[str, float]
    states: dict[str, StateId]
    metrics: dict[str, float]
    evaluation: dict[str, float]


@dataclass
class Waiting:
    """A peer that waits for a group."""

    contribution: torch.Tensor
    weight: float
    state: StateId | None = None
    metrics: Values | None = None
    evaluation: Report | None = None
    group: concurrent.futures.Future[Formed | None] = field(default_factory=concurrent.futures.Future)


class FakeNetwork:
    """Groups close when all peers of a run are ready; daemons may live in different threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.runs: dict[str, dict[str, Member]] = {}
        self.waiting: dict[str, dict[str, Waiting]] = {}
        self.snapshots: dict[str, dict[str, tuple[StateId, bytes]]] = {}
        self.means: dict[tuple[str, StateId], tuple[Outcome, torch.Tensor]] = {}
        self.wishes: dict[str, dict[str, int]] = {}
        self.refused: set[str] = set()
        """Peers whose contribution does not count."""
        self.held = False
        """Whether groups that are complete stay in exchange."""
        self.count = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have daemons of this process join this network."""
        monkeypatch.setattr("equipoise.peer.daemon.wiring.start_parts", self._start_parts)

    async def _start_parts(self, config: Config, reducer: object = None) -> Any:
        with self.lock:
            self.count += 1
            peer = f"peer{self.count}"
        return FakeSwarm(self, peer, config), FakeHub(self, peer)

    def enter(self, run: str, peer: str, waiting: Waiting) -> None:
        with self.lock:
            self.waiting.setdefault(run, {})[peer] = waiting
            self.runs[run][peer].ready = True
            self._close_group(run)

    def release(self) -> None:
        with self.lock:
            self.held = False
            for run in list(self.waiting):
                self._close_group(run)

    def withdraw(self, run: str, peer: str) -> None:
        with self.lock:
            if peer in self.runs.get(run, {}):
                self.runs[run][peer].ready = False
            waiting = self.waiting.get(run, {}).pop(peer, None)
        if waiting is not None and not waiting.group.done():
            waiting.group.set_result(None)

    def _close_group(self, run: str) -> None:
        for spec in {member.spec for member in self.runs[run].values()}:
            expected = {peer for peer, member in self.runs[run].items() if member.spec == spec}
            waiting = self.waiting.get(run, {})
            if not self.held and len(expected) >= 2 and expected <= waiting.keys():
                self._form(run, {peer: waiting[peer] for peer in sorted(expected)})

    def _form(self, run: str, members: dict[str, Waiting]) -> None:
        claimed = {p: w.weight for p, w in members.items() if w.weight > 0 and p not in self.refused}
        cap = cap_of(self.runs[run][min(members)].described.options.weights)
        counted = counted_weights(list(claimed.values()), (1 << len(claimed)) - 1, cap)
        weights = dict(zip(claimed, counted, strict=True))
        total = sum(weights.values())
        if total == 0:
            return
        states = {peer: one.state for peer, one in members.items() if one.state is not None}
        mean = torch.zeros_like(next(iter(members.values())).contribution)
        for peer, weight in weights.items():
            mean += members[peer].contribution * (weight / total)
        metrics = averaged([(weight, members[peer].metrics) for peer, weight in weights.items()], False)
        reports = [one.evaluation for one in members.values() if one.evaluation is not None]
        evaluation = averaged([(report.weight, report.values) for report in reports], False)
        for peer, waiting in members.items():
            del self.waiting[run][peer]
            self.runs[run][peer].ready = False
            over = {peer: weight for peer, weight in claimed.items() if weight > weights[peer]}
            waiting.group.set_result(Formed(mean, weights, over, states, metrics, evaluation))


class FakeSwarm:
    """The swarm of one peer."""

    def __init__(self, network: FakeNetwork, peer: str, config: Config) -> None:
        self.peer = peer
        self.directory = FakeDirectory(network)
        self.config = config
        self.stopped = False
        self.state = "searching"

    def status(self) -> SwarmStatus:
        return SwarmStatus(
            state=self.state,
            reason="as the test says",
            peer=self.peer,
            addresses=(f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer}",),
            dialable=True,
            bootstrap=(),
            connected=(),
            p2pd_pid=None,
            p2pd_restarts=0,
            p2pd_log=(),
            streams=0,
            direct=DirectStatus(channel="aead"),
            reach=self.reach(self.peer),
        )

    def name(self, peer: str) -> str:
        return f"the machine of {peer}"

    def reach(self, peer: str) -> ReachStatus:
        return ReachStatus("direct", "as the test says")

    async def stop(self) -> None:
        self.stopped = True


class FakeDirectory:
    """Knows all members of the network's runs."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    async def peers(self, run: str) -> Sequence[Member]:
        with self._network.lock:
            return [member for _, member in sorted(self._network.runs.get(run, {}).items())]


class FakeHub:
    """The runs of one peer."""

    def __init__(self, network: FakeNetwork, peer: str) -> None:
        self._network = network
        self._peer = peer
        self.run_drivers: dict[str, FakeRunDriver] = {}

    async def join(self, spec: RunSpec, observes: bool = False) -> FakeRunDriver:
        if spec.name in self.run_drivers:
            raise ValueError(f"this daemon takes part in run {spec.name!r} already")
        run_driver = self.run_drivers[spec.name] = FakeRunDriver(self._network, self._peer, spec)
        return run_driver

    async def leave(self, run: FakeRunDriver, reason: str) -> None:
        if self.run_drivers.pop(run.name, None):
            run.end()

    async def stop(self) -> None:
        for run_driver in list(self.run_drivers.values()):
            await self.leave(run_driver, "the router stops")


class FakeTransfer:
    """One peer's snapshots: a newcomer takes the newest of any, byte by byte the same."""

    def __init__(self, network: FakeNetwork, peer: str, spec: RunSpec) -> None:
        self._network = network
        self._peer = peer
        self._spec = spec
        self._wishes = network.wishes.setdefault(spec.name, {})
        self._ended: asyncio.Future[str] | None = None
        self.epoch = 0

    @property
    def wanted(self) -> int | None:
        wishes = [epoch for peer, epoch in list(self._wishes.items()) if peer != self._peer]
        return min((epoch for epoch in wishes if epoch >= self.epoch), default=None)

    @property
    def standing(self) -> str:
        return "fetching a state" if self._peer in self._wishes else ""

    def reach(self, epoch: int) -> None:
        self.epoch = epoch

    async def offer(self, state: StateId, image: memoryview) -> None:
        self.epoch = max(self.epoch, state.epoch)
        with self._network.lock:
            self._network.snapshots.setdefault(self._spec.name, {})[self._peer] = (state, bytes(image))

    @property
    def size(self) -> int:
        return self._spec.layout.encoded_size

    async def recover(
        self,
        after: StateId,
        timeout: float,
        result: Callable[[], memoryview],
        circle: frozenset[str] = frozenset(),
        proved: bool = False,
        patient: bool = False,
    ) -> FetchOutcome:
        with self._network.lock:
            found = self._network.means.get((self._spec.name, after))
        if found is None:
            return FetchOutcome(ok=False, reason="nobody keeps it")
        outcome, mean = found
        if not proved and 2 * len(circle & set(outcome.group)) <= len(circle):
            return FetchOutcome(ok=False, reason="too few that vouch for this peer's state offer it")
        result()[:] = encoded(self._spec.layout, mean)
        sources = dict.fromkeys(outcome.group, 4 * len(mean))
        return FetchOutcome(ok=True, reason="", size=self.size, sources=sources, round=outcome)

    async def fetch(
        self, at_least: int, limit: int, timeout: float, room: Room, *among: frozenset[str]
    ) -> FetchOutcome:
        if self._ended is not None:
            raise ValueError("a state is being fetched already")
        self._ended = asyncio.get_running_loop().create_future()
        self._wishes[self._peer] = at_least
        try:
            return await self._fetch(at_least, limit, timeout, room, self._ended)
        finally:
            del self._wishes[self._peer]
            self._ended = None

    async def _fetch(
        self, at_least: int, limit: int, timeout: float, room: Room, ended: asyncio.Future[str]
    ) -> FetchOutcome:
        deadline = asyncio.get_running_loop().time() + timeout
        while not ended.done() and asyncio.get_running_loop().time() < deadline:
            found = {
                p: s for p, s in self._network.snapshots.get(self._spec.name, {}).items() if p != self._peer
            }
            state, image = max(found.values(), key=lambda one: one[0].epoch, default=(None, b""))
            if state is not None and state.epoch >= at_least:
                if len(image) > limit:
                    return FetchOutcome(ok=False, reason=f"expected an image of at most {limit} bytes")
                (await room(len(image)))[:] = image
                sources = {peer: len(image) // len(found) for peer in found}
                return FetchOutcome(
                    ok=True, reason="as offered", state=state, size=len(image), sources=sources
                )
            await asyncio.wait({ended}, timeout=0.01)
        return FetchOutcome(
            ok=False, reason=ended.result() if ended.done() else f"no state within {timeout:g} s"
        )

    def withdraw(self, reason: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)


class FakeRunDriver:
    """One run of one peer."""

    reason = "as the network says"
    waits = ""

    def __init__(self, network: FakeNetwork, peer: str, spec: RunSpec) -> None:
        self.name = spec.name
        self.transfer = FakeTransfer(network, peer, spec)
        self._network = network
        self._peer = peer
        self._spec = spec
        self.history: deque[Outcome] = deque(maxlen=32)
        self.twins: dict[tuple[str, str], str] = {}
        with network.lock:
            self._member = network.runs.setdefault(spec.name, {})[peer] = Member(peer, spec.hash, spec)

    gathering = None

    @property
    def state(self) -> RunState:
        with self._network.lock:
            members = self._network.runs[self._spec.name]
            waiting = self._network.waiting.get(self._spec.name, {})
        strangers = self._strangers()
        if len(members) - len(strangers) == 1:
            return NoPeers(f"another spec: {self.difference(strangers[0])}") if strangers else NoPeers()
        if self._peer not in waiting:
            return Idle(peers=len(members) - 1)
        if self._network.held and len(waiting) == len(members):
            return Exchanging(members=len(waiting), round=self._member.round)
        return Gathering(ready=len(waiting), target=len(members))

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
        waiting = Waiting(
            decoded(self._spec.layout, vectors.contribution), weight, state, metrics, evaluation
        )
        self._network.enter(self._spec.name, self._peer, waiting)
        try:
            came = await asyncio.wait_for(asyncio.wrap_future(waiting.group), timeout)
            reason = "the run was left"
        except TimeoutError:
            self._network.withdraw(self._spec.name, self._peer)
            came, reason = None, f"no group formed within {timeout:g} s"
        outcome = self._outcome(came, reason)
        if came:
            vectors.mean[:] = encoded(self._spec.layout, came.mean)
            if outcome.state is not None:
                self._network.means[self._spec.name, outcome.state] = outcome, came.mean
        if outcome.counted(self._peer):
            self._member.accumulated = 0.0
        self.history.append(outcome)
        return outcome

    def stop_search(self, why: str) -> None:
        self._network.withdraw(self._spec.name, self._peer)

    withdraw = stop_search

    @property
    def accumulated(self) -> float:
        return self._member.accumulated

    def report_accumulated(self, weight: float) -> None:
        self._member.accumulated = weight

    async def others_accumulated(self, target: float | None = None) -> float:
        with self._network.lock:
            others = [one for one in self._network.runs[self._spec.name].values() if one is not self._member]
        own = self._member
        return sum(one.accumulated for one in others if (one.spec, one.round) == (own.spec, own.round))

    def draw(self, state: StateId) -> Drawn:
        strategy = self._spec.strategy
        with self._network.lock:
            members = self._network.runs[self._spec.name].items()
            live = tuple(sorted(peer for peer, member in members if member.spec == self._spec.hash))
        if not isinstance(strategy, Federated):
            return Drawn(live, live)
        minimum = max(strategy.minimum, strategy.quorum)
        drawn = draw(live, state.lineage, fraction=strategy.fraction, minimum=minimum)
        return Drawn(drawn, live)

    def difference(self, peer: str) -> str:
        with self._network.lock:
            other = self._network.runs[self._spec.name].get(peer)
        if other is None or other.spec == self._spec.hash:
            return ""
        return differences(self._spec, answer_of(other.described, self._spec.marks, 0.0))

    async def objection(self, timeout: float) -> str:
        others = self._strangers()
        with self._network.lock:
            members = list(self._network.runs[self._spec.name])
        alike = len(members) - len(others)
        later = others == members[:1] and alike == 1
        return f"another spec: {self.difference(others[0])}" if len(others) > alike or later else ""

    def _strangers(self) -> list[str]:
        with self._network.lock:
            members = self._network.runs[self._spec.name].items()
            return [peer for peer, member in members if member.spec != self._spec.hash]

    @property
    def round(self) -> int:
        return self._member.round

    rounds_counted = 0
    first_round: int | None = None

    @property
    def rounds_ok(self) -> int:
        return sum(outcome.ok for outcome in self.history)

    @property
    def rounds_failed(self) -> int:
        return len(self.history) - self.rounds_ok

    def end(self) -> None:
        self._network.withdraw(self._spec.name, self._peer)
        with self._network.lock:
            self._network.runs.get(self._spec.name, {}).pop(self._peer, None)
        self.transfer.withdraw("the run was left")

    def _outcome(self, formed: Formed | None, reason: str) -> Outcome:
        self._member.round += 1
        if formed is None:
            return Outcome(
                ok=False, reason=reason, run=self._spec.name, round=self._member.round, started=1.0
            )
        return Outcome(
            ok=True,
            reason="all contributed",
            run=self._spec.name,
            round=self._member.round,
            group=tuple(formed.weights),
            contributors=formed.weights,
            capped=formed.capped,
            states=formed.states,
            metrics=formed.metrics,
            evaluation=formed.evaluation,
            digest="0" * 64,
            started=1.0,
            seconds={"total": 0.0},
        )
