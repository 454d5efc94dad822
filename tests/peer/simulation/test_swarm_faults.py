"""What faults cost a federated training on average, by simulated pairs of runs.

A run's accuracy follows from its draws, which are random: with half of the peers drawn, and two classes each, it varies
by three points from run to run without any fault. So no single pair of runs shows what faults cost; many do.
"""

from __future__ import annotations

from statistics import fmean, stdev

import pytest

from equipoise.peer.demo.trainer import Digits, deal, split_digits
from equipoise.peer.simulation import SimulatedPeer, simulate
from equipoise.peer.training import Federated, Task
from fakes.softmax import SoftmaxLearner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PEERS, ROUNDS, KILL_EVERY, NEWCOMER_ROUND = 8, 20, 3, 9

LAST = 5
"""Rounds at the end over which accuracies are averaged."""

PAIRS = 30
"""Pairs of runs: with a deviation of five points, their mean has one of less than a point."""

OUTER = "fedyogi:eta=0.03"

FIT_SECONDS = 10.0

LOOK_SECONDS = 0.5
"""Time between two looks of a peer that is away."""


class Killed(Exception):
    """The script of a peer ends in the midst of its training."""


class Training:
    """One training of digits split by label, of which half of the peers are drawn.

    With faults, in every third round a peer is killed in its training. It misses two rounds, and begins again without a
    state. A newcomer joins as well.
    """

    def __init__(self, data: tuple[Digits, Digits], faults: bool) -> None:
        self._data, self._faults = data, faults
        self.accuracies: dict[int, float] = {}
        self.killed: dict[int, int] = {}

    def work(self, peer: SimulatedPeer, index: int) -> None:
        """The script of one peer, which is started again after it was killed."""
        training, test = self._data
        learner = SoftmaxLearner(deal(training, index % PEERS, PEERS, "classes:each=2"), seed=index)

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            peer.compute(FIT_SECONDS)
            due = self._faults and task.number % KILL_EVERY == 0 and task.number < ROUNDS
            if due and task.number not in self.killed:
                self.killed[task.number] = index
                raise Killed
            return float(learner.samples), {"loss": learner.fit()}

        def evaluate(task: Task) -> tuple[float, dict[str, float]]:
            if task.number not in self.accuracies:
                self.accuracies[task.number] = learner.accuracy(test)
            return 1.0, {}

        begins: int | None = NEWCOMER_ROUND + 1 if index >= PEERS else 0
        strategy = f"federated:fraction=0.5,available={PEERS}"
        while begins is not None:
            while max(self.accuracies, default=0) < begins:
                peer.compute(LOOK_SECONDS)
            try:
                with peer.join("digits", learner.model, strategy=strategy) as run:
                    Federated(run, fit, evaluate, OUTER, rounds=ROUNDS).run()
                begins = None
            except Killed:
                begins = max(self.killed) + 1

    def accuracy(self, seed: int) -> float:
        """Make the training; returns the mean accuracy of the last models."""
        simulate(self.work, PEERS + self._faults, seed=seed)
        assert len(self.killed) == self._faults * (ROUNDS // KILL_EVERY)
        return fmean(self.accuracies[number] for number in range(ROUNDS - LAST + 1, ROUNDS + 1))


def test_killed_peers_and_a_newcomer_cost_less_than_three_points_on_average() -> None:
    data = split_digits()
    pairs = []
    for seed in range(PAIRS):
        pairs.append((Training(data, False).accuracy(seed), Training(data, True).accuracy(seed)))
        print(f"pair {seed}: {pairs[-1][0]:.3f}, with faults {pairs[-1][1]:.3f}")
    calm, rough = zip(*pairs, strict=True)
    differences = [faulty - whole for whole, faulty in pairs]
    print(
        f"{fmean(calm):.3f} +- {stdev(calm):.3f}, with faults {fmean(rough):.3f} +- {stdev(rough):.3f}; "
        f"difference {fmean(differences):+.3f} +- {stdev(differences):.3f}"
    )
    assert fmean(rough) >= fmean(calm) - 0.03
