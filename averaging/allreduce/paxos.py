"""The agreement at the heart of a round: one instance of Paxos over its `Decision`.

(Lamport, "Paxos Made Simple", 2001, section 2.) A member *accepts* a decision by holding the whole mean over its
contributors, so a mean that a majority accepted can be fetched from any of them. Each ballot belongs to one leader:
ballot b to member b mod n. A `Ballot` keeps the leader's plan and the answers to it, for that ballot only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import NamedTuple

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.allreduce.messages import Decision, Promise, Vote

MAX_BALLOT_LEAP = 64 * 1024
"""Most ballots that one message may skip. Members of a sound group open one ballot per stall. Without this bound, one
message could use up all the ballot numbers that a message can carry."""

PATIENT_STALLS = 3
"""Stalls after which the first member in line no longer trusts a leader that is not known to be lost."""

MAX_RETRY_STALLS = 8
"""Most stalls between two attempts of a member to lead. The slowest round trip to expect is 16 s."""


def members_of(mask: int) -> Iterator[int]:
    """The member indices in a bitmask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Tally:
    """Counts votes until a majority of the group has cast the same vote. `vote_signatures` bounds their number.

    Attributes:
        chosen: The vote that a majority cast, once there is one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.chosen: Vote | None = None
        self._voters: dict[Vote, int] = {}

    def add(self, vote: Vote, voters: int) -> bool:
        """Count the votes of the members in the bitmask `voters`; returns whether there were new ones."""
        before = self._voters.get(vote, 0)
        if not voters & ~before:
            return False
        self._voters[vote] = before | voters
        if self.chosen is None and is_majority(self._voters[vote], self.size):
            self.chosen = vote
        return True

    @property
    def split(self) -> bool:
        """True if no digest can come to a majority: the members have held different means since their first votes."""
        held: dict[bytes, int] = {}
        for vote, voters in self._voters.items():
            held[vote.digest] = held.get(vote.digest, 0) | voters
        heard = reduce(or_, held.values(), 0).bit_count()  # A member may vote for several.
        most = max((mask.bit_count() for mask in held.values()), default=0)
        return self.chosen is None and 2 * (most + self.size - heard) <= self.size

    def voters(self, vote: Vote) -> int:
        """Bitmask of the members that cast `vote`."""
        return self._voters.get(vote, 0)

    def holders(self, decision: Decision) -> int:
        """Bitmask of the members that said, in any ballot, that they hold the mean over these contributors.

        Once a majority has cast a vote, only votes for its digest count: a member that was sent another mean lacks it.
        """
        mask = 0
        for vote, voters in self._voters.items():
            alike = self.chosen is None or vote.digest == self.chosen.digest
            if alike and vote.decision.contributors == decision.contributors:
                mask |= voters
        return mask


def is_majority(mask: int, size: int) -> bool:
    """True if more than half of a group of `size` is in the bitmask."""
    return 2 * mask.bit_count() > size


def next_ballot(after: int, member: int, size: int) -> int:
    """The lowest ballot above `after` that belongs to `member`."""
    ballot = after - after % size + member
    return ballot if ballot > after else ballot + size


class Inheritance(NamedTuple):
    """The legacy of earlier ballots to a new one.

    Attributes:
        decision: The decision that a promise holds from the highest ballot, if any: its mean exists.
        holders: Bitmask of the members that promised and hold it.
        binding: Whether it may have been chosen, so that nothing else may be proposed. If its holders and the members
            not heard yet are no majority together, it was not chosen. The others have promised, so it never will be.
    """

    decision: Decision | None = None
    holders: int = 0
    binding: bool = False


def inherited(promises: dict[int, Promise], size: int) -> Inheritance:
    """Return the legacy to a new ballot of a group of `size`, given promises of a majority."""
    held = [promise for promise in promises.values() if promise.held is not None]
    if not held:
        return Inheritance()
    decision = max(held, key=lambda promise: promise.held_ballot or 0).held
    holders = sum(1 << member for member, promise in promises.items() if promise.held == decision)
    unheard = size - len(promises)
    return Inheritance(decision, holders, 2 * (holders.bit_count() + unheard) > size)


@dataclass(slots=True)
class Ballot:
    """A member's knowledge of the ballot that it has promised.

    Attributes:
        number: The ballot.
        plan: The latest plan of the owners that reduce.
        decision: The decision that the leader proposed.
        holders: Bitmask of the members that held the decision's mean already when it was proposed.
        promises: As leader: the promises received, by member, until they are enough.
        reports: As leader: bitmask of the contributors that each owner holds whole under the plan.
        reported: As owner: the (plan sequence, whole) last reported.
    """

    number: int
    plan: wire.Plan | None = None
    decision: Decision | None = None
    holders: int = 0
    promises: dict[int, Promise] | None = None
    reports: dict[int, int] = field(default_factory=dict)
    reported: tuple[int, int] | None = None


class Paxos:
    """One member's part in the paxos: its promise, the decision that it holds, and the votes that it knows.

    Attributes:
        ballot: The ballot that this member has promised.
        held: The last decision that this member accepted, with its ballot in front.
        tally: The votes that this member knows.
        decision: The chosen decision, else the decision that the ballot's leader proposed.
        valued: The decision whose mean must be kept: `decision`, else the held one until another is proposed.
    """

    def __init__(self, group: Group, me: int) -> None:
        self.group = group
        self.me = me
        self.ballot = Ballot(group.first_leader)
        self.held: tuple[int, Decision] | None = None
        self.tally = Tally(group.size)
        self.decision: Decision | None = None
        self.valued: Decision | None = None
        self._refused = 0
        self._attempts = 0
        self._patience = 0

    @property
    def leader(self) -> int:
        """The leader of the ballot that this member has promised."""
        return self.leader_of(self.ballot.number)

    @property
    def opening(self) -> bool:
        """True while this member has opened the ballot, and no majority has promised it yet."""
        return self.ballot.promises is not None

    @property
    def must_fetch(self) -> bool:
        """True if the mean is not on its way: others hold it already, or another mean was proposed here."""
        proposed, decision = self.ballot.decision, self.decision
        if proposed is None or decision is None:
            return decision is not None
        return bool(self.ballot.holders) or proposed.contributors != decision.contributors

    @property
    def step(self) -> tuple[int, int, bool]:
        """Identifies the step of the round: scattering under a plan, or gathering a decided mean."""
        ballot = self.ballot
        sequence = -1 if ballot.plan is None else ballot.plan.sequence
        return ballot.number, sequence, self.decision is not None

    def leader_of(self, ballot: int) -> int:
        """The leader of a ballot."""
        return ballot % self.group.size

    def line(self, lost: int) -> list[int]:
        """The members that may lead and are not in the bitmask `lost`, in their order of succession."""
        size, first = self.group.size, self.group.first_leader
        ring = ((first + step) % size for step in range(size))
        return [member for member in ring if self.group.dialable & ~lost & 1 << member]

    def holders(self, decision: Decision) -> int:
        """Bitmask of the members known to hold the mean over the decision's contributors.

        The leader's list of holders counts until a majority's votes are known.
        """
        told = self.ballot.holders if self.tally.chosen is None else 0
        return self.tally.holders(decision) | told

    def sources(self, decision: Decision, reachable: int, desperate: bool) -> int:
        """Bitmask of the `reachable` members to fetch the mean from: voters of the chosen mean, else other holders.

        Any member may have some parts of the mean: a `desperate` member asks all when it knows no holder.
        """
        chosen = self.tally.chosen
        same = self.tally.voters(chosen) if chosen is not None else 0
        return same & reachable or self.holders(decision) & reachable or (reachable if desperate else 0)

    def open(self) -> wire.Prepare:
        """Open a ballot of our own."""
        self.adopt(next_ballot(self.ballot.number, self.me, self.group.size))
        self._attempts += 1
        self._patience = min(self._attempts, MAX_RETRY_STALLS)
        self.ballot.promises = {self.me: self.promise()}
        return wire.Prepare(self.ballot.number)

    def adopt(self, ballot: int) -> None:
        """Promise to take part in no ballot below this one."""
        if self.ballot.number < ballot <= self.ballot.number + MAX_BALLOT_LEAP:
            self.ballot = Ballot(ballot)
            self._settle()

    def should_open(self, stalls: int, place: int) -> bool:
        """True if this member should open a ballot now; asked once at each stall.

        Each attempt waits for one stall more than the attempt before. If answers take longer than a stall, a new
        ballot would come before them and void all promises.

        Args:
            stalls: Number of stalls since the last progress.
            place: This member's place in line.
        """
        if not self.opening:
            return stalls >= PATIENT_STALLS + place
        self._patience -= 1
        return self._patience <= 0

    def on_prepare(self, ballot: int, trust_leader: bool) -> Promise | wire.Refuse:
        """Answer another's attempt to lead, which is refused while the present leader is trusted."""
        before = self.ballot.number
        if not trust_leader:
            self.adopt(ballot)
        elif ballot <= before + MAX_BALLOT_LEAP:
            self._refused = max(self._refused, ballot)
        return self.promise() if self.ballot.number > before else wire.Refuse(before)

    def refused(self, lost: int) -> int | None:
        """The refused ballot to promise now that our leader is lost: its leader had noticed the loss before us."""
        is_open = self._refused > self.ballot.number and not lost >> self.leader_of(self._refused) & 1
        return self._refused if is_open else None

    def on_refuse(self, sender: int, ballot: int) -> bool:
        """Catch up with a higher ballot while this member opens one, or after its leader; returns whether it did."""
        before = self.ballot.number
        if self.opening or sender == self.leader:
            self.adopt(ballot)
        return self.ballot.number > before

    def on_promise(self, sender: int, promise: Promise) -> bool:
        """Count a promise; returns whether this member waits for it."""
        promises = self.ballot.promises
        if promises is None or promise.ballot != self.ballot.number or not self.valid(promise.held):
            return False
        promises[sender] = promise
        return True

    def prepared(self, unreliable: int, hoped_for: int) -> Inheritance | None:
        """As leader, once a majority has promised: return the legacy to the ballot.

        Args:
            unreliable: Bitmask of the members from which a mean should not be fetched.
            hoped_for: Bitmask of the members whose promises are worth waiting for. Their promises may show that a
                decision held only by unreliable members was not chosen.
        """
        promises = self.ballot.promises
        promised = sum(1 << member for member in promises or ())
        if promises is None or not is_majority(promised, self.group.size):
            return None
        found = inherited(promises, self.group.size)
        if found.binding and not found.holders & ~unreliable and hoped_for & ~promised:
            return None
        self.ballot.promises = None
        return found

    def on_plan(self, sender: int, plan: wire.Plan) -> bool:
        """Take in a leader's plan of the owners; returns whether it is news."""
        if self.leader_of(plan.ballot) != sender or not plan.owners or plan.owners & ~self.group.dialable:
            return False
        self.adopt(plan.ballot)
        ballot = self.ballot
        if plan.ballot != ballot.number or ballot.decision is not None:
            return False
        if ballot.plan is not None and plan.sequence <= ballot.plan.sequence:
            return False
        ballot.plan, ballot.reports = plan, {}
        return True

    def on_report(self, sender: int, report: wire.Report) -> bool:
        """As leader, take in an owner's report; returns whether it belongs to this plan."""
        plan = self.ballot.plan
        if plan is None or (report.ballot, report.sequence) != (plan.ballot, plan.sequence):
            return False
        # An owner keeps every contribution that it holds, so an older report that comes late takes nothing away.
        before = self.ballot.reports.get(sender, 0)
        self.ballot.reports[sender] = before | report.whole & self.group.contributors
        return True

    def on_propose(self, sender: int, message: wire.Propose) -> bool:
        """Take in a leader's decision; returns whether that is news."""
        if self.leader_of(message.ballot) != sender or not self.valid(message.decision):
            return False
        self.adopt(message.ballot)
        ballot = self.ballot
        if message.ballot != ballot.number or ballot.decision is not None:
            return False
        ballot.decision = message.decision
        if self.held is not None and self.held[1].contributors != message.decision.contributors:
            # Another decision was proposed in a later ballot, so ours was never chosen: we may let go of it.
            self.held = None
        ballot.holders = message.holders & self.group.everyone
        self._settle()
        return True

    def on_votes(self, vote: Vote, voters: int) -> bool:
        """Count votes; returns whether there were new ones."""
        news = self.valid(vote.decision) and self.tally.add(vote, voters & self.group.everyone)
        self._settle()
        return news

    def hold(self) -> bool:
        """Accept the ballot's decision, whose mean is whole here; returns whether that is news."""
        assert self.ballot.decision is not None
        accepted = (self.ballot.number, self.ballot.decision)
        news = self.held != accepted
        self.held = accepted
        self._settle()
        return news

    def vote(self, digest: bytes) -> wire.Votes:
        """Count our own vote for the mean that we hold; return it as a message."""
        assert self.held is not None
        vote = Vote(*self.held, digest)
        self.tally.add(vote, 1 << self.me)
        self._settle()
        return wire.Votes(vote, 1 << self.me)

    def concur(self) -> wire.Votes | None:
        """Count our own vote for the chosen mean, which is whole here; returns it unless it was sent before."""
        chosen = self.tally.chosen
        assert chosen is not None
        return wire.Votes(chosen, 1 << self.me) if self.tally.add(chosen, 1 << self.me) else None

    def commit(self) -> wire.Votes | None:
        """The message that tells others that a decision was chosen."""
        chosen = self.tally.chosen
        return None if chosen is None else wire.Votes(chosen, self.tally.voters(chosen))

    def valid(self, decision: Decision | None) -> bool:
        """True if an honest leader of this group could propose this decision."""
        return decision is None or (
            not decision.contributors & ~self.group.contributors
            and decision.contributors.bit_count() >= self.group.quorum
            and bool(decision.owners)
            and not decision.owners & ~self.group.dialable
        )

    def promise(self) -> Promise:
        """This member's promise of its ballot, with the decision that it holds."""
        held_ballot, held = self.held or (None, None)
        return Promise(self.ballot.number, held_ballot, held)

    def _settle(self) -> None:
        """Derive `decision` and `valued` again: the ballot, the held decision or the votes may have changed."""
        chosen, held = self.tally.chosen, self.held
        self.decision = self.ballot.decision if chosen is None else chosen.decision
        self.valued = held[1] if self.decision is None and held is not None else self.decision
