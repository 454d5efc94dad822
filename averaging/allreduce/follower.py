"""What a member says to the leader of its ballot, and a leader to the others, while contributions come in."""

from __future__ import annotations

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.attendance import Attendance
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos

WORD_SECONDS = 1.0
"""Between two words to others that we wait for someone who delivers: twice within a stall, so that one may be late."""

PLENTY = 1 << 40
"""Bytes that a word is worth: whoever waits for someone who delivers is itself not stalled."""


def due_report(paxos: Paxos, part_table: PartTable, attendance: Attendance) -> wire.Report | None:
    """As owner, once every contribution is here or not to be expected: which are whole, unless that has been said."""
    ballot = paxos.ballot
    if ballot.plan is None or ballot.decision is not None or not part_table.owners >> paxos.me & 1:
        return None
    whole = part_table.whole()
    if paxos.group.contributors & ~(whole | attendance.lost | attendance.late):
        return None
    return paxos.report(ballot.plan, whole)


class Words:
    """Words that one waits for someone who delivers, lest one is taken for stalled.

    They go to the leader as a `Report` that is not final, and from the leader to all as its last message once more.

    Args:
        now: Monotonic seconds.
        timeout: Seconds until the round fails.
    """

    def __init__(self, now: float, timeout: float) -> None:
        self._believed_until = now + timeout / 2
        self._said_at = now

    def believes(self, now: float) -> bool:
        """Whether others' words still count: nobody may hold a round by words for more than half of its time."""
        return now < self._believed_until

    def due(
        self, paxos: Paxos, part_table: PartTable, now: float
    ) -> wire.Plan | wire.Propose | wire.Report | None:
        """What to say now, to the leader, or as leader to all; None if it was said a moment ago."""
        plan = paxos.ballot.plan
        if now < self._said_at + WORD_SECONDS:
            return None
        self._said_at = now
        if paxos.leader == paxos.me:
            return paxos.standing
        return (
            None if plan is None else wire.Report(plan.ballot, plan.sequence, part_table.whole(), final=False)
        )
