"""Newcomers and donors in virtual time, with faults from seeds: the image is right, in time, and donors are spared."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from equipoise.averaging.replication.answers import LONE_SECONDS
from equipoise.averaging.replication.chunks import CHUNK_BYTES
from equipoise.averaging.replication.server import KEPT_MEANS, MAX_SNAPSHOTS, SNAPSHOTS_SECONDS
from equipoise.averaging.timing import ASKER_SECONDS
from fakes.seeds import few_and_many
from simulator.statesync import MEAN, Result, Scenario, Trouble, World, image_of, state_of

FINE = Trouble()


def scenario_of(seed: int) -> Scenario:
    """Any number of donors, of which each may have any trouble."""
    random = Random(seed)
    step = random.choice([0.01, 0.05, 0.3, 1.0, 5.0, 20.0])
    return Scenario(
        donors=tuple(trouble_of(random) for _ in range(random.randint(1, 8))),
        step=(step, 1.5 * step),
        looks=random.choice([1, 2, 4]),
        skew=min(step / 2, 0.1 * random.random()),
        latency=(0.0005, random.choice([0.002, 0.05, 0.2])),
        chunk=random.choice([0.001, 0.01, 0.1]),
        chunks=random.choice([1, 5, 40, 120]),
        busy=random.random() < 0.5,
        newcomers=random.choice([1, 1, 2, 3]),
        at_least=random.choice([0, 1, 3]),
    )


def trouble_of(random: Random) -> Trouble:
    begins = 2 + 5 * random.random()
    kinds = [
        FINE,
        FINE,
        FINE,
        FINE,
        Trouble(killed_at=begins),
        Trouble(stopped=(begins, begins + 10 * random.random())),
        Trouble(flips=random.choice([0.02, 0.5, 1.0])),
        Trouble(lies=random.choice(["image", "epoch", "promise"])),
        Trouble(astray=True),
        Trouble(absent=True),
    ]
    return random.choice(kinds)


def check(scenario: Scenario, world: World) -> None:
    honest = sum(trouble.honest for trouble in scenario.donors)
    for name, result in world.results.items():
        if honest >= 2 and 2 * honest > len(scenario.donors):
            assert right(scenario, world, name, result), (name, result)
            assert result.ended_at < bound(scenario), (name, result)
    for donor in world.donors.values():
        windows = world.now // SNAPSHOTS_SECONDS + 1
        assert donor.snapshots <= windows * MAX_SNAPSHOTS
        assert donor.most_held <= 2


def right(scenario: Scenario, world: World, name: str, result: Result) -> bool:
    outcome, state = result.outcome, result.outcome.state
    if state is None:
        # Whether there was time enough for so many bytes is the link's affair.
        return not outcome.ok and "MiB" in outcome.reason and bound(scenario) > scenario.timeout
    return (
        outcome.ok
        and state == state_of(state.epoch)
        and result.image == image_of(state, scenario.chunks)
        and outcome.size == result.image.size
        and set(result.chunks) == set(range(1, scenario.chunks + 1))
        and state.epoch >= world.newcomers[name].request.wish.at_least
        and sum(-(-size // CHUNK_BYTES) for size in outcome.sources.values()) == scenario.chunks
    )


def bound(scenario: Scenario) -> float:
    """Seconds within which the last newcomer must have its image: patience, some steps, all bytes from one donor."""
    share = 6 if scenario.busy else 2
    transfer = scenario.newcomers * scenario.chunks * max(scenario.chunk, 0.01) * share
    return 30.0 + 4 * scenario.step[1] + transfer


@pytest.mark.parametrize("first", range(0, 20, 10))
def test_any_trouble(first: int) -> None:
    for seed in range(first, first + 10):
        scenario = scenario_of(seed)
        world = World(scenario, seed)
        world.run()
        check(scenario, world)


@pytest.mark.slow
@pytest.mark.parametrize("first", [*range(20, 120, 20), *range(1000, 4000, 20)])
def test_any_trouble_at_length(first: int) -> None:
    for seed in range(first, first + 20):
        scenario = scenario_of(seed)
        world = World(scenario, seed)
        world.run()
        check(scenario, world)


@pytest.mark.parametrize("step", [0.01, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_however_fast_donors_step_they_meet_in_one_epoch(step: float, count: int) -> None:
    for seed in range(5):
        world = World(Scenario((FINE,) * count, step=(step, 1.2 * step), skew=min(0.1, step)), seed)
        (result,) = world.run().values()
        assert result.outcome.ok, result.outcome.reason
        assert 2 * len(result.outcome.sources) > count
        assert result.ended_at < 6.0 + 3 * step
        assert all(donor.snapshots <= 3 for donor in world.donors.values())


@pytest.mark.parametrize("when", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5])
def test_a_donor_killed_at_any_moment_costs_the_time_to_notice_it(when: float) -> None:
    for seed in range(5):
        donors = (FINE, FINE, Trouble(killed_at=2.0 + when))
        world = World(Scenario(donors, step=(0.5, 0.6), chunk=0.01, chunks=120), seed)
        (result,) = world.run().values()
        assert result.outcome.ok, result.outcome.reason
        assert result.ended_at < 10.0


def test_a_changed_byte_bars_its_donor_and_another_is_asked_at_once() -> None:
    for seed in range(10):
        world = World(Scenario((FINE, FINE, Trouble(flips=0.1)), step=(0.5, 0.6), chunks=120), seed)
        (result,) = world.run().values()
        assert result.outcome.ok
        assert "digest" in result.outcome.reason
        assert result.ended_at < 5.0


def test_one_liar_among_three_is_not_believed() -> None:
    for seed in range(10):
        world = World(Scenario((FINE, FINE, Trouble(lies="image")), step=(0.5, 0.6)), seed)
        (result,) = world.run().values()
        assert result.outcome.ok
        assert "donor2" not in result.outcome.sources


def test_two_who_do_not_agree_are_not_believed_and_not_pestered() -> None:
    world = World(Scenario((FINE, Trouble(lies="image")), step=(0.05, 0.06)), 1)
    (result,) = world.run().values()
    assert not result.outcome.ok
    assert "do not agree" in result.outcome.reason
    minutes = world.now // SNAPSHOTS_SECONDS + 1
    assert world.donors["donor0"].snapshots <= minutes * MAX_SNAPSHOTS


def test_of_two_donors_one_that_stops_does_not_hold_the_newcomer_up_for_ever() -> None:
    for seed in range(5):
        donors = (FINE, Trouble(stopped=(2.5, 1000.0)))
        world = World(Scenario(donors, step=(1.0, 1.2)), seed)
        (result,) = world.run().values()
        assert result.outcome.ok, result.outcome.reason
        assert result.ended_at < 30.0


# ---- means that were missed ----


def has_the_mean(scenario: Scenario, world: World, name: str, result: Result) -> bool:
    after = world.newcomers[name].request.wish.after
    return (
        after is not None
        and result.outcome.ok
        and result.outcome.state == after
        and result.image == image_of(after, scenario.chunks, MEAN)
        and set(result.chunks) == set(range(1, scenario.chunks + 1))
    )


@few_and_many(20, 40)
def test_a_missed_mean_comes_whatever_a_minority_does_and_without_a_snapshot(seeds: range) -> None:
    for seed in seeds:
        scenario = replace(scenario_of(seed), missed=seed % KEPT_MEANS + 1)
        # Who takes longer than the means are kept takes a snapshot.
        scenario = replace(scenario, step=(max(scenario.step[0], 1.0), max(scenario.step[1], 1.5)))
        world = World(scenario, seed)
        for name, result in world.run().items():
            if result.outcome.ok:
                assert has_the_mean(scenario, world, name, result), (seed, name, result)
        assert not any(donor.snapshots for donor in world.donors.values())


def test_one_liar_among_three_makes_up_no_mean_and_one_that_dies_costs_little() -> None:
    for seed in range(20):
        donors = (FINE, FINE, FINE, Trouble(lies="image"), Trouble(killed_at=2.0 + 0.1 * seed))
        world = World(Scenario(donors, step=(1.0, 1.2), chunk=0.01, chunks=40, missed=2), seed)
        (result,) = world.run().values()
        assert has_the_mean(world.scenario, world, "new0", result), result
        assert result.ended_at < 6.0


@pytest.mark.parametrize("other", [Trouble(lies="image"), Trouble(stopped=(1.0, 99.0))])
def test_where_half_of_a_circle_lie_or_are_silent_the_newcomer_soon_knows_that_there_is_none(
    other: Trouble,
) -> None:
    for seed in range(20):
        world = World(Scenario((FINE, FINE, other, other), step=(1.0, 1.2), missed=1), seed)
        (result,) = world.run().values()
        assert "2 of the 4 peers that vouch for this peer's state" in result.outcome.reason
        assert result.outcome.unheard
        assert result.ended_at < LONE_SECONDS + 0.1


def test_where_half_of_a_circle_are_gone_the_others_give_the_mean() -> None:
    away = Trouble(absent=True)
    for seed in range(20):
        world = World(Scenario((FINE, FINE, away, away), step=(1.0, 1.2), missed=1), seed)
        (result,) = world.run().values()
        assert has_the_mean(world.scenario, world, "new0", result), (seed, result)
        assert result.ended_at < LONE_SECONDS + 2.0


def test_liars_that_give_nothing_of_what_they_offer_do_not_keep_the_newcomer_from_the_others() -> None:
    for seed in range(20):
        late = Trouble(stopped=(1.9, 1.9 + 0.2 * seed))
        donors = (*(Trouble(lies="silent"),) * 3, late, late)
        scenario = Scenario(donors, step=(1.0, 1.2), chunk=0.001, chunks=10, missed=1, proved=True)
        world = World(scenario, seed)
        (result,) = world.run().values()
        assert has_the_mean(world.scenario, world, "new0", result), (seed, result)
        assert result.ended_at < 20.0


def test_a_mean_that_all_have_let_go_is_not_waited_for() -> None:
    world = World(Scenario((FINE, FINE, FINE), step=(0.05, 0.06), missed=KEPT_MEANS + 4), 1)
    (result,) = world.run().values()
    assert not result.outcome.ok
    assert "none of 3 peers that answered keeps the mean" in result.outcome.reason
    assert result.ended_at < 1.0


def test_donors_forget_who_has_gone() -> None:
    world = World(Scenario((FINE, FINE), newcomers=3), 3)
    world.run()
    world.settle(ASKER_SECONDS + 1.0)
    for donor in world.donors.values():
        assert donor.machine.wanted is None
        assert donor.machine.standing == ""
        assert donor.machine.deadline == float("inf")
        assert len(donor.held) <= 1
