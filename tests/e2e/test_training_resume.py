"""Everything is killed at once, and training goes on from the checkpoints."""

from __future__ import annotations

import random

import pytest

from e2e.learners import LISTEN, daemons, shared, start
from e2e.swarm import Swarm, eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

EVERY, SAMPLES, PEERS = 5, 8, 3

MOST_LOST = 2 * EVERY
"""Epochs: those since the checkpoint that was being written, and its own if the machine died before it was whole."""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_goes_on_after_all_was_killed(swarm: Swarm, seed: int) -> None:
    places = daemons(swarm, PEERS)
    training = {"samples": SAMPLES, "target": float(SAMPLES * PEERS), "checkpoints": EVERY}
    learners = start(swarm, places, runs={"fp32": 10**9}, **training)
    moment = 4 * EVERY + random.Random(seed).randrange(EVERY)
    eventually(lambda: all(learner.reached >= moment for learner in learners), f"epoch {moment}", 90)
    for process in [*(learner.process for learner in learners), *places]:
        process.kill()
    reached = max(learner.reached for learner in learners)

    first = swarm.daemon(places[0].home.name, args=LISTEN)
    again = [first, *(swarm.daemon(place.home.name, [first.address], LISTEN) for place in places[1:])]
    resumed = start(swarm, again, peers=1, runs={"fp32": 10**9}, resume=True, patience=60.0, **training)
    eventually(
        lambda: sum(epoch > reached for epoch in shared(resumed)) >= EVERY, "all to go on together", 90
    )

    assert all(len(lineages) == 1 for lineages in shared(resumed).values())
    least = min(learner.updates[0].before for learner in resumed)
    print(f"killed at epoch {reached}, resumed from epoch {least}")
    assert least >= moment - MOST_LOST
