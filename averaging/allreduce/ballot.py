"""The agreement at the heart of a round: Paxos acceptors and votes, as plain values.

A round decides once (Lamport, "Paxos Made Simple", 2001, section 2). The value is a `Decision`; a member *accepts* it
by holding the whole mean over its contributors, so that whatever a majority accepted can be fetched from any of them.
A ballot belongs to one leader: ballot b to member b mod n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from equipoise.averaging.allreduce.messages import Decision, Promise


def members_of(mask: int) -> Iterator[int]:
    """The member indices in a bitmask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Vote(msgspec.Struct, frozen=True):
    """One member's word that it holds the mean of `decision`, proposed in `ballot`, with this digest."""

    ballot: int
    decision: Decision
    digest: bytes


MAX_VOTES_PER_MEMBER = 64
"""Most different votes taken from one member: it casts one per ballot, and few rounds have a third."""


class Tally:
    """Counts votes until a majority of the group has cast the same one.

    Attributes:
        chosen: The vote that a majority cast, once there is one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.chosen: Vote | None = None
        self._voters: dict[Vote, int] = {}
        self._told: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._voters)

    def add(self, vote: Vote, voters: int, teller: int) -> bool:
        """Count the votes of the members in the bitmask `voters`, of which `teller` told.

        Returns:
            Whether there were new ones. A repeated one changes nothing, nor does one too many.
        """
        before = self._voters.get(vote, 0)
        if not voters & ~before:
            return False
        if not before:
            if self._told[teller] >= MAX_VOTES_PER_MEMBER:
                return False
            self._told[teller] += 1
        self._voters[vote] = before | voters
        if self.chosen is None and is_majority(self._voters[vote], self.size):
            self.chosen = vote
        return True

    def voters(self, vote: Vote) -> int:
        """Bitmask of those who cast `vote`."""
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
    """Whether more than half of a group of `size` is in the bitmask."""
    return 2 * mask.bit_count() > size


def next_ballot(after: int, member: int, size: int) -> int:
    """The lowest ballot above `after` that belongs to `member`."""
    ballot = after - after % size + member
    return ballot if ballot > after else ballot + size


class Inheritance(NamedTuple):
    """What earlier ballots leave to a new one.

    Attributes:
        decision: The one held in the highest ballot among the promises, if any: its mean exists.
        holders: Bitmask of those that promised and hold it.
        binding: Whether it may have been chosen, so that nothing else may be proposed. If those who hold it and those
            who have not been heard are no majority together, it was not, and as the others have promised, never will.
    """

    decision: Decision | None = None
    holders: int = 0
    binding: bool = False


def inherited(promises: dict[int, Promise], size: int) -> Inheritance:
    """What a new ballot of a group of `size` inherits, given promises of a majority."""
    held = [promise for promise in promises.values() if promise.held is not None]
    if not held:
        return Inheritance()
    decision = max(held, key=lambda promise: promise.held_ballot or 0).held
    holders = sum(1 << member for member, promise in promises.items() if promise.held == decision)
    unheard = size - len(promises)
    return Inheritance(decision, holders, 2 * (holders.bit_count() + unheard) > size)
