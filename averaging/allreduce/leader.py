"""The next move of the leader of a ballot, and why: plan the owners, propose a decision, begin again, or despair."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import and_

import msgspec

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.failure_detector import Attendance
from equipoise.averaging.allreduce.follower import names_of
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos


class Tell(msgspec.Struct, frozen=True):
    """Tell everyone, ourselves included."""

    message: wire.Plan | wire.Propose
    why: str = ""


class Reopen(msgspec.Struct, frozen=True):
    """Open a higher ballot: this one cannot succeed."""

    why: str


class Despair(msgspec.Struct, frozen=True):
    """Nothing that may still come can make the round succeed."""

    why: str


Move = Tell | Reopen | Despair


def next_move(paxos: Paxos, part_table: PartTable, attendance: Attendance) -> Move | None:
    """Return the move that is due in the ballot that this member leads; None while it waits."""
    ballot = paxos.ballot
    if ballot.promises is not None:
        return _prepare(paxos, attendance)
    if ballot.decision is not None:
        return _watch(paxos, part_table, attendance, ballot.decision)
    return None if ballot.plan is None else _decide(paxos, part_table, attendance, ballot.plan)


def _prepare(paxos: Paxos, attendance: Attendance) -> Move | None:
    """Proceed once a majority has promised: propose a decision that may have been chosen, or plan afresh."""
    hoped_for = attendance.here if attendance.level == 0 else 0
    found = paxos.prepared(attendance.late, hoped_for)
    if found is None:
        return None
    number = paxos.ballot.number
    if found.decision is not None and (found.binding or found.holders & ~attendance.late):
        return Tell(wire.Propose(number, found.decision, found.holders))
    owners = paxos.group.dialable & ~attendance.lost
    # Late members own parts only if no other member can.
    return Tell(wire.Plan(number, 0, owners & ~attendance.late or owners))


def _watch(paxos: Paxos, part_table: PartTable, attendance: Attendance, decision: Decision) -> Move | None:
    """Begin again when a part of the proposed mean has no living source left."""
    if paxos.holders(decision) & ~attendance.lost or part_table.means.is_whole(decision):
        return None
    if paxos.ballot.holders or part_table.missing_of(attendance.lost, decision):
        return Reopen("all holders of a part of the mean died after the decision: deciding again")
    return None


def _decide(paxos: Paxos, part_table: PartTable, attendance: Attendance, plan: wire.Plan) -> Move | None:
    """Once every owner has reported, propose the contributors that all of them hold."""
    group, reports, lost = paxos.group, paxos.ballot.reports, attendance.lost
    silent = part_table.owners & ~sum(1 << member for member in reports)
    dropped = part_table.owners & lost | (silent if attendance.level >= 2 else 0)
    if silent and not dropped:
        return None
    contributors, misfit = choose(reports, group.contributors, group.quorum) if not silent else (0, None)
    if misfit is not None:
        dropped |= 1 << misfit
    # An owner whose contribution was late would be late with its share of the mean too.
    dropped |= part_table.owners & attendance.late & ~contributors if not silent else 0
    if dropped:
        why = f"going on without owners {names_of(group, dropped)}"
        # If no owner is left, all able members get another chance; the leader itself is one of them.
        able = group.dialable & ~lost
        owners = plan.owners & able & ~dropped or able & ~dropped or able
        return Tell(wire.Plan(plan.ballot, plan.sequence + 1, owners), why)
    if contributors.bit_count() >= group.quorum:
        missing = group.contributors & ~contributors
        why = f"deciding without the contributions of {names_of(group, missing)}" if missing else ""
        return Tell(wire.Propose(plan.ballot, Decision(contributors, plan.owners)), why)
    if (contributors | group.contributors & attendance.hoped_for).bit_count() < group.quorum:
        whole = names_of(group, contributors)
        return Despair(f"fewer than {group.quorum} contributions are whole: {whole}")
    return None


def choose(reports: Mapping[int, int], everyone: int, quorum: int = 2) -> tuple[int, int | None]:
    """The contributors that all owners hold, and the owner that should be replaced first, if any.

    An owner that lacks contributions which the others hold has a bad link of its own. Replacing it costs a retry and
    at most its own contribution. So it is replaced if that saves two contributors, or makes the round possible at all.

    Args:
        reports: Bitmask of the contributors held whole, by owner.
        everyone: Bitmask of all contributors.
        quorum: Fewest contributors of a mean.
    """
    together = _common(reports, everyone)
    least = together.bit_count()
    # -1 is a report of all contributors: it leaves this owner's report out of the intersection.
    gains = {owner: _common({**reports, owner: -1}, everyone).bit_count() - least for owner in reports}
    misfit = max(gains, key=lambda owner: (gains[owner], -owner))
    worthwhile = gains[misfit] >= 2 or (gains[misfit] == 1 and least < quorum)
    return together, misfit if len(reports) > 1 and worthwhile else None


def _common(reports: Mapping[int, int], everyone: int) -> int:
    return reduce(and_, reports.values(), everyone)
