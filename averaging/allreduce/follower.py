"""Every member's work in a ballot: it reports, fetches missing parts, and tells which members it waits for."""

from __future__ import annotations

from collections import Counter

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Group, Send
from equipoise.averaging.allreduce.failure_detector import Attendance, Awaited
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos, members_of

MAX_SERVED = 4
"""Most times that one member may fetch the whole mean from us: once per source that it may try, and some to spare."""


def due_report(paxos: Paxos, part_table: PartTable, attendance: Attendance) -> wire.Report | None:
    """The owner's report, once each contribution is whole or its sender is lost or late; None if it has been sent."""
    ballot, plan = paxos.ballot, paxos.ballot.plan
    if plan is None or ballot.decision is not None or not part_table.owners >> paxos.me & 1:
        return None
    whole = part_table.arrivals.whole
    awaits = paxos.group.contributors & ~(whole | attendance.lost | attendance.late)
    if awaits or ballot.reported == (plan.sequence, whole):
        return None
    ballot.reported = plan.sequence, whole
    return wire.Report(plan.ballot, plan.sequence, whole)


class Fetching:
    """The parts that this member has asked others for, and the parts that it may still serve them.

    Args:
        me: This member's index; different members start with different sources.
        parts: Number of parts of the vector.

    Attributes:
        doubts: How many times the whole mean that was here proved to be another than the group's.
    """

    def __init__(self, me: int, parts: int) -> None:
        self._parts = parts
        self._turn = me
        self.doubts = 0
        self._asked: tuple[int, int, frozenset[int]] | None = None
        self._over = 0
        self._expected: dict[int, frozenset[int]] = {}
        self._passed_over: dict[tuple[int, int], int] = {}
        self._served: Counter[int] = Counter()

    def due(self, paxos: Paxos, part_table: PartTable, attendance: Attendance, reachable: int) -> Send | None:
        """Return the next question to one of the members in the bitmask `reachable`, if one is due."""
        decision = paxos.decision
        if decision is None or part_table.means.is_whole(decision):
            return None
        stalled = attendance.level >= 1
        # A leader that was out of reach may have given this member up, and let go of the mean.
        unheard = attendance.returned >> paxos.leader & 1
        everything = paxos.must_fetch or stalled or self.doubts or unheard
        wanted = part_table.missing_of(paxos.group.everyone if everything else attendance.lost, decision)
        early = {
            part
            for (owner, part), over in self._passed_over.items()
            if over == decision.contributors and part_table.owner_of[part] == owner
        }
        if early:
            wanted |= early & part_table.missing_of(paxos.group.everyone, decision)
        if not wanted:
            return None
        sources = paxos.sources(decision, reachable, desperate=stalled)
        if attendance.level < 2:
            # A member that was out of reach may have given this member up, and let go of the mean.
            sources = sources & ~attendance.returned or sources
        return self._ask(decision, wanted, list(members_of(sources)))

    def _ask(self, decision: Decision, parts: frozenset[int], sources: list[int]) -> Send | None:
        if not sources:
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

    def pass_over(self, owner: int, part: int, contributors: int) -> None:
        """Note that a mean was refused: over other contributors than decided here, or not from the part's owner here.

        The mean of a part's next owner may overtake the leader's proposal, where the leader's channel broke or is
        slower. The owner sends it once, so this member fetches it when it hears of the decision.
        """
        self._passed_over[owner, part] = contributors

    def ask_another(self) -> None:
        """Turn to the next source, as the source that was asked does not deliver."""
        self._asked = None
        self._turn += 1

    def start_again(self) -> None:
        """Drop the answers of all sources so far, as their parts are of no use; turn to the next source."""
        self.ask_another()
        self.doubts += 1
        self._expected = {}

    def expects(self, source: int, part: int, contributors: int) -> bool:
        """True if `source` has been asked for this mean, even if another has been asked since."""
        return self._over == contributors and part in self._expected.get(source, ())

    def may_serve(self, member: int, parts: int) -> bool:
        """Count `parts` that `member` asks for; returns whether it may still have them."""
        self._served[member] += parts
        return self._served[member] <= MAX_SERVED * self._parts


def awaited(paxos: Paxos, part_table: PartTable) -> Awaited:
    """Return the members whose contribution, mean, vote, report or decision this member waits for."""
    me, group, ballot, decision = 1 << paxos.me, paxos.group, paxos.ballot, paxos.decision
    if decision is not None and not part_table.means.is_whole(decision):
        missing = part_table.missing_of(group.everyone, decision)
        owners = {part_table.owner_of[part] for part in missing}
        return Awaited(sum(1 << owner for owner in owners) & ~me, part_table.owners & ~me, dispensable=True)
    if decision is not None:
        return Awaited(group.everyone & ~me & ~paxos.holders(decision), group.everyone & ~me)
    if lacking := group.contributors & ~part_table.arrivals.whole:
        return Awaited(lacking, group.contributors & ~me, dispensable=True)
    if paxos.leader == paxos.me:
        reported = sum(1 << owner for owner in ballot.reports)
        return Awaited(part_table.owners & ~me & ~reported, part_table.owners & ~me)
    leader = 1 << paxos.leader
    return Awaited(leader, leader)


def names_of(group: Group, members: int) -> str:
    """The names of the members in a bitmask."""
    return ", ".join(group.names[member] for member in members_of(members)) or "nobody"


def phase_of(paxos: Paxos) -> str:
    """The phase of a round that has not ended: `scatter`, `decide`, `gather` or `commit`."""
    if paxos.held is not None:
        return "commit"
    if paxos.ballot.decision is not None:
        return "gather"
    return "decide" if paxos.ballot.reported else "scatter"


def waiting_for(paxos: Paxos, part_table: PartTable) -> str:
    """The phase, and the members on which the next step waits: `in phase gather; 2 parts ...`."""
    return f"in phase {phase_of(paxos)}; {_missing(paxos, part_table)}"


def _missing(paxos: Paxos, part_table: PartTable) -> str:
    group, ballot, decision = paxos.group, paxos.ballot, paxos.decision
    if decision is None and ballot.promises is not None:
        return f"promises came from {names_of(group, sum(1 << member for member in ballot.promises))}"
    if decision is None and ballot.reported is None:
        return f"contributions are missing from {names_of(group, group.contributors & ~part_table.arrivals.whole)}"
    if decision is None:
        return f"no decision from {group.names[paxos.leader]}"
    missing = part_table.missing_of(group.everyone, decision)
    if missing:
        owners = sum(1 << owner for owner in {part_table.owner_of[part] for part in missing})
        return f"{len(missing)} parts of the mean are missing from {names_of(group, owners)}"
    return f"the mean is held by {names_of(group, paxos.holders(decision))}"
