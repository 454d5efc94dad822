from __future__ import annotations

import pytest

from equipoise.averaging.allreduce.failure_detector import GAPS, MIN_BYTES_PER_SECOND, FailureDetector
from equipoise.averaging.timing import HEARTBEAT_SECONDS, MAX_SILENCE_SECONDS, ROUND_TRIPS, SILENCE_SECONDS


def silent_after(liveness: FailureDetector, start: float, until: float) -> list[tuple[float, int]]:
    """Who falls silent and when, checked as drivers do: every heartbeat, and at the deadline."""
    fallen = []
    now = start
    while now < until:
        now = min(now + HEARTBEAT_SECONDS, liveness.deadline)
        fallen += [(now, member) for member in liveness.check(now)]
    return fallen


def hear_every(liveness: FailureDetector, gap: float, start: float, times: int) -> float:
    now = start
    for _ in range(times):
        silent_after(liveness, now, now + gap - HEARTBEAT_SECONDS)
        now += gap
        liveness.heard(1, now)
    return now


def test_a_silent_member_is_taken_for_dead_once_exactly_at_its_bound() -> None:
    liveness = FailureDetector([1, 2], now=100.0)
    liveness.heard(2, 100.9)
    fallen = silent_after(liveness, 100.0, 110.0)
    assert fallen == [(100.0 + SILENCE_SECONDS, 1), (100.9 + SILENCE_SECONDS, 2)]
    assert liveness.deadline == float("inf")


def test_a_member_heard_again_returns_and_can_fall_silent_again() -> None:
    liveness = FailureDetector([1], now=0.0)
    assert silent_after(liveness, 0.0, 4.0)
    assert liveness.heard(1, 4.1)
    assert not liveness.heard(1, 4.2)
    assert silent_after(liveness, 4.0, 4.2 + MAX_SILENCE_SECONDS + 1)


def test_a_lost_connection_counts_as_silence_until_the_next_sign_of_life() -> None:
    liveness = FailureDetector([1], now=0.0)
    liveness.lose(1)
    assert silent_after(liveness, 0.0, 5.0) == []
    assert liveness.heard(1, 5.1)


def test_after_a_pause_of_our_own_nobody_was_silent() -> None:
    liveness = FailureDetector([1, 2], now=0.0)
    liveness.check(0.25)
    assert liveness.check(60.0) == []
    assert [member for _, member in silent_after(liveness, 60.0, 63.0)] == [1, 2]


def test_a_pause_of_our_own_teaches_nothing_about_others() -> None:
    liveness = FailureDetector([1], now=0.0)
    liveness.check(0.25)
    liveness.heard(1, 5.0)
    assert liveness.check(5.0) == []
    assert silent_after(liveness, 5.0, 9.0) == [(5.0 + SILENCE_SECONDS, 1)]


@pytest.mark.parametrize("gap", [0.25, 0.9, 1.0])
def test_a_regular_member_has_the_usual_silence(gap: float) -> None:
    liveness = FailureDetector([1], now=0.0)
    last = hear_every(liveness, gap, 0.0, 8)
    assert liveness.deadline == last + SILENCE_SECONDS


def test_a_member_heard_in_bursts_is_given_longer_within_bounds() -> None:
    liveness = FailureDetector([1], now=0.0)
    last = hear_every(liveness, 1.5, 0.0, 3)
    assert liveness.deadline == last + GAPS * 1.5
    silent_after(liveness, last, last + 20.0)
    liveness.heard(1, last + 20.0)
    assert liveness.deadline == last + 20.0 + MAX_SILENCE_SECONDS


def test_bytes_are_a_sign_of_life_unless_they_trickle() -> None:
    liveness = FailureDetector([1], now=0.0)
    enough = int(MIN_BYTES_PER_SECOND * HEARTBEAT_SECONDS)
    silent_after(liveness, 0.0, 0.5)
    liveness.received(1, enough - 1)
    assert liveness.deadline == SILENCE_SECONDS
    liveness.check(0.75)
    liveness.received(1, enough)
    assert liveness.deadline == 0.75 + SILENCE_SECONDS, "they may have come right after the check before"
    assert silent_after(liveness, 0.75, 4.0)
    assert liveness.received(1, enough)


def test_a_member_far_away_may_be_silent_for_longer_and_not_for_ever() -> None:
    liveness = FailureDetector([1, 2, 3], now=0.0)
    liveness.allow(1, 0.0)
    liveness.allow(2, 0.3)
    liveness.allow(3, 60.0)
    fallen = silent_after(liveness, 0.0, 10.0)
    expected = [SILENCE_SECONDS, SILENCE_SECONDS + ROUND_TRIPS * 0.3, MAX_SILENCE_SECONDS]
    assert fallen == [(pytest.approx(at), member) for member, at in enumerate(expected, start=1)]
