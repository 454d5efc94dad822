"""Channels that break while the mean is on its way, as where p2pd is killed: nobody waits for a stall in vain."""

from __future__ import annotations

from random import Random

import pytest

from equipoise.averaging.allreduce.events import Finish, Group
from fakes.seeds import few_and_many
from simulator.faults import Fault, When
from simulator.network import Weather
from simulator.scenario import group_of, starts_of
from simulator.world import Report, Scenario, World

MEMBERS = 4


def simulate(
    seed: int, faults: list[tuple[When, Fault]], leader: int = 0, members: int = MEMBERS
) -> tuple[Report, list[str]]:
    """Simulate a round of members that own one part each; return its report and all notes."""
    group = group_of(range(members), (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)[:members], leader=leader)
    starts = starts_of(Random(seed), group, 20.0)
    weather = Weather(latency=(0.0005, 0.01), transfer=(0.001, 0.1))
    world = World(Scenario(seed, group, starts, weather, tuple(faults), core=(1 << members) - 1))
    report = world.run()
    assert all(isinstance(end, Finish) for end in report.ends), seed
    return report, [
        note for process in world.processes.values() for note in process.member.machine.findings.notes
    ]


@few_and_many(60, 200)
def test_values_lost_with_one_of_two_channels_are_sent_again_at_once(seeds: range) -> None:
    for seed in seeds:
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


def test_a_member_with_another_mean_than_the_chosen_one_fetches_that_at_once() -> None:
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


@pytest.mark.parametrize("members", [2, 3, 4, 6])
@few_and_many(25, 300)
def test_a_member_whose_network_breaks_for_less_than_a_stall_costs_nobody_one(
    members: int, seeds: range
) -> None:
    """All channels of one member break, during gather or near it, and come back one by one, as with its p2pd.

    Means that overtook their proposal were refused and never sent again. Two members opened a ballot each, or one
    opened a ballot that the others did not need, and no ballot had a majority.
    """
    for seed in seeds:
        chance = Random(f"network {seed}")
        victim, leader = chance.randrange(members), chance.randrange(members)
        gather = When(member=chance.randrange(members), phase="gather")
        when = gather if chance.random() < 0.6 else When(step=chance.randint(20, 70))
        seconds, noticed = chance.uniform(0.0, 1.6), chance.choice((0.01, 0.1, 1.0))
        faults = [
            (
                when,
                Fault(
                    World.cut, ((victim, other), (other, victim)), seconds + chance.uniform(0, 0.3), noticed
                ),
            )
            for other in {*range(members)} - {victim}
        ]
        _, notes = simulate(seed, faults, leader, members)
        waits = [note for note in notes if "no progress" in note]
        assert not [note for note in waits if members > 2 or "commit" in note], (seed, notes)


def broken_at(frame: int, group: Group, every: bool = False) -> World:
    """Simulate a round in which a channel breaks at a frame, or at that and one in four after it."""
    weather = Weather(latency=(0.0005, 0.01), transfer=(0.001, 0.02))
    scenario = Scenario(frame, group, starts_of(Random(0), group, 30.0), weather, core=(1 << group.size) - 1)
    world = World(scenario)
    chance = Random(frame)
    world.breaks = lambda written: written == frame or (every and written > frame and chance.random() < 0.25)
    world.run()
    return world


@pytest.mark.parametrize("every", [False, True], ids=["once", "again and again"])
@pytest.mark.parametrize(("size", "dialable"), [(2, 0b11), (2, 0b01), (3, 0b111), (3, 0b001)])
def test_a_channel_that_breaks_at_any_frame_loses_none_and_repeats_none(
    size: int, dialable: int, every: bool
) -> None:
    owners = [member for member in range(size) if dialable >> member & 1] * 2
    group = group_of(owners, (1.0, 2.0, 3.0)[:size], dialable)
    frames = broken_at(-1, group).written
    assert frames > 4 * size
    for frame in range(frames):
        world = broken_at(frame, group, every)
        for process in world.processes.values():
            assert isinstance(process.member.ended, Finish), frame
        world.run_until(lambda: False)  # What was said last arrives too.
        for (sender, to), link in world.links.items():
            session, other = link.outbox.session, world.links[to, sender].outbox.session
            waits = link.outbox.control or link.outbox.has_bulk
            assert not waits, (frame, sender, to)
            assert other.delivered == session.numbered, (frame, sender, to)
        assert world.delivered == sum(link.outbox.session.numbered for link in world.links.values()), frame


def cut_off_at(step: int) -> World:
    """Simulate a round of three of which only the first can be dialled; the last is cut off from it for a moment."""
    group = group_of((0, 0), (1.0, 2.0, 3.0), dialable=0b001)
    weather = Weather(latency=(0.0005, 0.01), transfer=(0.001, 0.02))
    faults = ((When(step=step), Fault(World.cut, ((0, 2), (2, 0)), 0.3, 0.0)),)
    world = World(Scenario(step, group, starts_of(Random(0), group, 30.0), weather, faults, core=0b111))
    world.run()
    return world


def test_a_member_that_is_cut_off_for_a_moment_gets_the_mean() -> None:
    for step in range(60):
        for process in cut_off_at(step).processes.values():
            assert isinstance(process.member.ended, Finish), step
