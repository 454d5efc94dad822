"""All members of a group decide alike whether to exchange states, and those who missed a mean do not contribute."""

from __future__ import annotations

import random

from equipoise.averaging.outcome import Outcome
from equipoise.peer.demo.lockstep import OBSERVER, UP_TO_DATE, Lockstep


def ended(round: int, group: str, ok: bool = True) -> Outcome:
    return Outcome(ok=ok, reason="", round=round, group=tuple(group))


def test_nothing_to_do_while_all_are_together() -> None:
    lockstep = Lockstep()
    assert [lockstep.follow(ended(number, "abc")) for number in range(3)] == [None] * 3


def test_nothing_to_do_when_a_member_dies() -> None:
    lockstep = Lockstep()
    assert [lockstep.follow(ended(0, "abc")), lockstep.follow(ended(1, "ab"))] == [None, None]


def test_who_missed_a_round_observes_and_the_others_contribute() -> None:
    missing, present = Lockstep(), Lockstep()
    missing.follow(ended(0, "abc"))
    present.follow(ended(0, "abc"))
    present.follow(ended(1, "ab"))
    assert missing.follow(ended(2, "abc")) == OBSERVER
    assert present.follow(ended(2, "abc")) == UP_TO_DATE


def test_a_round_that_failed_for_all_was_missed_by_none() -> None:
    lockstep = Lockstep()
    lockstep.follow(ended(0, "abc"))
    assert lockstep.follow(ended(1, "abc", ok=False)) is None
    assert lockstep.follow(ended(2, "abc")) is None


def test_an_attempt_without_a_group_says_nothing() -> None:
    lockstep = Lockstep()
    lockstep.follow(ended(0, "abc"))
    assert lockstep.follow(ended(7, "", ok=False)) is None
    assert lockstep.follow(ended(1, "abc")) is None


def test_who_comes_after_the_first_round_observes() -> None:
    assert Lockstep().follow(ended(3, "abc")) == OBSERVER


def test_members_of_a_group_always_decide_alike() -> None:
    """Groups of five peers at random: all members exchange or none does, and someone up to date contributes."""
    chance = random.Random(0)
    for _ in range(200):
        peers = {name: Lockstep() for name in "abcde"}
        for number in range(12):
            group = "".join(sorted(chance.sample("abcde", chance.randint(3, 5))))
            weights = [peers[name].follow(ended(number, group)) for name in group]
            assert all(weight is None for weight in weights) or None not in weights
            if None not in weights:
                assert UP_TO_DATE in weights
