"""The number of a peer's next round, and every rule by which it moves: in calm by one each round.

Peers choose the groups of a round by its number alone, so those that are to meet must have the same. Nobody agrees on
it: each peer follows the others as far as it believes them.
"""

from __future__ import annotations

from equipoise.averaging.manifest import MAX_ROUND, Manifest
from equipoise.averaging.matchmaking.membership import LEAP, MAX_JUMP, Membership


class NextRound:
    """The number of one peer's next round in one run.

    Attributes:
        number: The number.
        floor: Lowest number: one beyond the last round that formed with this peer.
    """

    def __init__(self, peer: str, membership: Membership, number: int = 0) -> None:
        self._peer = peer
        self._membership = membership
        self.number = number
        self.floor = 0

    def believed(self, now: float) -> int | None:
        """The others' round, limited to what this peer skips at a time; None if no other peer answers."""
        believed = self._membership.believed_round(now)
        if believed is None:
            return None
        # A peer that has had no round yet loses nothing by a jump.
        return min(believed, self.ceiling if self.floor else max(self.number + LEAP, MAX_JUMP))

    @property
    def ceiling(self) -> int:
        """The highest round to which the word of others leads this peer now.

        While a mate is in reach, all others together lead this peer at most `LEAP` beyond its last round, or to that
        mate: so honest mates stay in each other's reach, however many peers lie. If its mates are far away, this peer
        follows them by leaps.
        """
        near = self._membership.mates_near(self.number)
        return max(self.floor + LEAP, min(near)) if near else self.number + LEAP

    def within_reach(self, round: int, now: float) -> bool:
        """True if one peer's word is enough for a round of this number."""
        return round <= min(max(self.number, self.believed(now) or 0) + LEAP, MAX_ROUND - 1)

    def reach(self, number: int) -> None:
        """Go on to this number, if it is higher."""
        self.number = max(self.number, number)

    def advance(self, manifest: Manifest) -> None:
        """Note that this peer takes part in a round: its next round has a higher number."""
        # Peers that hold another state may go on without this one: their numbers are not its own.
        self._membership.shared(manifest.peers_of(manifest.states.get(self._peer)))
        self.floor = manifest.round + 1
        self.reach(self.floor)

    def come_back(self, now: float) -> None:
        """Return from a round without other peers, into which a lie may have led this peer, but not to a past round."""
        believed = self.believed(now)
        if believed is not None and believed <= self.number - 2:
            self.number = max(self.floor, believed)

    def follow_mates(self, now: float) -> None:
        """Go on to the round of the mates, if one of this peer's group has had the round with others.

        That mate cannot come back, and the rest of its group follows. Otherwise peers that are a round apart stay so,
        because each call brings all of them one round on.
        """
        self.number = self._membership.outrun(self.number, self.ceiling, now)

    def follow_highest(self, now: float) -> None:
        """Go on to the highest round in reach: a peer that has had it cannot come back."""
        self.reach(self._membership.highest_round(self.ceiling, now) or 0)

    def follow(self, now: float, *, alone: bool) -> None:
        """Go on to the round in which the others are; `alone` if this peer has found no group for a while."""
        membership, believed = self._membership, self.believed(now)
        if alone and believed is not None and believed < self.floor and not membership.has_mates:
            # The others may never reach this peer's number: it begins as a newcomer.
            self.number, self.floor = believed, 0
        # A peer with a mate in reach asks for its next round first: a refusal tells it the true number.
        asks = not alone and any(mate <= self.number for mate in membership.mates_near(self.number))
        if believed is not None and believed >= self.number + 2 and not asks:
            self.number = believed
        elif alone:
            self.follow_highest(now)
