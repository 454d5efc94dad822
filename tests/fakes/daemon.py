"""A swarm in memory with the face of the real one, so that the program can be tested without a network."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch

from equipoise.averaging.aio.run_driver import RoundCounts
from equipoise.averaging.layout import Vectors
from equipoise.averaging.metrics import Report, Values
from equipoise.averaging.outcome import (
    Exchanging,
    Gathering,
    Idle,
    NoPeers,
    Outcome,
    RunState,
)
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.dht.gate import Gate
from equipoise.dht.state import DirectStatus, ReachStatus, SwarmStatus
from equipoise.peer.config import Config
from fakes.vectors import decoded, encoded


@dataclass
class Member:
    """What the network knows of one peer of a run."""

    peer: str
    spec: str
    accumulated: float = 0.0
    left: bool = False
    ready: bool = False
    round: int = 0
    dialable: bool = True
    bandwidth: float = 0.0
    credential: bytes = b""
    tags: tuple[str, ...] = ()
    observes: bool = False
    name: str = ""


class Formed(NamedTuple):
    """What a group came to."""

    mean: torch.Tensor
    weights: dict[str, float]


@dataclass
class Waiting:
    """A peer that waits for a group."""

    contribution: torch.Tensor
    weight: float
    group: concurrent.futures.Future[Formed | None] = field(default_factory=concurrent.futures.Future)


class FakeNetwork:
    """Groups close when all peers of a run are ready; daemons may live in different threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.runs: dict[str, dict[str, Member]] = {}
        self.waiting: dict[str, dict[str, Waiting]] = {}
        self.refused: set[str] = set()
        """Peers whose contribution does not count."""
        self.held = False
        """Whether groups that are complete stay in exchange."""
        self.count = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have daemons of this process join this network."""
        monkeypatch.setattr("equipoise.peer.daemon.wiring.start_parts", self._start_parts)
        # Each network names its peers anew, so an earlier test's handles are not of its runs.
        monkeypatch.setattr("equipoise.peer.connecting._handles", WeakValueDictionary())

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
        expected, waiting = self.runs[run].keys(), self.waiting.get(run, {})
        if not self.held and len(expected) >= 2 and expected <= waiting.keys():
            self._form(run, {peer: waiting[peer] for peer in sorted(expected)})

    def _form(self, run: str, members: dict[str, Waiting]) -> None:
        weights = {p: w.weight for p, w in members.items() if w.weight > 0 and p not in self.refused}
        total = sum(weights.values())
        if total == 0:
            return
        mean = torch.zeros_like(next(iter(members.values())).contribution)
        for peer, weight in weights.items():
            mean += members[peer].contribution * (weight / total)
        for peer, waiting in members.items():
            del self.waiting[run][peer]
            self.runs[run][peer].ready = False
            waiting.group.set_result(Formed(mean, weights))


class FakeSwarm:
    """The swarm of one peer."""

    def __init__(self, network: FakeNetwork, peer: str, config: Config) -> None:
        self.peer = peer
        self.directory = FakeDirectory(network)
        self.config = config
        self.gate = Gate()
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
            direct=DirectStatus(channel="aead"),
            reach=self.reach(self.peer),
        )

    named: frozenset[str] = frozenset()

    def reach(self, peer: str) -> ReachStatus:
        return ReachStatus("direct", "as the test says")

    async def stop(self) -> None:
        self.stopped = True


class FakeDirectory:
    """Knows all members of the network's runs."""

    def banned(self, run: str) -> tuple[()]:
        return ()

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

    def exchange(self, *given: object) -> None:
        """No messages go through this hub."""

    hang_up = exchange

    async def stop(self) -> None:
        for run_driver in list(self.run_drivers.values()):
            await self.leave(run_driver, "the router stops")


class FakeTransfer:
    """One peer's snapshots, of which nobody wants one."""

    wanted, standing = None, ""

    @property
    def donor(self) -> FakeTransfer:
        """Itself."""
        return self

    def reach(self, epoch: int) -> None:
        """Take note of nothing."""


class FakeRunDriver:
    """One run of one peer."""

    reason = "as the network says"
    waits = advice = ""

    def __init__(self, network: FakeNetwork, peer: str, spec: RunSpec) -> None:
        self.name = spec.name
        self.transfer = FakeTransfer()
        self._network = network
        self._peer = peer
        self._spec = spec
        self.counts = RoundCounts()
        self.search = self.announcer = self.comparison = self.membership = self
        self.twins: dict[tuple[str, str], str] = {}
        with network.lock:
            self._member = network.runs.setdefault(spec.name, {})[peer] = Member(peer, spec.hash)

    gathering = None

    def is_trained(self, peers: Iterable[str]) -> bool:
        return False

    @property
    def state(self) -> RunState:
        with self._network.lock:
            members = self._network.runs[self._spec.name]
            waiting = self._network.waiting.get(self._spec.name, {})
        if len(members) == 1:
            return NoPeers()
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
        waiting = Waiting(decoded(self._spec.layout, vectors.contribution), weight)
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
        if outcome.counted(self._peer):
            self._member.accumulated = 0.0
        self.counts.add(outcome)
        return outcome

    def stop(self, why: str) -> None:
        self._network.withdraw(self._spec.name, self._peer)

    withdraw = stop

    @property
    def accumulated(self) -> float:
        return self._member.accumulated

    def report_accumulated(self, weight: float) -> None:
        self._member.accumulated = weight

    async def others_accumulated(self, target: float | None = None) -> float:
        with self._network.lock:
            others = [one for one in self._network.runs[self._spec.name].values() if one is not self._member]
        return sum(one.accumulated for one in others if one.round == self._member.round)

    async def objection(self, named: object, trained: object, timeout: float) -> str:
        return ""

    @property
    def round(self) -> int:
        return self._member.round

    def end(self) -> None:
        self._network.withdraw(self._spec.name, self._peer)
        with self._network.lock:
            self._network.runs.get(self._spec.name, {}).pop(self._peer, None)

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
            digest="0" * 64,
            started=1.0,
            seconds={"total": 0.0},
        )
