"""Shares against a bisection, and against transfers counted one by one."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.aio.round_driver import group_of
from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.options import RunOptions
from equipoise.averaging.partition import FAST, balance, settle
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from oracles.averaging import butterfly_seconds
from simulator.matchmaking import signer


@given(st.lists(st.floats(1e3, 1e9), min_size=2, max_size=16))
def test_links_of_homes_and_links_alike_both_ways_need_little_more_than_their_least_time(
    uplinks: list[float],
) -> None:
    size, together = len(uplinks), math.fsum(uplinks)
    fractions = balance(uplinks, [True] * size)
    assert math.fsum(fractions) == pytest.approx(1)
    assert all(fraction >= 0 for fraction in fractions)
    homes = 1 / min(uplinks) + (size - 2) / together
    assert butterfly_seconds([one / together for one in uplinks], uplinks, math.inf) == pytest.approx(homes)
    alike = 2 * (size - 1) * max(1 / size / min(uplinks), 1 / together)
    bound = {2: 1.001, 3: 1.26, 4: 1.23}.get(size, 1.19)
    assert butterfly_seconds(fractions, uplinks, math.inf) < bound * homes
    assert butterfly_seconds(fractions, uplinks, 1) < bound * alike


def test_the_faster_owners_take_over_for_whom_nobody_can_dial() -> None:
    fractions = balance([100.0, 1.0, 2.0, 100.0], [False, True, True, False])
    assert fractions == pytest.approx([0.0, 1 / 3, 2 / 3, 0.0])


def test_a_group_is_cut_by_what_its_members_say_they_can_send() -> None:
    spec = RunSpec.create(
        "run", Schema.of({"w": torch.zeros(3 << 16)}), RunOptions(codec="fp32", part_values=256)
    )
    members = {"a": (100e6, False), "b": (1e6, True), "c": (2e6, True), "d": (100e6, False)}
    joins = [
        Join(peer, spec.hash, 0, 1.0, bandwidth, dialable, bytes(NONCE_BYTES), b"", None, b"").signed(
            signer(peer)
        )
        for peer, (bandwidth, dialable) in members.items()
    ]
    owned: Counter[int] = Counter()
    for part in group_of(spec, Manifest.of("b", joins)).parts:
        owned[part.owner] += part.stop - part.start
    assert owned == {1: pytest.approx(1 << 16, rel=0.01), 2: pytest.approx(2 << 16, rel=0.01)}


def test_a_group_of_two_splits_the_work_evenly() -> None:
    assert balance([1.0, 100.0], [True, True]) == [0.5, 0.5]
    assert balance([1.0, 100.0], [True, False]) == [1.0, 0.0]


@pytest.mark.parametrize("bandwidth", [5e-324, 1e-310, 1e-9, 1e15])
@pytest.mark.parametrize("others", [5e-324, 1.0, 1e9, 1e15])
def test_absurd_bandwidths_cut_a_sound_share(bandwidth: float, others: float) -> None:
    fractions = balance([bandwidth, others, others], [True] * 3)
    assert all(math.isfinite(fraction) and fraction >= 0 for fraction in fractions)
    assert math.fsum(fractions) == pytest.approx(1)


def test_the_cut_does_not_depend_on_how_an_interpreter_adds() -> None:
    """Python's `sum` of floats rounds otherwise since 3.12, and members may run different ones."""
    bandwidths = [1e15, 1.0, 1.0, 1.0] * 4
    shuffled = bandwidths[::-1]
    fractions = balance(bandwidths, [True] * 16)
    assert balance(shuffled, [True] * 16) == fractions[::-1]


def test_members_that_measure_almost_alike_get_equal_shares() -> None:
    assert settle([24e6, 25e6, 26.5e6, 31e6]) == [25e6] * 4
    assert settle([6.2e6, 25e6, 24e6, 26e6]) == [6.2e6, 24e6, 24e6, 24e6]


def test_who_does_not_know_its_bandwidth_counts_as_the_usual_one() -> None:
    assert settle([0.0, 25e6, 100e6]) == [25e6, 25e6, 100e6]


def test_links_faster_than_the_machines_count_as_equal() -> None:
    assert settle([0.9e9, 2.4e9, 60e6]) == [FAST, FAST, 60e6]
    assert settle([0.0, 0.0]) == [1.0, 1.0]
