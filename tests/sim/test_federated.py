"""Federated rounds in virtual time, with the faults of a seed; `scripts/simulate.py --what federated` runs more."""

from __future__ import annotations

import pytest

from equipoise.averaging.strategy import Federated
from simulator.federated import FederatedWorld, Times, storm


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        60,  # Training takes minutes.
        478,  # A peer has had a later round than the others.
        100,  # The others go ahead of a peer that waits alone.
        11,  # Late contributions wait for the end of an exchange of a minute, of which their coordinator is no member.
    ],
)
def test_no_promise_is_broken_while_peers_train_stop_die_and_come(seed: int) -> None:
    world = storm(seed)
    assert sum(ok for *_, ok in world.rounds) >= 2


def calm(strategy: Federated, count: int, times: Times) -> FederatedWorld:
    return FederatedWorld([f"peer{index:02}" for index in range(count)], strategy, times, seed=1)


def test_in_calm_exactly_the_drawn_train_once_for_each_state_and_all_take_each_mean() -> None:
    world = calm(Federated(fraction=0.5, available=8, quorum=3, grace=60.0), 8, Times(0.5, 5.0, 20.0))
    assert world.run(400.0, until=lambda: all(one.state.epoch > 8 for one in world.trainers))
    for state, names in world.trainings.items():
        assert len(names) == len(set(names)) == 4, state
    assert all(ok for *_, ok in world.rounds)
    assert not sum(one.late for one in world.trainers)
    assert world.forks == 0


def test_what_comes_after_the_grace_is_late_and_counts_nowhere() -> None:
    strategy = Federated(available=6, quorum=3, grace=1.0)
    world = calm(strategy, 6, Times(0.1, 20.0, 60.0))
    assert world.run(400.0, until=lambda: all(one.state.epoch > 8 for one in world.trainers))
    assert sum(one.late for one in world.trainers) > 0
    assert world.forks == 0
