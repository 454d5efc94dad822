"""The round machine, event by event: what one member asks for, given what others say. Whole rounds: tests/sim."""

from __future__ import annotations

import pytest

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import (
    Close,
    Fail,
    Finish,
    PeerReturned,
    Release,
    Send,
    SendContribution,
    SendMean,
    Withdrew,
)
from equipoise.averaging.allreduce.findings import MAX_NOTES
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.timing import LINGER_SECONDS, STALL_SECONDS
from fakes.one_member import (
    ALL,
    DIGEST,
    OTHER_DIGEST,
    TIMEOUT,
    A,
    B,
    C,
    D,
    Table,
    ends,
    recipients,
    sent,
    voters,
)

DECISION = Decision(ALL, ALL)
WITHOUT_A = Decision(0b110, 0b110)


def gathering(me: int = B, **options) -> Table:
    """A member to which the decision over all has been proposed, and which lacks the mean."""
    table = Table(me, **options)
    table.says(A, wire.Propose(0, Decision(ALL, table.group.dialable)))
    return table


def holding(me: int = B) -> Table:
    """A member that holds the mean, and knows of nobody else that does."""
    table = gathering(me)
    table.mean(ALL)
    return table


# ---- no faults ----


def test_a_contributor_sends_to_the_owners_at_once() -> None:
    assert Table(C, owners=(A, B, C)).first == [SendContribution(A, 0), SendContribution(B, 1)]


def test_the_leader_decides_once_every_owner_has_reported() -> None:
    table = Table(A, owners=(A, B))
    table.contributes(B)
    assert not sent(table.contributes(C), wire.Propose)
    assert sent(table.says(B, wire.Report(0, 0, ALL)), wire.Propose) == [
        (B, wire.Propose(0, DECISION)),
        (C, wire.Propose(0, DECISION)),
    ]


def test_means_are_not_sent_before_the_decision() -> None:
    table = Table(B, owners=(B,))
    table.contributes(A)
    table.contributes(C)
    assert table.reduced(ALL) == []
    assert [one for one in table.says(A, wire.Propose(0, DECISION)) if isinstance(one, SendMean)] == [
        SendMean(C, 0, ALL),
        SendMean(A, 0, ALL),
    ]


def test_a_member_with_the_whole_mean_votes() -> None:
    table = gathering(owners=(A, A))
    assert table.mean(ALL, 0) == []
    assert voters(table.mean(ALL, 1)) == {A: 1 << B, C: 1 << B}


def test_a_majority_of_votes_finishes() -> None:
    table = holding()
    assert ends(table.votes(C, table.vote(DECISION))) == [Finish(DECISION, table.digest(DECISION))]


def test_the_leader_tells_that_the_round_has_succeeded() -> None:
    table = Table(A)
    table.contributes(B)
    table.contributes(C)
    table.reduced(ALL)
    assert voters(table.votes(B, table.vote(DECISION))) == {B: 0b011, C: 0b011}


def test_buffers_are_released_when_all_hold_the_mean_and_the_machine_closes_later() -> None:
    table = holding()
    table.votes(A, table.vote(DECISION))
    assert table.votes(C, table.vote(DECISION)) == [Release()]
    assert table.machine.deadline == table.now + LINGER_SECONDS
    assert table.stall() == [Close()]
    assert table.machine.deadline == float("inf")
    assert table.says(C, wire.Fetch(ALL, b"\x01")) == []


def test_a_member_is_asked_for_signs_of_life_once_all_hold_the_mean() -> None:
    table = holding()
    table.votes(A, table.vote(DECISION))
    assert table.says(C, wire.Heartbeat()) == [], "it beats by itself: C may lack the mean"
    table.votes(C, table.vote(DECISION))
    assert table.says(C, wire.Heartbeat()) == [Send(C, wire.Heartbeat(asks=False))]
    assert table.says(C, wire.Heartbeat(asks=False)) == [], "two members would answer each other for ever"


def test_messages_in_another_order_end_the_same() -> None:
    table = Table(C)
    digest = holding(C).digest(DECISION)
    table.votes(A, wire.Vote(0, DECISION, digest))
    table.votes(B, wire.Vote(0, DECISION, digest))
    table.mean(ALL)
    assert table.machine.ended == Finish(DECISION, digest)


# ---- who dies, and when ----


