"""What went wrong in a round: lines for people, and the members to blame."""

from __future__ import annotations

from collections import Counter

from equipoise.averaging.allreduce.paxos import members_of

MAX_NOTES = 64
"""Most lines kept on what went wrong in a round."""


class Findings:
    """What one member has found in a round.

    Attributes:
        notes: What went wrong, for people.
        faults: By member: what it is to blame for, one line.
        shares: By voter: digests of all members' shares of the mean, as the voter got them.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.faults: dict[int, str] = {}
        self.shares: dict[int, tuple[bytes, ...]] = {}

    def note(self, text: str) -> None:
        """Note a line, unless it is empty or there are `MAX_NOTES`."""
        if text and len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def blame(self, members: int, why: str) -> None:
        """Blame the members in the bitmask, each for the first of its faults."""
        for member in members_of(members):
            self.faults.setdefault(member, why)

    def blame_for_shares(self, owners: int) -> None:
        """Blame an owner in the bitmask if no majority of the voters got the same share from it."""
        for owner in members_of(owners):
            alike = Counter(shares[owner] for shares in self.shares.values()).most_common(1)
            if alike and 2 * alike[0][1] <= len(self.shares):
                self.blame(1 << owner, "gave members different means")
