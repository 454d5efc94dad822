"""The bookkeeping of parts: what is wanted and reduced; tests/sim has the rest of it in whole rounds."""

from __future__ import annotations

import pytest

from equipoise.averaging.allreduce.events import Action, Group, Reduce
from equipoise.averaging.allreduce.part_table import PartTable, early_parts
from equipoise.averaging.partition import Part

A, B, C = range(3)
ALL = 0b111


def part_table(
    me: int, owners: tuple[int, ...] = (A, B, C), weights: tuple[float, ...] = (1, 1, 1)
) -> PartTable:
    parts = tuple(Part(at, at + 1, owner) for at, owner in enumerate(owners))
    names = tuple("abc"[: len(weights)])
    made = PartTable(Group(bytes(16), names, weights, (1 << len(weights)) - 1, parts, A), me)
    made.assign((1 << len(weights)) - 1)
    return made


def work(
    of: PartTable, over: int = ALL, decided: bool = False, release: bool = False, targets: int = ALL
) -> list[Action]:
    return of.work(over, decided, release, targets & ~(1 << of.me))


def test_a_smaller_set_is_reduced_as_soon_as_it_is_decided() -> None:
    mine = part_table(A)
    mine.take_contribution(B, 0)
    assert work(mine, over=0b011, decided=True) == [Reduce(0, 0b011)]


def test_kept_contributions_of_another_member_are_about_one_vector() -> None:
    mine = part_table(A, (A, A, *[B] * 6))
    taken = 0
    for part in range(8):
        if mine.arrivals.wants(B, part):
            mine.take_contribution(B, part)
            taken += 1
    assert taken == 2 + early_parts(mine.group)
    assert mine.arrivals.wants(C, 7), "each has a share of its own"


def test_means_that_replace_each_other_take_no_memory() -> None:
    means = part_table(B).means
    for contributors in range(1, 100):
        means.take(0, contributors, bytes(32))
    assert means.has(0, 99)
    assert len(means._kept) == 1


@pytest.mark.parametrize("part", [3, 10**6])
def test_parts_that_are_none_are_not_wanted(part: int) -> None:
    mine = part_table(A)
    assert not mine.arrivals.wants(B, part)
    assert not mine.means.wants(part, ALL)