def test_leader_lost_while_scattering_the_next_in_line_plans_without_it() -> None:
    table = Table(B)
    prepare, plan = wire.Prepare(1), wire.Plan(1, 0, 0b110)
    assert sent(table.lose(A), wire.Prepare) == [(A, prepare), (C, prepare)], "it waits for the lost one"
    actions = table.says(C, wire.Promise(1))
    assert sent(actions, wire.Plan) == [(A, plan), (C, plan)]


def test_leader_lost_after_its_proposal_the_means_that_exist_are_kept() -> None:
    table = holding()
    table.lose(A)
    proposal = wire.Propose(1, DECISION, 0b010)
    assert sent(table.says(C, wire.Promise(1)), wire.Propose) == [(A, proposal), (C, proposal)]
    assert table.machine.phase == "commit"


def test_leader_lost_after_a_proposal_that_another_holds_it_is_inherited_and_fetched() -> None:
    table = gathering()
    table.lose(A)
    actions = table.says(C, wire.Promise(1, 0, DECISION))
    proposal = wire.Propose(1, DECISION, 0b100)
    assert sent(actions, wire.Propose) == [(A, proposal), (C, proposal)]
    assert sent(actions, wire.Fetch) == [(C, wire.Fetch(ALL, b"\x01"))]


def test_a_member_waits_for_the_one_before_it_in_line() -> None:
    table = Table(C)
    assert sent(table.lose(A), wire.Prepare) == []
    assert sent(table.lose(B), wire.Prepare) == []
    table.stall()
    assert isinstance(table.machine.ended, Fail)


def test_owner_lost_before_the_decision_is_replaced() -> None:
    table = Table(A, owners=(A, B))
    table.contributes(B)
    table.contributes(C)
    plan = wire.Plan(0, 1, 0b101)
    assert sent(table.lose(B), wire.Plan) == [(B, plan), (C, plan)]


def test_owner_lost_after_the_decision_the_leader_decides_again_in_a_new_ballot() -> None:
    table = Table(A, owners=(A, B))
    table.contributes(B)
    table.contributes(C)
    table.says(B, wire.Report(0, 0, ALL))
    actions = table.lose(B)
    prepare, plan = wire.Prepare(3), wire.Plan(3, 0, 0b101)
    assert sent(actions, wire.Prepare) == [(B, prepare), (C, prepare)]
    assert sent(table.says(C, wire.Promise(3)), wire.Plan) == [(B, plan), (C, plan)]


def test_owner_lost_after_somebody_holds_the_whole_mean_is_not_missed() -> None:
    table = Table(A, owners=(A, B))
    table.contributes(B)
    table.contributes(C)
    table.says(B, wire.Report(0, 0, ALL))
    table.votes(C, wire.Vote(0, DECISION, DIGEST))
    assert sent(table.lose(B), wire.Fetch) == [(C, wire.Fetch(ALL, b"\x02"))]


def test_contributor_lost_after_its_contribution_counts() -> None:
    table = Table(A)
    table.contributes(C)
    table.lose(C)
    proposal = wire.Propose(0, DECISION)
    assert sent(table.contributes(B), wire.Propose) == [(B, proposal), (C, proposal)]


def test_a_late_contributor_is_left_out_after_a_stall() -> None:
    table = Table(A)
    table.contributes(B)
    assert sent(table.stall(), wire.Propose)[0] == (B, wire.Propose(0, Decision(0b011, ALL)))
    assert "deciding without the contributions of c" in table.machine.findings.notes


def test_an_owner_that_does_not_report_is_replaced_after_two_stalls() -> None:
    table = Table(A, owners=(A, B))
    table.contributes(B)
    table.contributes(C)
    assert not sent(table.stall(), wire.Plan)
    assert sent(table.stall(), wire.Plan) == [(B, wire.Plan(0, 1, 0b101)), (C, wire.Plan(0, 1, 0b101))]


def test_half_of_the_group_is_no_majority() -> None:
    table = Table(A, weights=(1, 1, 1, 1))
    assert not ends(table.lose(B, C))
    (end,) = ends(table.stall())
    assert isinstance(end, Fail)
    assert end.reason.startswith("2 of 4 members left, a majority is needed: ")
    assert "c lost in phase scatter: connection broke" in end.reason


def test_a_lost_majority_may_come_back_within_a_stall() -> None:
    table = Table(A, weights=(1, 1))
    table.lose(B)
    table.contributes(B)
    assert recipients(table.tell(PeerReturned(B)), wire.Propose) == [B]


