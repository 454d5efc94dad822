"""The bookkeeping of parts, against a slow one that remembers everything, and transfer by transfer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.allreduce.events import Action, Group, Reduce, SendContribution, SendMean
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.part_table import PartTable, early_parts
from equipoise.averaging.partition import Part

A, B, C = range(3)
ALL = 0b111
DECISION = Decision(ALL, ALL)


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


def test_contributions_go_to_the_owners_once_successor_first() -> None:
    mine = part_table(B, (A, A, B, C))
    assert work(mine) == [SendContribution(C, 3), SendContribution(A, 0), SendContribution(A, 1)]
    mine.assign(ALL)
    assert work(mine) == []


def test_an_observer_contributes_nothing_and_is_not_waited_for() -> None:
    mine = part_table(C, weights=(1, 1, 0))
    assert work(mine) == []
    assert not mine.wants_contribution(C, 0)
    assert part_table(A, weights=(1, 1, 0)).whole == 0b001


def test_a_part_is_reduced_once_all_that_count_are_here() -> None:
    mine = part_table(A)
    mine.take_contribution(B, 0)
    assert Reduce(0, ALL) not in work(mine)
    mine.take_contribution(C, 0)
    assert work(mine) == [Reduce(0, ALL)]
    mine.assign(ALL)
    assert Reduce(0, ALL) not in work(mine)


def test_a_smaller_set_is_reduced_as_soon_as_it_is_decided() -> None:
    mine = part_table(A)
    mine.take_contribution(B, 0)
    assert work(mine, over=0b011, decided=True) == [Reduce(0, 0b011)]


def test_means_are_passed_on_once_released_to_each_once() -> None:
    mine = part_table(B)
    mine.take_mean(1, ALL, bytes(32))
    assert work(mine, decided=True) == []
    mine.assign(ALL)
    assert work(mine, decided=True, release=True) == [SendMean(C, 1, ALL), SendMean(A, 1, ALL)]
    mine.assign(ALL)
    assert work(mine, decided=True, release=True) == []


def test_a_new_assignment_sends_to_the_new_owners_what_they_lack() -> None:
    mine = part_table(B)
    work(mine)
    mine.assign(0b011)
    assert mine.owner_of == (A, B, A)
    assert work(mine) == [SendContribution(A, 2)]


def test_the_digest_depends_on_round_contributors_and_every_part() -> None:
    digests = set()
    for part_digest, contributors in ((b"x", ALL), (b"y", ALL), (b"x", 0b011)):
        mine = part_table(A, (A, B))
        mine.take_mean(0, contributors, bytes(32))
        mine.take_mean(1, contributors, part_digest * 32)
        digests.add(mine.digest(Decision(contributors, ALL)))
    assert len(digests) == 3


contributions = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=30)
plans = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(contributions, plans, st.integers(0, 2))
def test_whole_is_what_all_own_parts_have(came: list[tuple[int, int]], assigned: list[int], me: int) -> None:
    mine = part_table(me, (A, B, C, A))
    here: set[tuple[int, int]] = set()
    for owners in assigned:
        mine.assign(owners)
        for sender, part in came:
            if mine.wants_contribution(sender, part):
                assert (sender, part) not in here
                mine.take_contribution(sender, part)
                here.add((sender, part))
            elif sender != me and mine.owner_of[part] == me:
                assert (sender, part) in here
        own = [part for part, owner in enumerate(mine.owner_of) if owner == me]
        expected = {
            member for member in range(3) if member == me or all((member, part) in here for part in own)
        }
        assert mine.whole == sum(1 << member for member in expected)


def test_kept_contributions_of_another_member_are_about_one_vector() -> None:
    mine = part_table(A, (A, A, *[B] * 6))
    taken = 0
    for part in range(8):
        if mine.wants_contribution(B, part):
            mine.take_contribution(B, part)
            taken += 1
    assert taken == 2 + early_parts(mine.group)
    assert mine.wants_contribution(C, 7), "each has a share of its own"


def test_a_contribution_that_overtakes_the_plan_which_makes_it_ours_is_kept() -> None:
    mine = part_table(A, (A, B, B, B, B, B))
    mine.take_contribution(C, 2)
    mine.assign(0b101)
    assert mine.owner_of[2] == A
    assert not mine.wants_contribution(C, 2)
    assert mine.wants_contribution(C, 4)


means = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([ALL, 0b011])), max_size=20)


@given(means)
def test_whole_and_missing_means(came: list[tuple[int, int]]) -> None:
    mine = part_table(A)
    kept: dict[int, int] = {}
    for part, over in came:
        if mine.wants_mean(part, over):
            mine.take_mean(part, over, bytes(32))
            kept[part] = over
    for over in (ALL, 0b011):
        lacking = {part for part in range(3) if kept.get(part) != over}
        decision = Decision(over, ALL)
        assert mine.is_whole(decision) == (not lacking)
        assert mine.missing_of(ALL, decision) == lacking
        assert mine.missing_of(0b010, decision) == lacking & {1}


@pytest.mark.parametrize("part", [3, 10**6])
def test_parts_that_are_none_are_not_wanted(part: int) -> None:
    mine = part_table(A)
    assert not mine.wants_contribution(B, part)
    assert not mine.wants_mean(part, ALL)
