"""How much of the target batch a peer makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.outcome import Outcome
from equipoise.peer.training.batch_quota import FORMING_SECONDS, BatchQuota, deal

weights = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.5, 1e4), min_size=1)


@given(st.integers(0, 200), weights)
def test_all_is_dealt_and_nobody_is_a_whole_unit_off(units: int, given_weights: dict[str, float]) -> None:
    dealt = deal(units, given_weights)
    total = sum(given_weights.values())
    assert sum(dealt.values()) == units
    assert all(abs(dealt[name] - units * weight / total) < 1 for name, weight in given_weights.items())


def quota(target: float) -> BatchQuota:
    """Of a peer that has made a micro-batch of 8 samples."""
    pace = BatchQuota(target)
    pace.computed(0.0, 8.0)
    return pace


def averaged(pace: BatchQuota, contributors: dict[str, float], waited: float) -> None:
    assert pace.ended(
        Outcome(ok=True, reason="", contributors=contributors, seconds={"matchmaking": waited}), "a"
    )


def test_before_the_first_round_the_swarm_must_have_it_all() -> None:
    pace = quota(32)
    assert not pace.reached(24, 31)
    assert pace.reached(24, 32)


def test_equal_peers_make_a_quarter_each() -> None:
    pace = quota(32)
    averaged(pace, dict.fromkeys("abcd", 2.0**-30), 3.0)
    assert pace.reached(8, 8)
    assert not pace.reached(7, 7)


@pytest.mark.parametrize(("waited", "batches"), [(0.0, 1), (FORMING_SECONDS, 1), (FORMING_SECONDS + 3.0, 3)])
def test_who_waits_long_makes_more(waited: float, batches: int) -> None:
    pace = quota(32)
    pace.returned(10.0)
    pace.computed(11.0, 8.0)
    averaged(pace, dict.fromkeys("abcd", 8.0), waited)
    assert pace.reached(8 * batches, 0)
    assert not pace.reached(8 * batches - 1, 0)


def test_one_that_was_capped_has_made_what_it_claimed() -> None:
    pace = quota(3200.0)
    pace.returned(10.0)
    pace.computed(11.0, 8.0)
    weights = {"a": 80.0, "b": 8.0, "c": 8.0}
    waited = {"matchmaking": FORMING_SECONDS + 3.0}
    assert pace.ended(
        Outcome(ok=True, reason="", contributors=weights, capped={"a": 3192.0}, seconds=waited), "a"
    )
    assert pace.reached(3200.0, 0.0)
    assert not pace.reached(3192.0, 0.0)


def test_alone_it_makes_it_all() -> None:
    pace = quota(32)
    averaged(pace, {"a": 8.0, "b": 24.0}, 0.0)
    pace.alone()
    assert not pace.reached(31, 31)


def test_one_that_has_just_come_meets_with_what_it_has_however_long_it_waited() -> None:
    pace = quota(64.0)
    pace.returned(0.0)
    pace.computed(1.0, 8.0)
    assert pace.ended(
        Outcome(ok=True, reason="", contributors={"b": 32.0, "c": 32.0}, seconds={"matchmaking": 20.0}),
        "a",
    )
    assert pace.reached(8.0, 8.0)