def test_a_member_left_alone_neither_plans_nor_opens_ballots() -> None:
    leader, follower = Table(A, weights=(1, 1)), Table(B, weights=(1, 1))
    assert not sent(leader.lose(B), wire.Plan)
    assert not sent(follower.lose(A), wire.Prepare)
    assert leader.machine._paxos.ballot.plan == wire.Plan(0, 0, 0b11)
    assert follower.machine._paxos.ballot.number == 0


# ---- who takes part otherwise ----


def test_an_observer_sends_no_contribution_and_gets_the_mean() -> None:
    table = Table(C, weights=(1, 1, 0))
    assert table.first == []
    decision = Decision(0b011, ALL)
    table.says(A, wire.Propose(0, decision))
    table.mean(0b011)
    assert ends(table.votes(A, table.vote(decision)))


def test_a_contribution_of_an_observer_is_not_wanted() -> None:
    assert not Table(A, weights=(1, 1, 0)).machine.wants_contribution(C, 0)


def test_an_undialable_member_speaks_only_to_dialable_ones() -> None:
    table = Table(C, weights=(1, 1, 1, 1), dialable=0b0011)
    table.says(A, wire.Propose(0, Decision(0b1111, 0b0011)))
    assert voters(table.mean(0b1111)) == {A: 1 << C, B: 1 << C}


def test_an_undialable_member_does_not_lead() -> None:
    table = Table(B, dialable=0b101)
    assert sent(table.lose(A), wire.Prepare) == []
    assert Table(C, dialable=0b101).lose(A)


def test_a_plan_with_owners_that_cannot_be_dialled_is_ignored() -> None:
    table = Table(B, dialable=0b011)
    table.says(A, wire.Plan(0, 1, 0b100))
    assert table.machine._part_table.owners == 0b001


# ---- usurpers and strangers ----


@pytest.mark.parametrize(
    "message",
    [wire.Propose(0, WITHOUT_A), wire.Plan(0, 1, 0b110), wire.Propose(3, WITHOUT_A), wire.Prepare(3)],
    ids=lambda message: type(message).__name__,
)
def test_a_ballot_is_only_its_leaders_to_open_plan_and_decide(message: wire.RoundMessage) -> None:
    table = Table(B)
    assert table.says(C, message) == []
    assert table.machine._paxos.ballot.number == 0
    assert table.machine.phase == "scatter"


def test_a_leader_that_serves_is_not_unseated() -> None:
    table = Table(B)
    assert sent(table.says(C, wire.Prepare(2)), wire.Refuse) == [(C, wire.Refuse(0))]


def test_a_leader_that_stalls_is_unseated() -> None:
    table = Table(B)
    table.stall()
    assert sent(table.says(C, wire.Prepare(2)), wire.Promise) == [(C, wire.Promise(2))]


def test_a_lower_ballot_is_refused_with_the_one_promised() -> None:
    table = Table(B)
    table.stall()
    table.says(C, wire.Prepare(5))
    assert sent(table.says(A, wire.Prepare(3)), wire.Refuse) == [(A, wire.Refuse(5))]


def test_promises_of_another_ballot_do_not_count() -> None:
    table = Table(B)
    table.lose(A)
    assert table.says(C, wire.Promise(0), wire.Promise(4)) == []


@pytest.mark.parametrize(
    "decision",
    [Decision(0b1001, ALL), Decision(0b001, ALL), Decision(0, ALL), Decision(ALL, 0), Decision(ALL, 0b1000)],
    ids=["a stranger contributes", "one contributes", "nobody contributes", "nobody owns", "a stranger owns"],
)
def test_decisions_that_no_honest_leader_makes_are_ignored(decision: Decision) -> None:
    table = Table(B)
    table.says(A, wire.Propose(0, decision))
    table.says(A, wire.Votes(wire.Vote(0, decision, DIGEST), ALL))
    assert table.machine.phase == "scatter"


# ---- fetching ----


def test_another_holder_is_asked_when_the_first_does_not_deliver() -> None:
    decision = Decision(ALL, 0b1111)
    table = Table(B, weights=(1, 1, 1, 1))
    table.says(A, wire.Propose(0, decision))
    table.votes(C, wire.Vote(0, decision, DIGEST))
    table.votes(D, wire.Vote(0, decision, DIGEST))
    (first,) = recipients(table.stall(), wire.Fetch)[-1:]
    (second,) = recipients(table.stall(), wire.Fetch)[-1:]
    assert {first, second} <= {A, C, D}
    assert first != second


def test_a_holder_serves_what_it_has_and_not_for_ever() -> None:
    table = holding()
    assert table.says(C, wire.Fetch(ALL, b"\x03")) == [SendMean(C, 0, ALL)]
    assert table.says(C, wire.Fetch(0b011, b"\x01")) == []
    served = [table.says(C, wire.Fetch(ALL, b"\x01")) for _ in range(20)]
    assert 0 < sum(map(len, served)) < 10


