"""Paxos as plain values: ballots, majorities, what a new ballot inherits, and the count of votes."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.allreduce.messages import Decision, Promise, Vote
from equipoise.averaging.allreduce.paxos import (
    Tally,
    inherited,
    is_majority,
    members_of,
    next_ballot,
)

ONE, OTHER = Decision(0b011, 0b111), Decision(0b110, 0b110)


def vote(ballot: int = 0, decision: Decision = ONE, digest: bytes = b"d" * 32) -> Vote:
    return Vote(ballot, decision, digest)


@given(st.sets(st.integers(0, 63)))
def test_members_of_a_bitmask(members: set[int]) -> None:
    assert list(members_of(sum(1 << member for member in members))) == sorted(members)


@given(st.integers(1, 64), st.data())
def test_two_majorities_have_a_member_in_common(size: int, data: st.DataObject) -> None:
    one, other = (data.draw(st.integers(0, 2**size - 1)) for _ in range(2))
    if is_majority(one, size) and is_majority(other, size):
        assert one & other


@given(st.integers(0, 10**6), st.integers(2, 64), st.data())
def test_the_next_ballot_is_the_lowest_of_ones_own(after: int, size: int, data: st.DataObject) -> None:
    member = data.draw(st.integers(0, size - 1))
    ballot = next_ballot(after, member, size)
    assert ballot == min(one for one in range(after + 1, after + size + 1) if one % size == member)


def test_a_ballot_is_free_if_nobody_holds_anything() -> None:
    assert inherited({0: Promise(5), 1: Promise(5)}, 3) == (None, 0, False)


def test_the_decision_held_in_the_highest_ballot_is_inherited() -> None:
    promises = {0: Promise(9, 3, ONE), 1: Promise(9, 4, OTHER), 2: Promise(9), 4: Promise(9, 1, OTHER)}
    assert inherited(promises, 5) == (OTHER, 0b10010, True)


def test_a_decision_that_too_few_can_hold_binds_no_member() -> None:
    promises = {0: Promise(9, 3, ONE), 1: Promise(9), 2: Promise(9)}
    assert inherited(promises, 4) == (ONE, 0b1, False)
    assert inherited(promises, 5) == (ONE, 0b1, True)


@given(
    st.integers(2, 7),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2), st.sampled_from([ONE, OTHER])), max_size=40),
)
def test_chosen_is_what_a_majority_cast(size: int, cast: list[tuple[int, int, Decision]]) -> None:
    tally = Tally(size)
    voters = defaultdict(set)
    for member, ballot, decision in cast:
        member %= size
        news = tally.add(vote(ballot, decision), 1 << member)
        assert news == (member not in voters[ballot, decision])
        voters[ballot, decision].add(member)
    won = {one for one, by in voters.items() if 2 * len(by) > size}
    chosen = tally.chosen
    assert (chosen is None and not won) or (chosen is not None and (chosen.ballot, chosen.decision) in won)


def test_votes_of_different_digests_do_not_add_up() -> None:
    tally = Tally(3)
    tally.add(vote(digest=b"a" * 32), 0b001)
    tally.add(vote(digest=b"b" * 32), 0b010)
    assert tally.chosen is None
    assert tally.holders(ONE) == 0b011


def test_holders_are_of_the_contributors_whatever_the_ballot_and_the_owners() -> None:
    tally = Tally(3)
    tally.add(vote(ballot=0), 0b001)
    tally.add(vote(ballot=4, decision=Decision(ONE.contributors, 0b100)), 0b100)
    tally.add(vote(ballot=4, decision=OTHER), 0b010)
    assert tally.holders(ONE) == 0b101


def test_once_a_majority_has_voted_only_votes_for_its_digest_are_of_holders() -> None:
    tally = Tally(4)
    tally.add(vote(digest=b"b" * 32), 0b1000)
    for member in range(3):
        tally.add(vote(digest=b"a" * 32), 1 << member)
    assert tally.holders(ONE) == 0b0111
    tally.add(vote(ballot=4, digest=b"a" * 32), 0b1000)
    assert tally.holders(ONE) == 0b1111
