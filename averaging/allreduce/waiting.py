"""Where a round stands and whom it waits for; and the same in words, for its notes and the reason if it times out."""

from __future__ import annotations

from equipoise.averaging.allreduce.attendance import Awaited
from equipoise.averaging.allreduce.ballot import members_of
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.allreduce.part_table import PartTable
from equipoise.averaging.allreduce.paxos import Paxos


def awaited(paxos: Paxos, part_table: PartTable) -> Awaited:
    """Whose contribution, mean, vote, report or decision this member waits for."""
    me, group, ballot, decision = 1 << paxos.me, paxos.group, paxos.ballot, paxos.decision
    if decision is not None and not part_table.is_whole(decision):
        missing = part_table.missing_of(group.everyone, decision)
        owners = {part_table.owner_of[part] for part in missing}
        return Awaited(sum(1 << owner for owner in owners) & ~me, part_table.owners & ~me, dispensable=True)
    if decision is not None:
        return Awaited(group.everyone & ~me & ~paxos.holders(decision), group.everyone & ~me)
    if lacking := group.contributors & ~part_table.whole():
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
    """Where a round that has not ended stands: `scatter`, `decide`, `gather` or `commit`."""
    if paxos.held is not None:
        return "commit"
    if paxos.ballot.decision is not None:
        return "gather"
    return "decide" if paxos.ballot.reported else "scatter"


def waiting_for(paxos: Paxos, part_table: PartTable) -> str:
    """The phase, and what is missing for the next step from whom: `in phase gather; 2 parts ...`."""
    return f"in phase {phase_of(paxos)}; {_missing(paxos, part_table)}"


def _missing(paxos: Paxos, part_table: PartTable) -> str:
    group, ballot, decision = paxos.group, paxos.ballot, paxos.decision
    if decision is None and ballot.promises is not None:
        return f"promises came from {names_of(group, sum(1 << member for member in ballot.promises))}"
    if decision is None and ballot.reported is None:
        return f"contributions are missing from {names_of(group, group.contributors & ~part_table.whole())}"
    if decision is None:
        return f"no decision from {group.names[paxos.leader]}"
    missing = part_table.missing_of(group.everyone, decision)
    if missing:
        owners = sum(1 << owner for owner in {part_table.owner_of[part] for part in missing})
        return f"{len(missing)} parts of the mean are missing from {names_of(group, owners)}"
    return f"the mean is held by {names_of(group, paxos.holders(decision))}"
