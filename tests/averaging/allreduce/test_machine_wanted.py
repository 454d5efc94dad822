"""What one member takes in of contributions and means, from whom, and sends again."""

from __future__ import annotations

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.messages import Decision
from fakes.one_member import ALL, DIGEST, A, B, C, D, E, Table, finished, recipients

DECISION = Decision(ALL, ALL)


def gathering(me: int, owners: tuple[int, ...]) -> Table:
    """A member to which the decision over all has been proposed, and which lacks the mean."""
    table = Table(me, owners=owners)
    table.says(A, wire.Propose(0, Decision(ALL, table.group.dialable)))
    return table


def test_a_mean_is_wanted_of_the_decision_or_of_any_before_it() -> None:
    table = Table(B)
    assert table.machine.wants_mean(A, 0, ALL)
    assert table.machine.wants_mean(A, 0, 0b011)
    table.says(A, wire.Propose(0, DECISION))
    assert not table.machine.wants_mean(A, 0, 0b011)


def test_a_mean_is_wanted_only_of_the_parts_owner() -> None:
    table = gathering(C, owners=(A, B))
    assert table.machine.wants_mean(A, 0, ALL)
    assert not table.machine.wants_mean(B, 0, ALL)
    assert table.mean(ALL, 0, sender=B) == []
    assert not table.machine._part_table.has_mean(0, ALL)


def test_a_mean_is_wanted_of_who_was_asked_for_it_even_if_another_was_asked_since() -> None:
    table = Table(B, owners=(D, D), weights=(1, 1, 1, 1, 1))
    decision = Decision(0b11111, 0b11111)
    table.says(A, wire.Propose(0, decision))
    table.mean(0b11111, 1)
    for holder in (A, C):
        table.votes(holder, wire.Vote(0, decision, DIGEST))
    (first,) = recipients(table.lose(D), wire.Fetch)
    (second,) = recipients(table.stall(), wire.Fetch)[-1:]
    assert {first, second} == {A, C}
    for source, part, wanted in ((A, 0, True), (C, 0, True), (E, 0, False), (A, 1, False)):
        assert table.machine.wants_mean(source, part, 0b11111) == wanted


def test_nothing_is_wanted_after_the_end() -> None:
    table = finished(B)
    assert not table.machine.wants_contribution(C, 0)
    assert not table.machine.wants_mean(A, 0, 0b011)
