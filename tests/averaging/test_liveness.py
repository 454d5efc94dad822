from __future__ import annotations

from equipoise.averaging.allreduce.liveness import HEARTBEAT_SECONDS, SILENCE_SECONDS, Liveness


def silent_after(liveness: Liveness, start: float, until: float) -> list[tuple[float, int]]:
    fallen = []
    now = start
    while now < until:
        now += HEARTBEAT_SECONDS
        fallen += [(now, member) for member in liveness.check(now)]
    return fallen


def test_a_silent_member_is_taken_for_dead_once_within_its_bound() -> None:
    liveness = Liveness([1, 2], now=100.0)
    liveness.heard(2, 101.0)
    fallen = silent_after(liveness, 100.0, 110.0)
    assert [member for _, member in fallen] == [1, 2]
    assert SILENCE_SECONDS < fallen[0][0] - 100.0 <= SILENCE_SECONDS + HEARTBEAT_SECONDS
    assert SILENCE_SECONDS < fallen[1][0] - 101.0 <= SILENCE_SECONDS + HEARTBEAT_SECONDS


def test_a_member_heard_again_returns_and_can_fall_silent_again() -> None:
    liveness = Liveness([1], now=0.0)
    assert silent_after(liveness, 0.0, 4.0)
    assert liveness.heard(1, 4.1)
    assert not liveness.heard(1, 4.2)
    assert silent_after(liveness, 4.0, 10.0)


def test_a_lost_connection_counts_as_silence_until_the_next_sign_of_life() -> None:
    liveness = Liveness([1], now=0.0)
    liveness.lose(1)
    assert silent_after(liveness, 0.0, 5.0) == []
    assert liveness.heard(1, 5.1)


def test_after_a_pause_of_our_own_nobody_was_silent() -> None:
    liveness = Liveness([1, 2], now=0.0)
    liveness.check(0.4)
    assert liveness.check(60.0) == []
    assert [member for _, member in silent_after(liveness, 60.0, 63.0)] == [1, 2]
