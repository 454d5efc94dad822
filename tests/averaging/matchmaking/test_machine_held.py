"""Runs in virtual time whose coordinator is honest and not ready: nobody takes it for one that holds its group."""

from __future__ import annotations

import pytest

from simulator.matchmaking import World

READY_AFTER = 20.0
"""Seconds; longer than any coordinator may take that could have closed a group."""


@pytest.mark.parametrize("seed", range(8))
def test_a_coordinator_that_is_ready_late_meets_a_trainer_and_an_observer(seed: int) -> None:
    world = World(["a", "b", "c"], 4, seed=seed)
    world.run(3.0)
    coordinator = world.coordinator_of("a")
    trainer, observer = (name for name in world.peers if name != coordinator)
    world.ready(trainer)
    world.ready(observer, weight=0.0)
    world.ready(coordinator, after=READY_AFTER)
    assert world.run(READY_AFTER + 5.0, until=lambda: all(peer.formed for peer in world.peers.values()))


@pytest.mark.parametrize("seed", range(8))
def test_the_only_one_that_can_be_dialled_may_be_ready_late(seed: int) -> None:
    world = World(["a"], 4, seed=seed)
    for name in ("b", "c"):
        world.add(name, dialable=False)
        world.ready(name, after=3.0)
    world.ready("a", after=3.0 + READY_AFTER, weight=0.0)
    world.run(3.0)
    assert world.coordinator_of("a") == "a"
    # The two that nobody can dial are a group once it takes part.
    assert world.run(READY_AFTER + 5.0, until=lambda: all(peer.formed for peer in world.peers.values()))
