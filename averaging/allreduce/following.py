"""What a member says to the leader of its ballot, and a leader to the others, while contributions come in."""

from __future__ import annotations

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.agreement import Agreement
from equipoise.averaging.allreduce.attendance import Attendance
from equipoise.averaging.allreduce.ledger import Ledger


def due_report(agreement: Agreement, ledger: Ledger, attendance: Attendance) -> wire.Report | None:
    """As owner, once every contribution is here or not to be expected: which are whole, unless that has been said."""
    ballot = agreement.ballot
    if ballot.plan is None or ballot.decision is not None or not ledger.owners >> agreement.me & 1:
        return None
    whole = ledger.whole()
    if agreement.group.contributors & ~(whole | attendance.lost | attendance.late):
        return None
    return agreement.report(ballot.plan, whole)


def word_of_patience(agreement: Agreement, ledger: Ledger) -> wire.Plan | wire.Propose | wire.Report | None:
    """That we wait for someone who delivers, lest we are taken for stalled: for the leader, or as leader for all."""
    plan = agreement.ballot.plan
    if agreement.leader == agreement.me:
        return agreement.standing
    return None if plan is None else wire.Report(plan.ballot, plan.sequence, ledger.whole(), final=False)
