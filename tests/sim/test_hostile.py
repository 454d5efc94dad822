"""A member that says what it should not: the others finish with the exact mean, as if it had said nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from equipoise.averaging.allreduce.events import Finish, Group
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.notary import Notary
from equipoise.averaging.partition import Part
from equipoise.averaging.sim.arithmetic import draw_values
from equipoise.averaging.sim.faults import Corrupt, Fault, Forge, Poison, When
from equipoise.averaging.sim.member import Violation
from equipoise.averaging.sim.network import Weather
from equipoise.averaging.sim.process import Start
from equipoise.averaging.sim.scenario import PHASES, Scenario
from equipoise.averaging.sim.world import World

MEMBERS = 4

HOSTILE = 3
"""It cannot be dialled, so that no part is ever its to reduce."""

ATTACKS: dict[str, Callable[[], Fault]] = {
    "means of parts that it does not own": lambda: Poison(HOSTILE),
    "votes that nobody cast": lambda: Forge(HOSTILE),
}


def scenario(seed: int, attack: Callable[[], Fault]) -> Scenario:
    chance = Random(seed)
    parts = tuple(Part(at, at + 1, at % HOSTILE) for at in range(MEMBERS))
    group = Group(bytes(16), ("a", "b", "c", "d"), (1.0, 2.0, 3.0, 4.0), 0b0111, parts, 0)
    starts = tuple(Start(draw_values(chance, len(parts)), 0.0, 0.0, 30.0) for _ in range(MEMBERS))
    steps = [When(step=chance.randint(1, 60)) for _ in range(3)]
    phases = [When(member=chance.randrange(HOSTILE), phase=chance.choice(PHASES)) for _ in range(2)]
    faults = tuple((when, attack()) for when in (*steps, *phases))
    weather = Weather(latency=(0.0005, 0.005), transfer=(0.001, 0.1))
    return Scenario(seed, group, starts, weather, faults, core=0b0111)


def attacked(attack: Callable[[], Fault], seeds: int = 60) -> None:
    for seed in range(seeds):
        World(scenario(seed, attack)).run()


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_the_others_finish_with_the_exact_mean(attack: Callable[[], Fault]) -> None:
    attacked(attack)


def lied_to(seed: int) -> Scenario:
    """A round in which an owner sends one member another mean than all others, as often as that member asks."""
    chance = Random(f"lie {seed}")
    each = chance.randint(1, 3)
    parts = tuple(Part(at, at + 1, at // each) for at in range(MEMBERS * each))
    group = Group(
        bytes(16), ("a", "b", "c", "d"), (1.0, 2.0, 3.0, 4.0), 0b1111, parts, chance.randrange(MEMBERS)
    )
    starts = tuple(
        Start(draw_values(chance, len(parts)), 0.02 * chance.random(), 0.0, 30.0) for _ in range(MEMBERS)
    )
    lie = When(seconds=0.0), Corrupt(HOSTILE, 1 << chance.randrange(HOSTILE))
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
        lambda self, sender, part, over: plain(self, self._ledger.owner_of[part], part, over),
    )
    with pytest.raises(Violation):
        attacked(ATTACKS["means of parts that it does not own"])


def test_a_machine_that_believes_who_counts_votes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Notary, "check", lambda self, sender, message: message)
    with pytest.raises(Violation):
        attacked(ATTACKS["votes that nobody cast"])