def test_a_mean_that_differs_whoever_it_is_fetched_from_fails_untouched() -> None:
    table = Table(C)
    table.says(A, wire.Propose(0, DECISION))
    table.mean(ALL, digest=OTHER_DIGEST)
    (first,) = recipients(table.says(A, wire.Votes(wire.Vote(0, DECISION, DIGEST), 0b011)), wire.Fetch)
    (second,) = recipients(table.mean(ALL, digest=OTHER_DIGEST, sender=first), wire.Fetch)
    assert {first, second} == {A, B}
    (end,) = ends(table.mean(ALL, digest=OTHER_DIGEST, sender=second))
    assert end == Fail(
        "our mean differs from the group's, from whomever of the majority it is fetched", in_doubt=True
    )


def test_of_a_majority_one_that_sends_another_mean_than_it_votes_for_does_no_harm() -> None:
    table = Table(C, weights=(1, 1, 1, 1))
    decision = Decision(0b1111, 0b1111)
    table.says(A, wire.Propose(0, decision))
    table.mean(0b1111, digest=OTHER_DIGEST)
    good = holding_all_four().vote(decision)
    for voter in (A, B, D):
        (*_, asked) = [None, *recipients(table.votes(voter, good), wire.Fetch)]
    (another,) = recipients(table.mean(0b1111, digest=OTHER_DIGEST, sender=asked), wire.Fetch)
    assert another != asked
    assert ends(table.mean(0b1111, sender=another)) == [Finish(decision, good.digest)]


def holding_all_four() -> Table:
    table = Table(B, weights=(1, 1, 1, 1))
    table.says(A, wire.Propose(0, Decision(0b1111, 0b1111)))
    table.mean(0b1111)
    return table


# ---- ending ----


def test_a_member_that_gives_up_says_why_and_is_not_waited_for() -> None:
    table = Table(A)
    table.contributes(B)
    actions = table.says(C, wire.GiveUp("cancelled"))
    assert sent(actions, wire.Propose) == [(B, wire.Propose(0, Decision(0b011, ALL)))]
    assert "c lost in phase scatter: left the round: cancelled" in table.machine.findings.notes
    table.tell(PeerReturned(C))
    assert "c is back" not in table.machine.findings.notes


def test_a_member_that_withdraws_tells_the_others() -> None:
    table = Table(B)
    actions = table.tell(Withdrew("cancelled"))
    assert sent(actions, wire.GiveUp) == [(A, wire.GiveUp("cancelled")), (C, wire.GiveUp("cancelled"))]
    assert actions[-3:] == [Fail("cancelled"), Release(), Close()]


def test_a_member_that_fails_with_the_mean_in_hand_still_serves_it() -> None:
    table = holding()
    table.tell(Withdrew("cancelled"))
    assert table.says(C, wire.Fetch(ALL, b"\x01")) == [SendMean(C, 0, ALL)]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: Table(A), "in phase scatter; contributions are missing from b, c", id="scatter"),
        pytest.param(lambda: reported(), "in phase decide; no decision from a", id="decide"),
        pytest.param(gathering, "in phase gather; 1 parts of the mean are missing from a", id="gather"),
        pytest.param(holding, "in phase commit; the mean is held by b", id="commit"),
    ],
)
def test_a_timeout_says_what_was_missing(make, reason: str) -> None:
    table = make()
    table.now = TIMEOUT
    (end,) = ends(table.wake())
    assert end == Fail(f"timed out {reason}", in_doubt="in phase commit" in reason), "it has voted by then"


def reported() -> Table:
    table = Table(B, owners=(B,))
    table.contributes(A)
    table.contributes(C)
    return table


def test_the_deadline_is_the_next_stall_and_at_last_the_timeout() -> None:
    table = Table(B, timeout=5.0)
    assert table.machine.deadline == STALL_SECONDS
    table.stall()
    assert table.machine.deadline == 2 * STALL_SECONDS
    table.stall()
    assert table.machine.deadline == 5.0
    table.stall()
    assert isinstance(table.machine.ended, Fail)


def test_notes_are_bounded() -> None:
    table = Table(B, weights=(1,) * 5)
    for _ in range(MAX_NOTES):
        table.lose(C)
        table.tell(PeerReturned(C))
    assert len(table.machine.findings.notes) == MAX_NOTES
