"""Federated rounds by real daemons, with training scripts in threads, beside a reference of one number at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from e2e.swarm import DaemonProcess
from e2e.threads import together
from equipoise.peer import connect
from equipoise.peer.training import Federated, History, Record, Task
from oracles.federated import OUTER, RULES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PEERS, ROUNDS = 5, 4

SIZES = {"bias": (7,), "weight": (20, 10)}


def noise(*seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(sum(one * 1000**at for at, one in enumerate(seed, 1)))
    return {name: scale * torch.randn(size, generator=chance) for name, size in SIZES.items()}


class Trainer:
    """A training script in a thread of this process; its training moves the model by numbers drawn from a seed.

    Attributes:
        models: The model after each round that it was in, by the round's number.
        records: What `step` returned.
        fits: The rounds in which it trained.
    """

    def __init__(self, place: DaemonProcess, index: int) -> None:
        self.place, self.index = place, index
        self.model = noise(99)
        self.models: dict[int, dict[str, torch.Tensor]] = {}
        self.records: list[Record] = []
        self.fits: list[int] = []
        self.evaluated: list[int] = []
        self.history: History
        self.image = b""

    @property
    def weight(self) -> float:
        return 10.0 + 7 * self.index

    def fit(self, task: Task) -> tuple[float, dict[str, float]]:
        self.fits.append(task.number)
        for name, moved in noise(self.index, task.number, scale=0.1).items():
            self.model[name].add_(moved)
        return self.weight, {"loss": math.sin(self.index + task.number)}

    def evaluate(self, task: Task) -> tuple[float, dict[str, float]]:
        self.evaluated.append(task.number)
        return 1.0 + self.index, {"score": math.cos(self.index + task.number)}

    def train(self, name: str, strategy: str, outer: str, rule: str, **options: Any) -> None:
        with (
            connect(self.place.home) as peer,
            peer.join(name, self.model, strategy=strategy, rule=rule, codec="fp32") as run,
        ):
            trained = Federated(run, self.fit, self.evaluate, outer, **{"rounds": ROUNDS, **options})
            while not trained.ended:
                self.records.append(trained.step())
                self.models[trained.epoch] = {key: one.clone() for key, one in self.model.items()}
            trained.finish()
            self.peer, self.history = run.peer, trained.history
            self.image = bytes(trained.member.image().numpy())


def trained(
    places: Sequence[DaemonProcess], name: str, work: Callable[[Trainer], None] | None = None, **options: Any
) -> list[Trainer]:
    """A trainer on each daemon, after the end of all."""
    trainers = [Trainer(place, index) for index, place in enumerate(places)]
    given = {"strategy": f"federated:available={len(places)}", "outer": "average", "rule": "mean", **options}
    together(work or (lambda one: one.train(name, **given)), trainers)
    return trainers


def assert_alike(trainers: Sequence[Trainer]) -> None:
    """Models, metrics and digests are equal after every round, and so is all of the state at the end."""
    first = trainers[0]
    for other in trainers[1:]:
        assert other.history == first.history
        assert other.image == first.image
        for number in other.models.keys() & first.models.keys():
            mine, theirs = other.models[number], first.models[number]
            assert all(torch.equal(one, theirs[name]) for name, one in mine.items())


def reference(trainers: Sequence[Trainer], outer: str, rule: str) -> list[dict[str, list[float]]]:
    """The models after each round, one number at a time."""
    name, _, beta = rule.partition(":beta=")
    servers = {key: [OUTER[outer](w) for w in one.flatten().tolist()] for key, one in noise(99).items()}
    models = []
    for round in range(1, ROUNDS + 1):
        moved = [noise(one.index, round, scale=0.1) for one in trainers]
        for key, column in servers.items():
            rows = torch.stack([one[key].flatten() for one in moved]).T.tolist()
            for server, values in zip(column, rows, strict=True):
                weights = [one.weight for one in trainers]
                server.go(RULES[name](values, weights, *([float(beta)] if beta else [])))
        models.append({key: [server.w for server in column] for key, column in servers.items()})
    return models


CASES = [("average", "mean"), ("fedadam", "median"), ("fedyogi", "trimmed:beta=0.2")]


@pytest.mark.parametrize(("outer", "rule"), CASES)
def test_five_daemons_come_to_what_the_reference_does(
    places: list[DaemonProcess], outer: str, rule: str
) -> None:
    # All five are in each round, however late on a busy machine: the quorum waits, and a grace alone would not.
    strategy = f"federated:available={PEERS},quorum={PEERS}"
    trainers = trained(places, f"{outer}-{rule}", strategy=strategy, outer=outer, rule=rule)
    assert_alike(trainers)
    weights = {one.peer: one.weight for one in trainers}
    assert [record.contributors for record in trainers[0].history] == [weights] * ROUNDS
    for number, expected in enumerate(reference(trainers, outer, rule), 1):
        for name, one in trainers[0].models[number].items():
            values = torch.tensor(expected[name], dtype=torch.float64)
            off = float((one.flatten().double() - values).abs().max() / values.abs().max())
            assert off <= 2e-6
    for record in trainers[0].history:
        losses = [math.sin(one.index + record.number) for one in trainers]
        scores = [math.cos(one.index + record.number - 1) for one in trainers]
        if rule == "mean":
            total = math.fsum(weights.values())
            loss = math.fsum(one.weight * value for one, value in zip(trainers, losses, strict=True)) / total
            score = math.fsum((1 + at) * value for at, value in enumerate(scores)) / 15
        else:
            loss, score = sorted(losses)[2], sorted(scores)[2]
        assert record.metrics["loss"] == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert record.evaluation["score"] == pytest.approx(score, rel=1e-12, abs=1e-15)
