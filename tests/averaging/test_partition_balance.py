"""Shares beside other cuts, and beside transfers counted one by one."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.aio.round_driver import group_of
from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.options import RunOptions
from equipoise.averaging.partition import FAST, balance, exchange_seconds, settle
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.matchmaking import signer
from oracles.averaging import butterfly_seconds


@pytest.mark.parametrize(
    ("uplinks", "downlinks", "best"),
    [
        ([5.0, 50.0, 50.0, 50.0], [1e6] * 4, [1 / 31, 10 / 31, 10 / 31, 10 / 31]),
        ([5.0, 50.0, 50.0, 50.0], [5.0, 50.0, 50.0, 50.0], [1 / 4] * 4),
        ([20.0] * 4, [100.0] * 4, [1 / 4] * 4),
        ([1.0, 100.0], [1.0, 100.0], [1 / 2] * 2),
    ],
    ids=["homes", "alike both ways", "alike", "two"],
)
def test_shares_follow_from_both_directions(
    uplinks: list[float], downlinks: list[float], best: list[float]
) -> None:
    links = list(zip(uplinks, downlinks, strict=True))
    assert balance(links, [True] * len(links)) == pytest.approx(best)


@given(st.data())
def test_no_other_cut_is_much_better(data: st.DataObject) -> None:
    """Links of homes, and links alike both ways, 2 to 8 of them, beside random cuts."""
    chance = random.Random(data.draw(st.integers(0, 1 << 32)))
    uplinks = [chance.choice([1.0, 5.0, 20.0, 200.0]) for _ in range(chance.randint(2, 8))]
    factor = chance.choice([1.0, 5.0, 1e6])
    links = [(one, factor * one) for one in uplinks]
    taken = butterfly_seconds(balance(links, [True] * len(links)), links)
    for _ in range(30):
        cut = [chance.gammavariate(chance.choice([0.3, 3.0]), 1.0) * one for one in uplinks]
        assert taken < 1.1 * butterfly_seconds([one / math.fsum(cut) for one in cut], links)


@given(st.lists(st.tuples(st.floats(1e3, 1e9), st.floats(1e3, 1e9)), min_size=2, max_size=8), st.data())
def test_seconds_are_those_of_the_transfers(links: list[tuple[float, float]], data: st.DataObject) -> None:
    cut = data.draw(st.lists(st.floats(0.1, 1.0), min_size=len(links), max_size=len(links)))
    fractions = [one / math.fsum(cut) for one in cut]
    for growth in (1.0, 3.0):
        expected = butterfly_seconds(fractions, links, growth)
        assert exchange_seconds(links, fractions, growth) == pytest.approx(expected)


def test_the_faster_owners_take_over_for_whom_nobody_can_dial() -> None:
    fractions = balance([(up, 1e6) for up in (100.0, 1.0, 2.0, 100.0)], [False, True, True, False])
    assert fractions == pytest.approx([0.0, 1 / 3, 2 / 3, 0.0])


def test_a_group_is_cut_by_what_its_members_say_they_can_send() -> None:
    spec = RunSpec.create(
        "run", Schema.of({"w": torch.zeros(3 << 16)}), RunOptions(codec="fp32", part_values=256)
    )
    members = {"a": (100e6, False), "b": (1e6, True), "c": (2e6, True), "d": (100e6, False)}
    joins = [
        Join(
            peer, spec.hash, 0, 1.0, bandwidth, dialable, bytes(NONCE_BYTES), b"", None, b"", download=1e9
        ).signed(signer(peer))
        for peer, (bandwidth, dialable) in members.items()
    ]
    owned: Counter[int] = Counter()
    for part in group_of(spec, Manifest.of("b", joins)).parts:
        owned[part.owner] += part.stop - part.start
    assert owned == {1: pytest.approx(1 << 16, rel=0.01), 2: pytest.approx(2 << 16, rel=0.01)}


@pytest.mark.parametrize("bandwidth", [5e-324, 1e-310, 1e-9, 1e15])
@pytest.mark.parametrize("others", [5e-324, 1.0, 1e9, 1e15])
def test_absurd_bandwidths_cut_a_sound_share(bandwidth: float, others: float) -> None:
    fractions = balance([(bandwidth, others), (others, bandwidth), (others, others)], [True] * 3)
    assert all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions)
    assert math.fsum(fractions) == pytest.approx(1)


def test_the_cut_does_not_depend_on_how_an_interpreter_adds() -> None:
    """Python's `sum` of floats rounds otherwise since 3.12, and members may run different ones."""
    links = [(1e15, 1e15), (1.0, 1e15), (1.0, 1e15), (1.0, 1e15)] * 4
    shuffled = links[::-1]
    fractions = balance(links, [True] * 16)
    assert balance(shuffled, [True] * 16) == fractions[::-1]


def test_members_that_measure_almost_alike_get_equal_shares() -> None:
    assert settle([24e6, 25e6, 26.5e6, 31e6]) == [25e6] * 4
    assert settle([6.2e6, 25e6, 24e6, 26e6]) == [6.2e6, 24e6, 24e6, 24e6]


def test_who_does_not_know_its_bandwidth_counts_as_the_usual_one() -> None:
    assert settle([0.0, 25e6, 100e6]) == [25e6, 25e6, 100e6]


def test_links_faster_than_the_machines_count_as_equal() -> None:
    assert settle([0.9e9, 2.4e9, 60e6]) == [FAST, FAST, 60e6]
    assert settle([0.0, 0.0]) == [1.0, 1.0]
