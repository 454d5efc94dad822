"""Sleepers: peers that train as all others do for a while, and then claim another state of a far higher epoch."""

from __future__ import annotations

import pytest
import torch

from e2e.learners import daemons
from e2e.swarm import DaemonProcess, Swarm, eventually
from e2e.test_newcomers import THEIRS, Trainer
from equipoise.peer import Run
from equipoise.peer.training import SwarmOptimizer

FAR = 100.0
"""No honest parameter is so far from 0; those of sleepers are farther."""


class Sleeper(Trainer):
    """It contributes to so many means, then loads a state of its own.

    Attributes:
        awake: Whether it has.
    """

    def __init__(self, place: DaemonProcess, index: int, honest: int) -> None:
        super().__init__(place, index)
        self.awake = False
        self._honest = honest

    def _step(self, run: Run, optimizer: SwarmOptimizer, number: int) -> None:
        if self.updates >= self._honest and not self.awake:
            self.awake = True
            with torch.no_grad():
                for one in run.core.binding.source.parameters():  # type: ignore[union-attr]
                    one.fill_(666.0)
            optimizer.load(optimizer.member._state.image(THEIRS))
        super()._step(run, optimizer, number)


class Victim(Trainer):
    """It notes the largest of its parameters.

    Attributes:
        largest: That.
    """

    largest = 0.0

    def _step(self, run: Run, optimizer: SwarmOptimizer, number: int) -> None:
        super()._step(run, optimizer, number)
        for one in run.core.binding.source.parameters():  # type: ignore[union-attr]
            self.largest = max(self.largest, float(one.detach().abs().max()))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sleepers", "honest", "means"),
    [
        (1, 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 3, 1), (4, 3, 1), (4, 3, 10), (8, 3, 2))
        ),
    ],
)
def test_sleepers_never_replace_what_others_have_trained(
    swarm: Swarm, sleepers: int, honest: int, means: int
) -> None:
    places = daemons(swarm, honest + sleepers)
    ours = [Victim(place, index) for index, place in enumerate(places[:honest])]
    theirs = [Sleeper(place, index, means) for index, place in enumerate(places[honest:], honest)]
    for trainer in (*ours, *theirs):
        trainer.start()
    eventually(lambda: all(sleeper.awake for sleeper in theirs), "that the sleepers wake", 120.0)
    counts = [(one.steps, one.updates) for one in ours]
    eventually(
        lambda: all(one.steps >= steps + 40 for one, (steps, _) in zip(ours, counts, strict=True)),
        "steps beside them",
        120.0,
    )
    for trainer in (*ours, *theirs):
        trainer.ended.set()
    for trainer in (*ours, *theirs):
        trainer.join(90.0)
    for one, (steps, updates) in zip(ours, counts, strict=True):
        done = one.updates - updates
        print(f"{done} of {one.steps - steps} steps were updates, the largest parameter {one.largest:.2f}")
        assert one.largest < FAR
        assert THEIRS.epoch not in one.states
        assert done >= 0.8 * (one.steps - steps)
