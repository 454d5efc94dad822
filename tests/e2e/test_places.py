"""More peers than a group has places, with real daemons: one state, always, and freed places are taken."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from e2e.learners import LISTEN
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.threads import begin
from equipoise.peer import EquipoiseError, Run, connect
from equipoise.peer.training import DiLoCo, Federated
from equipoise.peer.training.member import Member

PLACES, EPOCHS, KILLS = 4, 50, (15, 30)

WAITS = "places are taken"

LATE_ROUNDS = 2
"""Rounds after the death of a peer in which its place may stay free."""

COMPUTING = threading.Event()
"""Never set: a script that waits for it computes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Script:
    """One peer's training script.

    Attributes:
        daemon: Its daemon.
        states: Epoch and lineage, each time that the script looked and was told that they are the group's.
        rounds: Epoch before each round that it saw, and the peers with a contribution to its mean.
        began: When its first step began.
        told: When it was first told that it waits for a place, and the epoch of the first peer then.
        epoch: Where it stands.
        digest: Of its last state.
        killed: Whether the test has ended its daemon.
    """

    daemon: DaemonProcess
    states: set[tuple[int, str]] = field(default_factory=set)
    rounds: dict[int, tuple[str, ...]] = field(default_factory=dict)
    began: float = 0.0
    told: tuple[float, int] | None = None
    member: Member | None = None
    killed: bool = False
    peer: str = ""

    @property
    def epoch(self) -> int:
        return self.member.id.epoch if self.member else 0

    def look(self) -> None:
        """Note what this peer is told after a step."""
        assert self.member is not None
        outcome = self.member.last
        if self.member.in_step:
            self.states.add((self.member.id.epoch, self.member.id.lineage))
        if outcome is not None and outcome.ok and outcome.state is not None:
            given = tuple(peer for peer, weight in outcome.contributors.items() if weight >= 1)
            if given:
                self.rounds[outcome.state.epoch] = given


def step(script: Script, run: Run, model: torch.nn.Module, chance: torch.Generator) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    opt = run.optimizer(inner, target_batch_size=8 * PLACES, batch_size=8, timeout=20.0)
    script.member, script.began = opt.member, time.monotonic()
    while opt.epoch < EPOCHS and not script.killed:
        learn(model, chance)
        opt.step()
        script.look()


def locally(script: Script, run: Run, model: torch.nn.Module, chance: torch.Generator) -> None:
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(run, every=4, timeout=20.0) as group:
        script.member, script.began = group.member, time.monotonic()
        while group.epoch < EPOCHS and not script.killed:
            inner.zero_grad()
            learn(model, chance)
            inner.step()
            script.look()


def in_rounds(script: Script, run: Run, model: torch.nn.Module, chance: torch.Generator) -> None:
    def fit(task: Any) -> tuple[float, dict[str, float]]:
        COMPUTING.wait(0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=chance)
        return 8.0, {}

    training = Federated(run, fit, rounds=EPOCHS)
    script.member, script.began = training.member, time.monotonic()
    while not training.ended and not script.killed:
        training.step()
        script.look()
    training.finish()


def learn(model: torch.nn.Module, chance: torch.Generator) -> None:
    COMPUTING.wait(0.1)
    model(torch.randn(8, 4, generator=chance)).square().mean().backward()


def live(script: Script, index: int, kind: str, alike: bool, ready: threading.Barrier) -> None:
    threading.current_thread().name = f"script{index}"
    model = torch.nn.Linear(4, 3)
    with (
        torch.no_grad()
    ):  # All threads draw from one generator, so that seeds would not make the models alike.
        for parameter in model.parameters():
            parameter.fill_(0.5 if alike else 0.5 + index)
    strategy = {"federated": f"federated:available={ready.parties},grace=2,deadline=20"}
    more = {"strategy": strategy[kind]} if kind in strategy else {}
    work = {"optimizer": step, "diloco": locally, "federated": in_rounds}[kind]
    with connect(str(script.daemon.home)) as client:
        script.peer = client.peer_id
        with client.join(f"places-{kind}", model, group_size=PLACES, codec="fp32", **more) as run:
            ready.wait()
            work(script, run, model, torch.Generator().manual_seed(index))
            script.look()


