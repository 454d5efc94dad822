"""The cut into shares and parts: everything once, in proportion, dealt anew when owners leave."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.partition import GRANULE, assign, partition
from oracles.averaging import largest_remainders

fractions = st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 0.25, 1.0, 7.5]), min_size=1, max_size=16).filter(any)
sizes = st.integers(1, 40 * GRANULE)
part_sizes = st.integers(1, 8).map(lambda count: count * GRANULE)


@given(sizes, fractions, part_sizes)
def test_parts_cover_the_vector_once_and_in_order(size: int, shares: list[float], most: int) -> None:
    parts = partition(size, shares, most)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    assert all(0 < part.size <= most for part in parts)
    assert [part.owner for part in parts] == sorted(part.owner for part in parts)


@given(sizes, fractions, part_sizes)
def test_cuts_are_at_granules_and_only_owners_own(size: int, shares: list[float], most: int) -> None:
    parts = partition(size, shares, most)
    assert all(part.start % GRANULE == 0 for part in parts)
    assert all(shares[part.owner] > 0 for part in parts)


@given(st.integers(1, 1000), st.lists(st.integers(0, 8), min_size=1, max_size=16).filter(any))
def test_shares_are_those_of_largest_remainders(granules: int, eighths: list[int]) -> None:
    shares = [float(one) for one in eighths]
    parts = partition(granules * GRANULE, shares, GRANULE)
    counts = [sum(part.owner == owner for part in parts) for owner in range(len(shares))]
    expected = largest_remainders(granules, shares)
    assert sum(counts) == granules
    assert max(abs(one - other) for one, other in zip(counts, expected, strict=True)) <= 1


def test_a_small_vector_is_one_part() -> None:
    (part,) = partition(3, [0.5, 0.5], GRANULE)
    assert (part.start, part.stop, part.owner) == (0, 3, 0)


@given(sizes, fractions, st.data())
def test_parts_of_absent_owners_go_to_the_present(
    size: int, shares: list[float], data: st.DataObject
) -> None:
    parts = partition(size, shares, GRANULE)
    owners = data.draw(st.integers(1, 2 ** len(shares) - 1))
    owner_of = assign(parts, owners)
    assert len(owner_of) == len(parts)
    assert all(owners >> owner & 1 for owner in owner_of)
    assert all(
        owner == part.owner for part, owner in zip(parts, owner_of, strict=True) if owners >> part.owner & 1
    )


def test_the_parts_of_one_absent_owner_are_spread_evenly() -> None:
    parts = partition(30 * GRANULE, [1.0, 1.0, 1.0], GRANULE)
    dealt = assign(parts, 0b011)[20:]
    assert dealt.count(0) == dealt.count(1) == 5


def test_the_cut_does_not_depend_on_how_an_interpreter_adds() -> None:
    chance = random.Random(1)
    for _ in range(200):
        shares = [chance.random() for _ in range(13)]
        order = chance.sample(range(13), 13)
        counts, shuffled = (
            [
                sum(part.size for part in partition(4000 * GRANULE, one, 4096) if part.owner == owner)
                for owner in range(13)
            ]
            for one in (shares, [shares[at] for at in order])
        )
        assert sorted(counts) == sorted(shuffled)
