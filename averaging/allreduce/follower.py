"""What a member says to the leader of its ballot while contributions come in."""

from __future__ import annotations

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.attendance import Attendance
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos

WAITING_SECONDS = 1.0
"""Time between two `Waiting`s of a member: two within a stall, so that one may be late."""

PLENTY = 1 << 40
"""Bytes that a `Waiting` is worth: a member that waits for one that delivers is itself not stalled."""


def due_report(paxos: Paxos, part_table: PartTable, attendance: Attendance) -> wire.Report | None:
    """As owner, once every contribution is here or not to be expected: which are whole, unless that has been said."""
    ballot = paxos.ballot
    if ballot.plan is None or ballot.decision is not None or not part_table.owners >> paxos.me & 1:
        return None
    whole = part_table.whole()
    if paxos.group.contributors & ~(whole | attendance.lost | attendance.late):
        return None
    return paxos.report(ballot.plan, whole)


class Waits:
    """When to tell others that this member waits for one that delivers, and whether to believe others who say so.

    Args:
        now: Monotonic seconds.
        timeout: Seconds until the round fails.
    """

    def __init__(self, now: float, timeout: float) -> None:
        self._believed_until = now + timeout / 2
        self._said_at = now

    def believes(self, now: float) -> bool:
        """Whether others are believed still: nobody holds a round by words for more than half of its time."""
        return now < self._believed_until

    def due(self, now: float) -> bool:
        """Whether to tell the others now; False if they were told a moment ago."""
        if now < self._said_at + WAITING_SECONDS:
            return False
        self._said_at = now
        return True
