"""What the simulator found wrong with the round machine, event by event."""

from __future__ import annotations

import pytest

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import (
    Fail,
    PeerLost,
    PeerReturned,
    Release,
    SendMean,
)
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.paxos import MAX_BALLOT_LEAP
from equipoise.averaging.ports import FrameRefused
from fakes.one_member import (
    ALL,
    DIGEST,
    A,
    B,
    C,
    D,
    E,
    Table,
    ends,
    finished,
    recipients,
    sent,
    voters,
)


def test_a_finished_member_speaks_for_a_lost_leader_even_to_holders_of_the_mean() -> None:
    table = finished(B)
    assert table.votes(C, table.vote(Decision(ALL, ALL))) == [Release()]
    assert voters(table.lose(A)) == {A: ALL, C: ALL}


def test_a_member_that_refused_a_successor_promises_once_the_leader_is_lost_to_it_too() -> None:
    table = Table(C)
    assert sent(table.says(B, wire.Prepare(1)), wire.Refuse) == [(B, wire.Refuse(0))]
    assert sent(table.lose(A), wire.Promise) == [(B, wire.Promise(1))]


def test_a_member_that_refused_a_successor_leads_once_that_is_lost_as_well() -> None:
    table = Table(C, weights=(1, 1, 1, 1, 1))
    table.says(B, wire.Prepare(1))
    table.lose(B)
    assert recipients(table.lose(A), wire.Prepare) == [A, B, D, E]


def test_retries_to_lead_come_at_growing_intervals() -> None:
    table = Table(B)
    opened = []
    table.lose(A)
    for _ in range(12):
        if sent(table.stall(), wire.Prepare):
            opened.append(table.now)
    assert opened[:3] == [2.0, 6.0, 12.0]


def test_a_leader_gives_up_once_no_second_contribution_can_come() -> None:
    table = Table(A, weights=(1, 1, 0))
    assert [end.reason for end in ends(table.lose(B) + table.stall()) if isinstance(end, Fail)] == [
        "fewer than 2 contributions are whole: a"
    ]


def test_a_member_that_was_never_out_of_reach_is_asked_for_the_mean_first() -> None:
    for returned in (B, C):
        table = Table(D, weights=(1, 1, 1, 1))
        table.lose(A, returned)
        table.tell(PeerReturned(A), PeerReturned(returned))
        chosen = wire.Votes(wire.Vote(1, Decision(0b0111, 0b0111), DIGEST), 0b0111)
        assert recipients(table.says(B, chosen), wire.Fetch) == [B + C - returned]


@pytest.mark.parametrize("message", [wire.Prepare, wire.Refuse])
def test_no_message_makes_a_member_run_out_of_ballots(message: type[wire.Prepare | wire.Refuse]) -> None:
    table = Table(B)
    table.says(C, message(3 * MAX_BALLOT_LEAP + C))
    table.lose(A)
    assert table.machine._paxos.ballot.number < MAX_BALLOT_LEAP


@pytest.mark.parametrize("reason", ["plain", "naïve\n\x1b[31m", "x" * 1000])
def test_a_reason_for_giving_up_travels_as_printable_text(reason: str) -> None:
    message = wire.GiveUp.because(reason)
    assert wire.decode(wire.encode(message)) == message
    assert message.reason.isprintable()


def test_a_member_that_is_gone_is_sent_nothing_and_does_not_come_back() -> None:
    table = Table(A)
    table.tell(PeerLost(C, "it has begun another session", gone=True))
    assert recipients(table.contributes(B), wire.Propose) == [B]
    assert table.tell(PeerReturned(C)) == []
    assert SendMean(C, 0, 0b011) not in table.reduced(0b011)


def test_a_reason_with_control_characters_is_refused() -> None:
    with pytest.raises(FrameRefused):
        wire.decode(wire.encode(wire.GiveUp("red\x1b[31m")))
