"""Federated rounds of real daemons and trainers in virtual time, with faults.

Peers train for tenths of seconds to minutes, die and come again, and are cut off from some of the others or from all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import Federated as Rules
from equipoise.averaging.strategy import parse_strategy
from equipoise.peer.training import Federated, Task
from equipoise.peer.training.history import Record
from fakes.world import World
from simulator.core import Violation

ROUNDS_IN_CALM = 2
"""Rounds that all peers must make together once the faults are over."""

SETTLING_SECONDS = 3.0
"""From the first training to the first fault: then all have seen that as many are there as the first round needs."""


@dataclass(frozen=True)
class Times:
    """Seconds of training: most draws are between the first two, some up to the third."""

    least: float
    usual: float
    most: float

    def draw(self, chance: Random) -> float:
        """How long a training takes."""
        usual = chance.random() < 0.9
        least, most = (self.least, self.usual) if usual else (self.usual, self.most)
        return float(least * (most / least) ** chance.random())


@dataclass
class Script:
    """The training script of one peer, in one of its lives.

    Attributes:
        trained: The states from which it has trained.
        records: The records of its steps.
        trainer: Its trainer, once it has joined.
        killed: Whether its peer was killed.
    """

    storm: Storm
    name: str
    trained: list[StateId] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    trainer: Federated | None = None
    killed: bool = False

    @property
    def epoch(self) -> int:
        """The number of rounds in its state."""
        return self.trainer.epoch if self.trainer is not None else 0

    def live(self) -> None:
        """Train until all peers have made the rounds of the calm; join again where all others seem to have left."""
        while not self.storm.over:
            self.trained = []
            self._train()

    def _train(self) -> None:
        storm, model = self.storm, {"w": torch.zeros(4)}

        def fit(task: Task) -> tuple[float, Mapping[str, float]]:
            self._note_training()
            storm.world.compute(storm.times.draw(storm.chance))
            model["w"] += 1.0
            return 1.0, {}

        with storm.world.join(self.name, "storm", model, strategy=storm.rules.spec) as run:
            trains = storm.may_train(self.name)
            self.trainer = Federated(run, fit if trains else None)
            while not storm.over and not self.trainer.ended:
                self.records.append(self.trainer.step())
                self._note_state()

    def _note_training(self) -> None:
        assert self.trainer is not None
        state = self.trainer.member.id
        if state in self.trained:
            raise Violation(f"{self.name} trains twice from epoch {state.epoch}")
        self.trained.append(state)

    def _note_state(self) -> None:
        assert self.trainer is not None
        if self.trainer.member.in_step:
            state = self.trainer.member.id
            self.storm.states.setdefault(state.epoch, set()).add(state)


class Storm:
    """One run with faults drawn by a seed, and then calm.

    Attributes:
        rules: The strategy of the run.
        states: By epoch: the states of peers in step.
        scripts: By peer: its script, of its last life.
    """

    def __init__(self, seed: int) -> None:
        draw = self.chance = Random(seed)
        self.names = [f"peer{index:02}" for index in range(draw.randint(3, 9))]
        self.world = World("int8", seed)
        self._draw_roles()
        wanted = draw.choice(["", ",tags=gpu"])
        self._tags = {"gpu"} if wanted else set()
        fit = sum(map(self.may_train, self.names))
        quorum = draw.randint(2, max(2, fit // 2))
        found = parse_strategy(
            f"federated:fraction={draw.choice([0.3, 0.5, 1.0])},minimum={quorum},available={fit},quorum={quorum},"
            f"grace={draw.choice([0.0, 2.0, 10.0, 60.0])},deadline={draw.choice([30.0, 120.0])},"
            f"late={draw.choice(['drop', 'next'])}{wanted}"
        )
        assert isinstance(found, Rules)
        self.rules = found
        self.times = draw.choice([Times(0.1, 0.5, 5.0), Times(0.5, 5.0, 20.0), Times(0.1, 10.0, 200.0)])
        self.world.net.latency, self.world.net.lag = draw.choice([(0.001, 0.03), (0.05, 1.0)])
        self.world.net.loss = draw.choice([0.0, 0.0, 0.01])
        self.states: dict[int, set[StateId]] = {}
        self.scripts: dict[str, Script] = {}
        self.lives: list[Script] = []
        self.over = False

    def run(self) -> Storm:
        """Let it pass.

        Raises:
            Violation: A promise was broken.
        """
        for name in self.names:
            self._begin(name)
        self.world.peer("weather", self._weather)
        try:
            self.world.run()
        finally:
            self.world.close()
        self._check_history()
        return self

    def may_train(self, name: str) -> bool:
        """Whether a draw may take a peer: it trains, and carries the tags of the strategy."""
        return name not in self._observers and self._tags <= set(self.world.net.tags[name])

    @property
    def alive(self) -> list[Script]:
        """The scripts of the living peers."""
        return [one for one in self.scripts.values() if not one.killed]

    @property
    def history(self) -> list[Record]:
        """The rounds, as the furthest peer has them."""
        furthest = max(self.alive, key=lambda one: one.epoch).trainer
        return list(furthest.history) if furthest is not None else []

    @property
    def counts(self) -> dict[str, int]:
        """What has happened."""
        weights = [weight for record in self.history for weight in record.contributors.values()]
        records = [record for one in self.lives for record in one.records]
        return {
            "rounds ok": len(self.history),
            "steps failed": sum(not record.ok for record in records),
            "late contributions": sum(record.late > 0 for record in records),
            "late contributions that counted": sum(weight < 1 for weight in weights),
            "second rounds from one state": sum(len(states) - 1 for states in self.states.values()),
        }

    # ---- peers ----

    def _draw_roles(self) -> None:
        """Draw the tags of each peer, and whether it only observes; at least two train and have all tags."""
        others = self.chance.choice([0.0, 0.3])
        self._observers: set[str] = set()
        for index, name in enumerate(self.names):
            self.world.net.tags[name] = () if index > 1 and self.chance.random() < others else ("gpu",)
            if index > 1 and self.chance.random() < others:
                self._observers.add(name)

    def _begin(self, name: str) -> None:
        script = self.scripts[name] = Script(self, name)
        self.lives.append(script)
        self.world.peer(name, script.live, self.world.now + self.chance.random())

    # ---- weather ----

    def _weather(self) -> None:
        draw, world, rules = self.chance, self.world, self.rules
        self._await(60.0, lambda: any(one.trained for one in self.alive), "no first training")
        world.compute(SETTLING_SECONDS)
        for _ in range(draw.randint(0, 10)):
            world.compute(draw.choice([0.1, 1.0, 5.0, 20.0]) * draw.random())
            self._fault()
        world.net.cuts.clear()
        world.net.loss = 0.0
        reach = max(one.epoch for one in self.alive) + ROUNDS_IN_CALM
        bound = 3 * (rules.deadline + rules.grace + self.times.most) + 120.0
        self._await(
            bound, lambda: all(one.epoch >= reach for one in self.alive), f"no {ROUNDS_IN_CALM} rounds"
        )
        self.over = True

    def _await(self, seconds: float, holds: Any, told: str) -> None:
        end = self.world.now + seconds
        while not holds():
            if self.world.now >= end:
                stand = {one.name: one.trainer and (one.epoch, one.trainer.reason) for one in self.alive}
                raise Violation(f"{told} within {seconds:.0f} s: {stand}")
            self.world.compute(0.5)

    def _fault(self) -> None:
        """One fault, drawn at random; more than a quorum of peers that may train stays alive."""
        draw, cuts = self.chance, self.world.net.cuts
        name, kind = draw.choice(self.names[1:]), draw.random()
        left = [one.name for one in self.alive if one.name != name and self.may_train(one.name)]
        if self.scripts[name].killed:
            self._begin(name)
        elif kind < 0.4 and len(left) > self.rules.quorum:
            self.scripts[name].killed = True
            self.world.kill(name)
        elif kind < 0.7:
            own = {pair for pair in cuts if name in pair}
            cuts.difference_update(own)
            if not own:
                self.world.net.cut(name)
        else:
            cuts.add(frozenset(draw.sample(self.names, 2)))

    # ---- promises ----

    def _check_history(self) -> None:
        """A contribution counts once: in the round that it was made for or, with `late=next`, later at its discount."""
        counted: set[tuple[str, int]] = set()
        for record in self.history:
            if len(record.contributors) < self.rules.quorum:
                raise Violation(
                    f"round {record.number} has {len(record.contributors)} contributors, below its quorum"
                )
            for peer, weight in record.contributors.items():
                age = weight**-2 - 1
                if not self.may_train(peer):
                    raise Violation(f"{peer} contributes, which only observes, or lacks tags")
                if not math.isclose(age, round(age), abs_tol=1e-6) or (
                    self.rules.late == "drop" and round(age)
                ):
                    raise Violation(f"a contribution of {peer} to round {record.number} counts {weight:g}")
                training = peer, record.number - round(age)
                if training in counted:
                    raise Violation(f"the training of {peer} for round {training[1]} counts twice")
                counted.add(training)


def storm(seed: int) -> Storm:
    """A run with faults drawn by a seed; then calm, in which all peers must come to further states together.

    Raises:
        Violation: A promise was broken.
    """
    return Storm(seed).run()
