"""Federated rounds in virtual time, with the faults of a seed; `scripts/simulate.py --what federated` runs more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from equipoise.peer.training import Federated, Task
from fakes.world import World
from simulator.federated import storm


@pytest.mark.parametrize(
    "seed",
    [
        3,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 11, 12)),
        1042,  # A peer that begins again is drawn for the first round, and first sees fewer peers than that needs.
    ],
)
def test_no_promise_is_broken_while_peers_train_die_come_and_are_cut_off(seed: int) -> None:
    assert storm(seed).counts["rounds ok"] >= 2


def test_peers_that_were_cut_in_two_come_to_one_state_though_nobody_keeps_the_means_between() -> None:
    world, names = World("int8", 1), [f"peer{index}" for index in range(6)]
    few, slow = names[3:], dict.fromkeys(names[:3], 3.0)
    trainers: dict[str, Federated] = {}
    took: list[float] = []

    def train(name: str) -> None:
        model = {"w": torch.zeros(4)}

        def fit(task: Task) -> tuple[float, Mapping[str, float]]:
            world.compute(slow.get(name, 1.0))
            model["w"] += 1.0
            return 1.0, {}

        rules = "federated:fraction=0.3,available=6,grace=2,deadline=30,late=next"
        with world.join(name, "split", model, strategy=rules) as run:
            trainer = trainers[name] = Federated(run, fit)
            while not took:
                trainer.step()

    def weather() -> None:
        world.compute(6.0)
        world.net.cut(*few)
        world.compute(15.0)
        alive = [trainers[name].member for name in names[:-1]]
        assert alive[-1].id.epoch > alive[0].id.epoch + 1
        world.kill(names[-1])
        world.net.cuts.clear()
        healed = world.now
        while not all(member.in_step and member.id == alive[0].id for member in alive):
            world.compute(0.5)
        took.append(world.now - healed)

    for name in names:
        world.peer(name, lambda name=name: train(name))  # type: ignore[misc]
    world.peer("weather", weather)
    try:
        world.run()
    finally:
        world.close()
    assert took[0] <= 60.0
