"""A peer that is told that its contribution is late while it already downloads the mean that it missed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.trainers import SAMPLES, Trainer, assert_alike
from fakes.training import FakeRun, FakeSwarm


class Coordinated(FakeSwarm):
    """A contribution to a state that the others have left is late, by a word that comes once the mean is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[StateId] = set()
        self.told = 0

    @property
    def makes(self) -> type[FakeRun]:
        return Asking

    def _form(self, members: Mapping[str, FakeRun]) -> None:
        givers = {peer: run for peer, run in members.items() if run.waiting and run.weight > ATTENDANCE_LIMIT}
        behind = {peer: run for peer, run in givers.items() if run.claim in self.kept}
        for run in behind.values():
            if run.claim in self.asked:
                self.told += 1
                run.end(Outcome(ok=False, reason="too late by 1 s", run=run.name, late=1.0), None)
        super()._form({peer: run for peer, run in members.items() if peer not in behind})


class Asking(FakeRun):
    """Its daemon remembers for which means it was asked."""

    swarm: Coordinated

    def recover(self, after: StateId, *args: Any, **options: Any) -> Any:
        self.swarm.asked.add(after)
        return super().recover(after, *args, **options)


def test_a_late_peer_takes_the_mean_that_it_has_asked_for_already() -> None:
    swarm = Coordinated()
    swarm.recover_seconds, swarm.lingers = 0.5, True
    trainers = [Trainer(swarm, index, 8, target_batch_size=3 * SAMPLES) for index in range(4)]
    late = trainers[3]
    backward = late.backward

    def held_up() -> None:
        assert late.calls < 60, "it trains on for a state that the others have left"
        if late.opt.epoch == 4 and swarm.now < 10.0:
            swarm.compute(10.0 - swarm.now)
        backward()

    late.backward = held_up  # type: ignore[method-assign]
    for trainer in trainers:
        trainer.begin()
    swarm.run()
    assert_alike(trainers)
    assert swarm.told > 0
    assert not any("alone" in reason for _, reason in late.seen)
