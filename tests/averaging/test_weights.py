"""What counts of the weights that contributors claim."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.replication.follower import ATTENDANCE
from equipoise.averaging.spec import SpecError
from equipoise.averaging.weights import ATTENDANCE_LIMIT, cap_of, counted_weights
from fakes.specs import spec
from oracles.averaging import counted

weights = st.lists(
    st.one_of(st.just(0.0), st.just(ATTENDANCE), st.floats(0.0, 1e12), st.floats(0.5, 100.0)),
    min_size=2,
    max_size=16,
)


@pytest.mark.parametrize(
    ("claimed", "counts"),
    [
        ((1.0, 1.0, 1.0, 1e12), (1.0, 1.0, 1.0, 10.0)),
        ((1.0, 3.0), (1.0, 3.0)),
        ((1.0, 1e12), (1.0, 10.0)),
        ((1.0, 1.0, 1e12), (1.0, 1.0, 10.0)),
        ((1.0, 2.0, 4.0, 1000.0), (1.0, 2.0, 4.0, 20.0)),
        ((1.0,) * 15 + (1e12,), (1.0,) * 15 + (10.0,)),
        ((1.0, 1e12, 1e12), (1.0, 1e12, 1e12)),
        ((32.0, ATTENDANCE, ATTENDANCE, ATTENDANCE), (32.0, ATTENDANCE, ATTENDANCE, ATTENDANCE)),
        ((32.0, 32.0, 32.0, 1e6, ATTENDANCE), (32.0, 32.0, 32.0, 320.0, ATTENDANCE)),
        ((ATTENDANCE, ATTENDANCE_LIMIT), (ATTENDANCE, ATTENDANCE_LIMIT)),
        ((2.0**-12, 2.0**-12, 2.0**-12, 1e12), (2.0**-12, 2.0**-12, 2.0**-12, 10 * 2.0**-12)),
    ],
    ids=[
        "boast",
        "two",
        "pair",
        "three",
        "even",
        "sixteen",
        "most boast",
        "attend",
        "boast beside",
        "all attend",
        "boast beside small",
    ],
)
def test_a_contributor_counts_as_ten_lower_medians_at_most(
    claimed: tuple[float, ...], counts: tuple[float, ...]
) -> None:
    everyone = (1 << len(claimed)) - 1
    assert counted_weights(claimed, everyone, 10.0) == counts
    assert counted_weights(claimed, everyone, math.inf) == claimed


def test_the_median_is_of_all_that_were_to_contribute() -> None:
    claimed = (1.0, 1.0, 1.0, 100.0, 100.0)
    assert counted_weights(claimed, 0b11001, 10.0) == (1.0, 0.0, 0.0, 10.0, 10.0)
    assert counted_weights(claimed, 0b11001, 10.0, 0b11000) == (1.0, 0.0, 0.0, 100.0, 100.0)
    pair = Group(b"", ("a", "b", "c"), (1.0, 1e12, 1.0), 0b111, (), 0, cap=10.0)
    assert pair.counted(0b011) == (1.0, 10.0, 0.0)


def test_in_an_exchange_of_gossip_half_is_one_s_own() -> None:
    assert spec(strategy="gossip").cap == 1.0
    assert spec(strategy="gossip", weights="any").cap == math.inf
    assert spec().cap == 10.0


@given(weights, st.data(), st.integers(1, 100))
def test_counted_weights_are_those_of_the_slow_reference(
    claimed: list[float], data: st.DataObject, cap: int
) -> None:
    contributors = data.draw(st.integers(1, (1 << len(claimed)) - 1))
    expected = contributors | data.draw(st.integers(0, (1 << len(claimed)) - 1))
    assert list(counted_weights(claimed, contributors, float(cap), expected)) == counted(
        claimed, contributors, cap, ATTENDANCE_LIMIT, expected
    )


def test_the_rule_is_a_term_of_the_run() -> None:
    assert spec().hash == spec(weights="capped:10").hash
    assert len({spec(weights=rule).hash for rule in ("capped:10", "capped:100", "any")}) == 3
    assert [cap_of(rule) for rule in ("capped:10", "capped:1", "any")] == [10.0, 1.0, math.inf]


@pytest.mark.parametrize(
    "rule", ["", "capped", "capped:0", "capped:010", "capped:1.5", "capped:-1", "Any", None]
)
def test_text_that_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(
        SpecError, match="expected weights as 'capped:10', with any whole number, or 'any', got"
    ):
        spec(weights=rule)
