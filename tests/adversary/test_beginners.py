"""Strangers with another state of a far higher epoch beside peers that have just begun, and a newcomer."""

from __future__ import annotations

import pytest

from adversary.test_other_terms import Pair
from e2e.learners import daemons
from e2e.swarm import Swarm, eventually
from e2e.test_newcomers import THEIRS, Trainer


@pytest.mark.slow
@pytest.mark.parametrize(("honest", "strangers"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_a_newcomer_ends_in_the_state_of_the_peer_that_it_joins_by(
    swarm: Swarm, honest: int, strangers: int
) -> None:
    places = daemons(swarm, 2 + honest + strangers)  # All but the first were told to join by the first.
    ours = [Pair(place, index) for index, place in enumerate(places[: 1 + honest])]
    theirs = [Pair(place, 20, stranger=True, pause=0.2) for place in places[2 + honest :]]
    newcomer = Pair(places[1 + honest], 10)
    for trainer in ours:
        trainer.start()
    eventually(lambda: all(one.updates >= 3 for one in ours), "the first updates", 120.0)
    for stranger in theirs:
        stranger.start()
    eventually(lambda: all(one.steps >= 3 for one in theirs), "steps of the strangers", 120.0)
    newcomer.start()
    eventually(lambda: newcomer.updates >= 20, "updates of the newcomer", 120.0)
    everybody: list[Trainer] = [newcomer, *theirs, *ours]
    for one in everybody:
        one.ended.set()
    for one in everybody:
        one.join(60.0)
    for trainer in (*ours, newcomer):
        assert max(trainer.states) < THEIRS.epoch
    alike = newcomer.states.items() & ours[0].states.items()
    print(f"{len(alike)} of {len(newcomer.states)} states of the newcomer were also of the first peer")
    assert len(alike) >= 0.7 * len(newcomer.states)
