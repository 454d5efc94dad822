"""Where a round stands and whom it waits for; and the same in words, for its notes and the reason if it times out."""

from __future__ import annotations

from equipoise.averaging.allreduce.agreement import Agreement
from equipoise.averaging.allreduce.attendance import Awaited
from equipoise.averaging.allreduce.ballot import members_of
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.allreduce.ledger import Ledger


def awaited(agreement: Agreement, ledger: Ledger) -> Awaited:
    """Whose contribution, mean, vote, report or decision this member waits for."""
    me, group, ballot, decision = 1 << agreement.me, agreement.group, agreement.ballot, agreement.decision
    if decision is not None and not ledger.is_whole(decision):
        missing = ledger.missing_of(group.everyone, decision)
        owners = {ledger.owner_of[part] for part in missing}
        return Awaited(sum(1 << owner for owner in owners) & ~me, ledger.owners & ~me, dispensable=True)
    if decision is not None:
        return Awaited(group.everyone & ~me & ~agreement.holders(decision), group.everyone & ~me)
    if lacking := group.contributors & ~ledger.whole():
        return Awaited(lacking, group.contributors & ~me, dispensable=True)
    if agreement.leader == agreement.me:
        reported = sum(1 << owner for owner in ballot.reports)
        return Awaited(ledger.owners & ~me & ~reported, ledger.owners & ~me)
    leader = 1 << agreement.leader
    return Awaited(leader, leader)


def names_of(group: Group, members: int) -> str:
    """The names of the members in a bitmask."""
    return ", ".join(group.names[member] for member in members_of(members)) or "nobody"


def phase_of(agreement: Agreement) -> str:
    """Where a round that has not ended stands: `scatter`, `decide`, `gather` or `commit`."""
    if agreement.held is not None:
        return "commit"
    if agreement.ballot.decision is not None:
        return "gather"
    return "decide" if agreement.ballot.reported else "scatter"


def waiting_for(agreement: Agreement, ledger: Ledger) -> str:
    """The phase, and what is missing for the next step from whom: `in phase gather; 2 parts ...`."""
    return f"in phase {phase_of(agreement)}; {_missing(agreement, ledger)}"


def _missing(agreement: Agreement, ledger: Ledger) -> str:
    group, ballot, decision = agreement.group, agreement.ballot, agreement.decision
    if decision is None and ballot.promises is not None:
        return f"promises came from {names_of(group, sum(1 << member for member in ballot.promises))}"
    if decision is None and ballot.reported is None:
        return f"contributions are missing from {names_of(group, group.contributors & ~ledger.whole())}"
    if decision is None:
        return f"no decision from {group.names[agreement.leader]}"
    missing = ledger.missing_of(group.everyone, decision)
    if missing:
        owners = sum(1 << owner for owner in {ledger.owner_of[part] for part in missing})
        return f"{len(missing)} parts of the mean are missing from {names_of(group, owners)}"
    return f"the mean is held by {names_of(group, agreement.holders(decision))}"
