"""When holes are wanted, and how long a failure is remembered."""

from __future__ import annotations

from equipoise.dht.punch.puncher import (
    FIRST_RETRY_SECONDS,
    MAX_AT_ONCE,
    MAX_RETRY_SECONDS,
    PATIENCE_SECONDS,
    WANTED_SECONDS,
    Schedule,
)
from equipoise.limits import LruDict


class Wishes(Schedule):
    """A schedule, and the peers met."""

    def __init__(self) -> None:
        self.met: LruDict[str, float] = LruDict(100)
        super().__init__(self.met)

    def all_due(self, now: float) -> list[str]:
        return self.due(now, lambda peer: True)


def test_a_peer_is_due_a_moment_after_it_was_met_and_not_for_ever() -> None:
    wishes = Wishes()
    wishes.met["a"] = 0.0
    assert wishes.all_due(0.0) == []
    wishes.met["a"] = 1.0
    assert wishes.all_due(PATIENCE_SECONDS) == ["a"]
    assert wishes.due(PATIENCE_SECONDS, lambda peer: False) == []
    assert wishes.all_due(1.0 + WANTED_SECONDS) == []
    # Met again: at once.
    wishes.met["a"] = WANTED_SECONDS
    assert wishes.all_due(1.0 + WANTED_SECONDS) == ["a"]


def test_a_failure_is_remembered_longer_each_time_until_one_succeeds() -> None:
    wishes, now, delays = Wishes(), 0.0, []
    for _ in range(8):
        wishes.met["a"] = now
        wishes.began("a")
        wishes.ended("a", "no way", now)
        assert wishes.failure("a") == "no way"
        before = now
        while not wishes.all_due(now):
            now += 1.0
            wishes.met["a"] = now
        delays.append(now - before)
    assert delays[:3] == [FIRST_RETRY_SECONDS, 2 * FIRST_RETRY_SECONDS, 4 * FIRST_RETRY_SECONDS]
    assert delays[-1] == MAX_RETRY_SECONDS
    wishes.began("a")
    wishes.ended("a", "", now)
    assert wishes.failure("a") == ""
    assert wishes.all_due(now) == []
    assert wishes.all_due(now + FIRST_RETRY_SECONDS) == ["a"]


def test_punches_at_once_are_bounded_and_the_peer_met_last_comes_first() -> None:
    wishes = Wishes()
    for peer in range(MAX_AT_ONCE + 2):
        wishes.met[str(peer)] = 0.0
    assert wishes.all_due(0.0) == []
    first = wishes.all_due(PATIENCE_SECONDS)
    assert first == [str(peer) for peer in reversed(range(2, MAX_AT_ONCE + 2))]
    for one in first:
        wishes.began(one)
    assert wishes.all_due(PATIENCE_SECONDS) == []
    wishes.ended(first[0], "x", PATIENCE_SECONDS)
    assert wishes.all_due(PATIENCE_SECONDS) == ["1"]


def test_only_a_peer_that_was_met_is_answered_and_once() -> None:
    wishes = Wishes()
    assert "in no round" in wishes.refusal("a", 0.0)
    wishes.met["a"] = 0.0
    assert wishes.refusal("a", 0.0) == ""
    wishes.began("a")
    assert "under way" in wishes.refusal("a", 0.0)
    wishes.ended("a", "", 0.0)
    assert "in no round" in wishes.refusal("a", WANTED_SECONDS)
