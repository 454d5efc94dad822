"""A member that says what it should not: the others finish with the exact mean, as if it had said nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from equipoise.averaging.allreduce.events import Finish
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.vote_signatures import VoteSignatures
from fakes.seeds import few_and_many
from simulator.core import Violation
from simulator.faults import Fault, When
from simulator.network import Weather
from simulator.scenario import PHASES, group_of, starts_of
from simulator.world import Scenario, World

WEIGHTS = (1.0, 2.0, 3.0, 4.0)
MEMBERS = len(WEIGHTS)

HOSTILE = 3
"""It cannot be dialled, so that no part is ever its to reduce."""

ATTACKS: dict[str, Callable[[], Fault]] = {
    "means of parts that it does not own": lambda: Fault(World.poison, HOSTILE),
    "votes that nobody cast": lambda: Fault(World.forge, HOSTILE),
}


def scenario(seed: int, attack: Callable[[], Fault]) -> Scenario:
    chance = Random(seed)
    group = group_of((at % HOSTILE for at in range(MEMBERS)), WEIGHTS, 0b0111)
    starts = starts_of(chance, group, 30.0)
    steps = [When(step=chance.randint(1, 60)) for _ in range(3)]
    phases = [When(member=chance.randrange(HOSTILE), phase=chance.choice(PHASES)) for _ in range(2)]
    faults = tuple((when, attack()) for when in (*steps, *phases))
    weather = Weather(latency=(0.0005, 0.005), transfer=(0.001, 0.1))
    return Scenario(seed, group, starts, weather, faults, core=0b0111)


def attacked(attack: Callable[[], Fault], seeds: range = range(60)) -> None:
    for seed in seeds:
        World(scenario(seed, attack)).run()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
@few_and_many(15, 60)
def test_the_others_finish_with_the_exact_mean(attack: Callable[[], Fault], seeds: range) -> None:
    attacked(attack, seeds)


def lied_to(seed: int) -> Scenario:
    """A round in which an owner sends one member another mean than all others, as often as that member asks."""
    chance = Random(f"lie {seed}")
    each = chance.randint(1, 3)
    owners = [at // each for at in range(MEMBERS * each)]
    group = group_of(owners, WEIGHTS, leader=chance.randrange(MEMBERS))
    starts = starts_of(chance, group, 30.0)
    lie = When(seconds=0.0), Fault(World.corrupt, HOSTILE, 1 << chance.randrange(HOSTILE))
    weather = Weather(latency=(0.0005, 0.005), transfer=(0.001, 0.1))
    return Scenario(seed, group, starts, weather, (lie,), core=0b0111)


def test_a_member_that_is_sent_another_mean_finishes_with_that_of_the_majority() -> None:
    for seed in range(60):
        report = World(lied_to(seed)).run()
        assert all(isinstance(end, Finish) for end in report.ends), seed


def test_a_machine_that_takes_means_from_anyone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = AllReduce.wants_mean
    monkeypatch.setattr(
        AllReduce,
        "wants_mean",
        lambda self, sender, part, over: plain(self, self._part_table.owner_of[part], part, over),
    )
    with pytest.raises(Violation):
        attacked(ATTACKS["means of parts that it does not own"])


def test_a_machine_that_believes_who_counts_votes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VoteSignatures, "check", lambda self, sender, message: message)
    with pytest.raises(Violation):
        attacked(ATTACKS["votes that nobody cast"])
