"""What drawn peers can do to federated rounds that never finish their training, and lie about the model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pytest
import torch

from equipoise.peer.training import Federated, Task
from fakes.world import World

PEERS, HOSTILE, FROM, UNTIL = 8, 4, 20.0, 80.0
"""The hostile are half of the peers, so that most draws of four take two or three of them."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_peers_that_never_finish_leave_the_others_most_of_their_rounds(seed: int) -> None:
    world, rounds = World("int8", seed), [0.0]

    def train(index: int) -> None:
        hostile, model = index >= HOSTILE, {"w": torch.zeros(4)}

        def fit(task: Task) -> tuple[float, Mapping[str, float]]:
            world.compute(10 * UNTIL if hostile and world.now > FROM else 0.5)
            model["w"] += 1.0
            return 1.0, {}

        def evaluate(task: Task) -> tuple[float, Mapping[str, float]]:
            return (1e12, {"accuracy": 1e9}) if hostile else (1.0, {"accuracy": 0.5})

        rules = f"federated:fraction=0.5,available={PEERS},grace=0.5,deadline=8"
        with world.join(f"peer{index}", "held", model, strategy=rules) as run:
            trainer = Federated(run, fit, evaluate, until="accuracy >= 0.9")
            while world.now < UNTIL:
                assert not trainer.ended, trainer.reason
                if trainer.step().ok and not index:
                    rounds.append(world.now)

    for index in range(PEERS):
        world.peer(f"peer{index}", lambda index=index: train(index))  # type: ignore[misc]
    world.time.loop.call_later(1.1 * UNTIL, world.time.loop.stop)
    with contextlib.suppress(RuntimeError), contextlib.closing(world):  # The hostile still train.
        world.run()
    third = [at for at in rounds if at > FROM][2]
    before = sum(at <= FROM for at in rounds) / FROM
    after = sum(third < at <= UNTIL for at in rounds) / (UNTIL - third)
    print(f"seed {seed}: {before:.2f} rounds a second before, {after:.2f} from the third on")
    assert after >= 0.6 * before
