"""One of four members is killed or stopped, at any moment: the other three succeed, and soon."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from equipoise.averaging.allreduce.events import Fail, Finish
from fakes.seeds import few_and_many
from simulator.faults import Fault, When
from simulator.network import Weather
from simulator.scenario import PHASES, group_of, starts_of
from simulator.world import Report, Scenario, World

PROMISED_SECONDS = 3.0
"""From the fault to the survivors' outcome: 2 s until silence is noticed, and what the repair takes on these links."""

MEMBERS = 4

KINDS: dict[str, Callable[[int, Random], Fault]] = {
    "its connections break": lambda victim, chance: Fault(World.kill, victim, 0.02, chance.random()),
    "it falls silent": lambda victim, chance: Fault(World.kill, victim, None, chance.random()),
    "it is stopped": lambda victim, chance: Fault(World.stop, victim, 40.0, chance.random() < 0.5),
}


def when(chance: Random, parts: int) -> When:
    if chance.random() < 0.5:
        return When(step=chance.randint(1, 6 * parts + 40))
    return When(member=chance.randrange(MEMBERS), phase=chance.choice(PHASES))


def scenario(seed: int, kind: str) -> tuple[Scenario, int]:
    chance = Random(seed)
    each = chance.randint(1, 3)
    owners = [at // each for at in range(MEMBERS * each)]
    group = group_of(owners, (1.0, 2.0, 3.0, 4.0), leader=chance.randrange(MEMBERS))
    starts = starts_of(chance, group, 60.0)
    victim = chance.randrange(MEMBERS)
    fault = KINDS[kind](victim, chance)
    weather = Weather(latency=(0.0005, 0.005), transfer=(0.01, 0.1))
    faults = ((when(chance, len(owners)), fault),)
    return Scenario(seed, group, starts, weather, faults, core=0b1111 & ~(1 << victim)), victim


@pytest.mark.parametrize("kind", KINDS)
@few_and_many(60, 150)
def test_the_survivors_succeed_within_seconds(kind: str, seeds: range) -> None:
    struck = 0
    for seed in seeds:
        made, _ = scenario(seed, kind)
        world = World(made)
        report = world.run()
        struck += world.struck_at is not None
        if world.struck_at is not None:
            assert report.seconds - world.struck_at < PROMISED_SECONDS, seed
    assert struck > 2 / 3 * len(seeds)


def test_a_member_stopped_for_long_ends_as_the_others_or_untouched() -> None:
    ends = []
    for seed in range(60):
        made, victim = scenario(seed, "it is stopped")
        report: Report = World(made).run()
        ends.append(report.ends[victim])
    assert {type(end) for end in ends} == {Finish, Fail}
