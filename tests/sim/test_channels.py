"""Channels that break while the mean is on its way, as where p2pd is killed: nobody waits for a stall in vain."""

from __future__ import annotations

from random import Random

import pytest

from equipoise.averaging.allreduce.events import Finish
from simulator.faults import Fault, When
from simulator.network import Weather
from simulator.scenario import group_of, starts_of
from simulator.world import Report, Scenario, World

MEMBERS = 4


def simulate(seed: int, faults: list[tuple[When, Fault]], leader: int = 0) -> tuple[Report, list[str]]:
    """A round of four, each the owner of one part; what it came to, and all notes."""
    group = group_of(range(MEMBERS), (1.0, 2.0, 3.0, 4.0), leader=leader)
    starts = starts_of(Random(seed), group, 20.0)
    weather = Weather(latency=(0.0005, 0.01), transfer=(0.001, 0.1))
    world = World(Scenario(seed, group, starts, weather, tuple(faults), core=0b1111))
    report = world.run()
    assert all(isinstance(end, Finish) for end in report.ends), seed
    return report, [note for process in world.processes.values() for note in process.member.machine.notes]


@pytest.mark.parametrize("first", range(0, 200, 100))
def test_values_lost_with_one_of_two_channels_are_sent_again_at_once(first: int) -> None:
    for seed in range(first, first + 100):
        chance = Random(f"drop {seed}")
        victim, step = chance.randrange(MEMBERS), chance.randint(10, 60)
        faults: list[tuple[When, Fault]] = []
        for other in {*range(MEMBERS)} - {victim}:
            links = ((victim, other), (other, victim))
            faults.append(
                (When(step=step + chance.randint(0, 8)), Fault(World.drop, links[: chance.randint(1, 2)]))
            )
        _, notes = simulate(seed, faults, leader=chance.randrange(MEMBERS))
        assert not [note for note in notes if "no progress" in note or "opened" in note], (seed, notes)


def test_who_holds_another_mean_than_the_others_chose_without_it_fetches_theirs_at_once() -> None:
    """The leader loses sight of one owner during gather for 2.2 s, and decides again without it.

    That owner held the first mean, waited 2 s more than it had to, and then asked the leader, which had let go.
    """
    found = 0
    for seed in range(60):
        chance = Random(f"cut {seed}")
        owner = chance.randrange(1, MEMBERS)
        step = chance.randint(30, 40)
        faults = [(When(step=step), Fault(World.cut, ((0, owner), (owner, 0)), 2.2, 0.01))]
        report, notes = simulate(seed, faults)
        found += any("deciding again" in note for note in notes)
        assert not [note for note in notes if "in phase commit" in note and "missing" in note], (seed, notes)
        assert report.seconds < 3.0, seed
    assert found > 5
