"""Looking at the part that came, instead of at everything: after every event, that comes to the same.

Each machine has a twin that always looks at everything, and once more, to see that it was at rest. Both are told the
same, and must ask for the same and be in the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from equipoise.averaging.allreduce.events import (
    Action,
    ContributionReceived,
    Event,
    MeanReceived,
    PartReduced,
)
from equipoise.averaging.allreduce.machine import AllReduce
from equipoise.averaging.allreduce.part_table import PartTable
from fakes.one_member import A, B, C, D, Table
from simulator import member
from simulator.explore import Explorer
from simulator.scenario import draw_scenario
from simulator.searches import Search, crashes_and_orders, further_faults
from simulator.snapshot import UNREAD, fingerprint
from simulator.world import World

looks: Counter[bool] = Counter()
"""Of the events that are parts: after how many the machine looked at everything, and after how many not."""


class Thorough(AllReduce):
    """Looks at everything after every event."""

    def _on_contribution(self, *args) -> bool:
        super()._on_contribution(*args)
        return True

    def _on_mean(self, *args) -> bool:
        super()._on_mean(*args)
        return True

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = super().handle(event, now)
        assert self._advance(now) == [], "it was not at rest"
        return actions


class Twin(AllReduce):
    """A machine beside one that is thorough."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.thorough = Thorough(*args)

    def start(self, now: float) -> list[Action]:
        actions = super().start(now)
        assert actions == self.thorough.start(now)
        return actions

    def wants_mean(self, sender: int, part: int, contributors: int) -> bool:
        self.thorough.wants_mean(sender, part, contributors)  # It remembers which means it has refused.
        return super().wants_mean(sender, part, contributors)

    def handle(self, event: Event, now: float) -> list[Action]:
        phase, deadline = self.phase, self.deadline
        actions = super().handle(event, now)
        if isinstance(event, ContributionReceived | MeanReceived | PartReduced):
            looks[self.looked] += 1
        assert actions == self.thorough.handle(event, now)
        assert (self.phase, self.deadline) == (self.thorough.phase, self.thorough.deadline)
        for name, theirs in vars(self.thorough).items():
            assert name in UNREAD or fingerprint(vars(self)[name]) == fingerprint(theirs), name
        if not self.looked:
            assert self.phase == phase
            assert self.deadline >= deadline
        return actions


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "AllReduce", Twin)
    looks.clear()


def simulate(seeds: range, sizes: tuple[int, int], live: bool) -> None:
    for seed in seeds:
        World(draw_scenario(seed, sizes, live)).run()


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("seeds", "sizes"), [(range(20), (2, 7)), (range(2000, 2004), (8, 16))])
def test_in_simulated_rounds(seeds: range, sizes: tuple[int, int], live: bool) -> None:
    simulate(seeds, sizes, live)
    assert looks[False] > looks[True] / 2


@pytest.mark.parametrize(
    "search",
    [
        *crashes_and_orders(2),
        Search((1.0, 2.0), owner=1, blips=3, duplicates=1, must_succeed=True),
        Search((1.0, 2.0, 3.0), owner=1, crashes=1),
        *(pytest.param(search, marks=pytest.mark.slow) for search in further_faults(2)),
    ],
    ids=Search.describe,
)
def test_in_all_orders_of_small_rounds(search: Search) -> None:
    assert Explorer(search).run().ends
    assert looks[True]


def contributions_complete_nothing(patch: pytest.MonkeyPatch) -> None:
    plain = PartTable.take_contribution
    patch.setattr(PartTable, "take_contribution", lambda *args: plain(*args) and False)


def means_complete_nothing(patch: pytest.MonkeyPatch) -> None:
    plain = PartTable.take_mean
    patch.setattr(PartTable, "take_mean", lambda *args: plain(*args) and False)


@pytest.mark.parametrize("mutate", [contributions_complete_nothing, means_complete_nothing])
def test_a_look_too_short_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        simulate(range(20), (2, 7), live=False)


def test_a_part_that_ends_a_stall_has_the_machine_look_at_everything() -> None:
    table = Table(A, owners=(A, A), weights=(1, 1, 1, 1))
    table.contributes(B, 0)
    assert not table.machine.looked
    table.stall()
    table.contributes(C, 0)
    assert table.machine.looked
    table.contributes(D, 0)
    assert table.machine.looked, "it was late itself"
