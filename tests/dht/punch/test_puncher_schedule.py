"""When holes are wanted, and how long a failure is remembered."""

from __future__ import annotations

from equipoise.dht.punch.puncher import (
    FIRST_RETRY_SECONDS,
    MAX_AT_ONCE,
    MAX_RETRY_SECONDS,
    MAX_WANTED,
    PATIENCE_SECONDS,
    WANTED_SECONDS,
    Schedule,
)


def due(wishes: Schedule, now: float) -> list[str]:
    return wishes.due(now, lambda peer: True)


def test_a_peer_is_due_a_moment_after_it_was_met_and_not_for_ever() -> None:
    wishes = Schedule()
    wishes.want("a", 0.0)
    assert due(wishes, 0.0) == []
    assert due(wishes, PATIENCE_SECONDS) == ["a"]
    assert wishes.due(PATIENCE_SECONDS, lambda peer: False) == []
    assert due(wishes, WANTED_SECONDS) == []
    # Met again: at once.
    wishes.want("a", WANTED_SECONDS)
    assert due(wishes, WANTED_SECONDS) == ["a"]


def test_a_failure_is_remembered_longer_each_time_until_one_succeeds() -> None:
    wishes, now, delays = Schedule(), 0.0, []
    for _ in range(8):
        wishes.want("a", now)
        wishes.began("a")
        wishes.ended("a", "no way", now)
        assert wishes.failure("a") == "no way"
        before = now
        while not due(wishes, now):
            now += 1.0
            wishes.want("a", now)
        delays.append(now - before)
    assert delays[:3] == [FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS]
    assert delays[-1] == MAX_RETRY_SECONDS
    wishes.began("a")
    wishes.ended("a", "", now)
    assert wishes.failure("a") == ""
    assert due(wishes, now) == []
    assert due(wishes, now + FIRST_RETRY_SECONDS) == ["a"]


def test_punches_at_once_are_bounded_and_the_peer_met_last_comes_first() -> None:
    wishes = Schedule()
    for peer in range(MAX_AT_ONCE + 2):
        wishes.want(str(peer), 0.0)
    first = due(wishes, PATIENCE_SECONDS)
    assert first == [str(peer) for peer in reversed(range(2, MAX_AT_ONCE + 2))]
    for one in first:
        wishes.began(one)
    assert due(wishes, PATIENCE_SECONDS) == []
    wishes.ended(first[0], "x", PATIENCE_SECONDS)
    assert due(wishes, PATIENCE_SECONDS) == ["1"]


def test_only_a_peer_that_was_met_is_answered_and_once() -> None:
    wishes = Schedule()
    assert "in no round" in wishes.refusal("a", 0.0)
    wishes.want("a", 0.0)
    assert wishes.refusal("a", 0.0) == ""
    wishes.began("a")
    assert "under way" in wishes.refusal("a", 0.0)
    wishes.ended("a", "", 0.0)
    assert "in no round" in wishes.refusal("a", WANTED_SECONDS)


def test_the_least_recently_met_is_forgotten() -> None:
    wishes = Schedule()
    for peer in range(MAX_WANTED + 1):
        wishes.want(str(peer), 0.0)
    assert wishes.refusal("0", 0.0)
    assert not wishes.refusal("1", 0.0)
    wishes.ended("0", "gone meanwhile", 0.0)
    assert wishes.failure("0") == ""
