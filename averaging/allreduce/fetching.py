"""Parts of a mean that will not come by themselves are fetched from a member that holds them."""

from __future__ import annotations

from collections import Counter

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.attendance import Attendance
from equipoise.averaging.allreduce.ballot import members_of
from equipoise.averaging.allreduce.events import Send
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos

MAX_SERVED = 4
"""Most times that one member may fetch the whole mean from us: once per source it may try, and some to spare."""


class Fetching:
    """What this member has asked others for, and what it may still serve them.

    Args:
        me: This member's index; different members start with different sources.
        parts: Number of parts of the vector.
    """

    def __init__(self, me: int, parts: int) -> None:
        self._parts = parts
        self._turn = me
        self._anew = False
        self._asked: tuple[int, int, frozenset[int]] | None = None
        self._over = 0
        self._expected: dict[int, frozenset[int]] = {}
        self._served: Counter[int] = Counter()

    def due(self, paxos: Paxos, part_table: PartTable, attendance: Attendance, reachable: int) -> Send | None:
        """What to ask now, of one of the members in the bitmask `reachable`."""
        decision = paxos.decision
        if decision is None or part_table.is_whole(decision):
            return None
        stalled = attendance.level >= 1
        # While the leader was out of reach, means may have come over contributors that this member knew nothing of.
        unheard = attendance.returned >> paxos.leader & 1
        everything = paxos.must_fetch or stalled or self._anew or unheard
        wanted = part_table.missing_of(paxos.group.everyone if everything else attendance.lost, decision)
        if not wanted:
            return None
        sources = paxos.sources(decision, reachable, desperate=stalled)
        if attendance.level < 2:
            # A member that was out of reach may have let go of the mean meanwhile, as this one was out of its reach.
            sources = sources & ~attendance.returned or sources
        return self.ask(decision, wanted, list(members_of(sources)))

    def ask(self, decision: Decision, parts: frozenset[int], sources: list[int]) -> Send | None:
        """Ask one of `sources` for parts, unless one of them has been asked for these already."""
        if not parts or not sources:
            return None
        if self._asked is not None:
            source, contributors, asked = self._asked
            if contributors == decision.contributors and source in sources and parts <= asked:
                return None
        source = sources[self._turn % len(sources)]
        self._asked = (source, decision.contributors, parts)
        if self._over != decision.contributors:
            self._over, self._expected = decision.contributors, {}
        self._expected[source] = self._expected.get(source, frozenset()) | parts
        return Send(source, wire.Fetch(decision.contributors, wire.to_bits(parts)))

    def ask_another(self) -> None:
        """The source that was asked does not deliver: the next one is due."""
        self._asked = None
        self._turn += 1

    def start_again(self) -> None:
        """What came is of no use: the next source is due, and nobody asked before is expected to answer any more."""
        self.ask_another()
        self._anew = True
        self._expected = {}

    def expects(self, source: int, part: int, contributors: int) -> bool:
        """Whether `source` has been asked for this mean, be it slow, and another asked since."""
        return self._over == contributors and part in self._expected.get(source, ())

    def may_serve(self, member: int, parts: int) -> bool:
        """Whether `member` may have so many parts more."""
        self._served[member] += parts
        return self._served[member] <= MAX_SERVED * self._parts
