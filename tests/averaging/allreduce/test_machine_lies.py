"""A member that was sent another mean than the majority holds: the others keep theirs until it has it too."""

from __future__ import annotations

import pytest

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Finish, Release, SendMean
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.part_table import mean_digest
from fakes.one_member import (
    ALL,
    DIGEST,
    OTHER_DIGEST,
    A,
    B,
    C,
    Table,
    ends,
    finished,
    recipients,
    sent,
    voters,
)

DECISION = Decision(ALL, ALL)
WITHOUT_C = Decision(0b011, 0b011)


def test_the_mean_is_kept_for_a_member_that_holds_another() -> None:
    table = finished(B)
    assert Release() not in table.votes(C, table.vote(DECISION, digest=OTHER_DIGEST))
    assert table.says(C, wire.Fetch(ALL, b"\x01"))[-1] == SendMean(C, 0, ALL)
    assert table.votes(C, table.vote(DECISION)) == [Release()]


def test_a_leaders_word_that_all_hold_the_mean_frees_nothing() -> None:
    table = Table(B)
    table.says(A, wire.Propose(0, DECISION, holders=ALL))
    table.mean(ALL)
    assert table.votes(A, table.vote(DECISION)) == [Finish(DECISION, table.digest(DECISION))]
    assert table.says(C, wire.Fetch(ALL, b"\x01"))[-1] == SendMean(C, 0, ALL)


def test_a_member_that_holds_another_mean_is_told_which_was_chosen() -> None:
    table = finished(B)
    assert voters(table.votes(C, table.vote(DECISION, digest=OTHER_DIGEST))) == {C: 0b011}


def test_members_that_finished_with_different_means_do_not_answer_each_other_for_ever() -> None:
    other = wire.Votes(wire.Vote(0, DECISION, OTHER_DIGEST), 0b110)
    assert sent(finished(B).says(C, other), wire.Votes) == []


def right(decision: Decision) -> bytes:
    """Digest of the mean that the majority holds."""
    return mean_digest(bytes(16), decision.contributors, [DIGEST])


def test_the_others_hear_when_a_member_that_held_another_mean_has_the_right_one() -> None:
    table = Table(C)
    table.says(A, wire.Propose(0, DECISION))
    table.mean(ALL, digest=OTHER_DIGEST)
    vote = wire.Vote(0, DECISION, right(DECISION))
    table.votes(A, vote)
    source = recipients(table.votes(B, vote), wire.Fetch)[0]
    actions = table.mean(ALL, sender=source)
    assert ends(actions) == [Finish(DECISION, right(DECISION))]
    own = wire.Votes(vote, 1 << C)
    assert sent(actions, wire.Votes) == [(A, own), (B, own)]


@pytest.mark.parametrize("proposed", [DECISION, None])
def test_a_mean_that_was_chosen_in_another_ballot_is_fetched_at_once_and_voted_for(
    proposed: Decision | None,
) -> None:
    table = Table(C)
    if proposed is not None:
        table.says(A, wire.Propose(0, proposed))
        table.mean(ALL)
    digest = right(WITHOUT_C)
    actions = table.says(B, wire.Votes(wire.Vote(1, WITHOUT_C, digest), 0b011))
    source = recipients(actions, wire.Fetch)[0]
    actions = table.mean(WITHOUT_C.contributors, sender=source)
    assert ends(actions) == [Finish(WITHOUT_C, digest)]
    assert voters(actions) == {A: 1 << C, B: 1 << C}
    assert actions[-1] == Release()
