"""The wait that is learnt from how late peers were."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.matchmaking.group_builder import FEW, WINDOW, StragglerWait
from equipoise.averaging.timing import INITIAL_WAIT, MAX_WAIT, MIN_WAIT


def after(*seconds: float) -> StragglerWait:
    learnt = StragglerWait()
    for each in seconds:
        learnt.learn(each)
    return learnt


def test_nothing_is_known_at_first() -> None:
    assert StragglerWait().wait == INITIAL_WAIT
    assert StragglerWait().reason == "3.00 s, as it does at first"


def test_few_rounds_do_not_shorten_the_wait() -> None:
    assert after(*[0.01] * (FEW - 1)).wait == INITIAL_WAIT


def test_few_rounds_may_lengthen_it() -> None:
    assert after(4.0).wait > 4.0


def test_a_swarm_in_step_waits_hardly_at_all() -> None:
    assert after(*[0.005] * WINDOW).wait == MIN_WAIT


def test_the_usual_last_one_is_waited_for_with_room_to_spare() -> None:
    learnt = after(*[0.1, 0.2, 1.0, 2.0] * 8)
    assert 4.0 < learnt.wait < 5.0
    assert "up to 2.00 s late" in learnt.reason


def test_one_freak_round_in_many_does_not_matter() -> None:
    assert after(*[0.05] * (WINDOW - 1), 9.0).wait == MIN_WAIT


def test_old_rounds_are_forgotten() -> None:
    assert after(*[5.0] * WINDOW, *[0.05] * WINDOW).wait == MIN_WAIT


@pytest.mark.parametrize("absurd", [-1.0, 1e9, math.inf])
def test_a_liar_teaches_no_more_than_the_bound(absurd: float) -> None:
    assert 0 < after(*[absurd] * WINDOW).wait <= MAX_WAIT


@given(st.lists(st.floats(0, 100), max_size=100))
def test_the_wait_is_always_within_its_bounds(seconds: list[float]) -> None:
    assert MIN_WAIT <= after(*seconds).wait <= MAX_WAIT