def watch(scripts: list[Script], over: threading.Event) -> None:
    while not over.wait(0.02):
        for script in scripts:
            if script.told is None and script.member is not None and WAITS in script.member.reason:
                script.told = time.monotonic(), max(one.epoch for one in scripts)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def kill(scripts: list[Script], epoch: int) -> int:
    """Kill a contributor of the last round, once one has reached an epoch; returns the epoch of the first then."""
    alive = [one for one in scripts if not one.killed]
    eventually(lambda: max(one.epoch for one in alive) >= epoch, f"epoch {epoch}", 300.0)
    last = max(max(one.rounds, default=0) for one in alive)
    given = next(one.rounds[last] for one in alive if last in one.rounds)
    chosen = next(one for one in alive if one.peer in given)
    chosen.killed = True
    chosen.daemon.kill()
    return max(one.epoch for one in alive)


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "unlike"])
@pytest.mark.parametrize("count", [6, 12])
@pytest.mark.parametrize("kind", ["optimizer", "diloco", "federated"])
def test_there_is_one_state_though_more_peers_train_than_a_group_holds(
    swarm: Swarm, over: threading.Event, kind: str, count: int, alike: bool
) -> None:
    scripts = [Script(daemon) for daemon in swarm.daemons(count, args=LISTEN)]
    ready, began = threading.Barrier(count), time.monotonic()
    ends = [begin(live, script, index, kind, alike, ready) for index, script in enumerate(scripts)]
    begin(watch, scripts, over)
    killed_at = [kill(scripts, epoch) for epoch in KILLS]
    alive = [script for script in scripts if not script.killed]
    settle(scripts, ends)
    report(scripts, killed_at, time.monotonic() - began)
    states = defaultdict(set)
    for epoch, lineage in set[tuple[int, str]]().union(*(script.states for script in scripts)):
        states[epoch].add(lineage)
    assert {epoch: found for epoch, found in states.items() if len(found) > 1} == {}
    assert {script.epoch for script in alive} == {EPOCHS}
    rounds = {epoch: given for script in scripts for epoch, given in script.rounds.items()}
    if kind == "federated" or not alike:
        return  # Each round draws anew, or peers with other parameters must fetch those of the first to train.
    # A peer that attends the first round may be told so before it has its place.
    first = {peer for epoch in range(LATE_ROUNDS) for peer in rounds.get(epoch, ())}
    told = [one.told[1] for one in scripts if one.told is not None and one.peer not in first]
    assert len(told) >= count - PLACES
    assert max(told) < KILLS[0], told
    free = [epoch for epoch, given in rounds.items() if len(given) < PLACES]
    allowed = {at + more for at in (0, *killed_at) for more in range(LATE_ROUNDS + 1)}
    assert set(free) <= allowed, free


def settle(scripts: list[Script], ends: list[Future[Any]]) -> None:
    for script, end in zip(scripts, ends, strict=True):
        try:
            end.result(400.0)
        except EquipoiseError:
            assert script.killed


def report(scripts: list[Script], killed_at: list[int], seconds: float) -> None:
    rounds = {epoch: len(given) for script in scripts for epoch, given in script.rounds.items()}
    few = {epoch: count for epoch, count in sorted(rounds.items()) if count < PLACES}
    told = sorted(round(one.told[0] - one.began, 2) for one in scripts if one.told is not None)
    states = defaultdict(set)
    for script in scripts:
        for epoch, lineage in script.states:
            states[epoch].add(lineage)
    split = {epoch: len(found) for epoch, found in states.items() if len(found) > 1}
    seen = {script.peer[-4:]: len(script.states) for script in scripts}
    print(
        f"{seconds:.1f} s; killed at {killed_at}; epochs with several states: {split}; rounds of fewer: {few}"
    )
    print(f"told to wait after {told} s; epochs in step: {seen}; ends: {[one.epoch for one in scripts]}")
