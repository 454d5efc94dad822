"""The weights that other peers claim to have accumulated towards the next round, as far as they count.

A record is anybody's word: one that claims 1e12 samples would have every peer meet with what it has. So a claim counts
up to twice what its peer contributed last, which a manifest says, signed; of a peer that has contributed nothing yet,
up to its fair share of the target. A peer that claimed and did not come has contributed 0: it counts again once it
gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

GROWTH = 2.0
"""Most that a claim counts, in what its peer contributed last: from round to round peers speed up by less."""

FULL = 0.95
"""Least share of its target for which a round is not a short one: peers meet a micro-batch early or late."""

MAX_NAMED = 3
"""Most peers that an event names."""


class Claims:
    """The claims of the others in one run."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._given: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._target = float("inf")

    def count(self, claimed: Mapping[str, float], target: float | None) -> float:
        """Count what the others have accumulated, as they say.

        Args:
            claimed: PeerID -> weight, of the others that answer; 0 for those that are at another round.
            target: Weight that all peers accumulate for a round; None if the run has no target and nothing tells a fair
                share.

        Returns:
            The sum of what counts.
        """
        self._target = float("inf") if target is None else target
        share = self._target / (len(claimed) + 1)
        self._given = {peer: given for peer, given in self._given.items() if peer in claimed}
        most = {peer: GROWTH * self._given[peer] if peer in self._given else share for peer in claimed}
        self._counted = {peer: min(claim, most[peer]) for peer, claim in claimed.items()}
        return sum(self._counted.values())

    @property
    def promised(self) -> Promised:
        """The claims that counted when they were last asked for; to be taken when a round is begun."""
        return Promised(dict(self._counted), dict(self._given), self._target)

    def settle(self, promised: Promised, contributors: Mapping[str, float]) -> str:
        """Take from a round that is over what each has contributed.

        Args:
            promised: What counted when the round was begun.
            contributors: PeerID -> weight in the round.

        Returns:
            If the round fell short of its target, the peers that had claimed and did not give, one line; else empty.
        """
        self._given.update(contributors)
        if len(promised.counted) < self._group_size:  # Else it may have contributed in another group.
            absent = (peer for peer, claim in promised.counted.items() if claim and peer not in contributors)
            self._given.update(dict.fromkeys(absent, 0.0))
        total = sum(contributors.values())
        if promised.target == float("inf") or total >= FULL * promised.target:
            return ""
        owed = {peer: promised.of(peer) - contributors.get(peer, 0.0) for peer in promised.counted}
        worst = sorted((peer for peer in owed if owed[peer] > 0), key=lambda peer: (-owed[peer], peer))
        named = [
            f"{peer} gave {contributors.get(peer, 0.0):g} where {promised.of(peer):g} was counted on"
            for peer in worst[:MAX_NAMED]
        ]
        return f"{total:g} of {promised.target:g} came together: {'; '.join(named)}" if named else ""


class Promised(msgspec.Struct, frozen=True):
    """The claims that counted when a round was begun.

    Attributes:
        counted: PeerID -> what of its claim counted.
        given: PeerID -> what it had contributed last, where that is known.
        target: Weight that all together were to accumulate.
    """

    counted: dict[str, float]
    given: dict[str, float]
    target: float

    def of(self, peer: str) -> float:
        """The weight expected of a peer: its claim, or as much as before, by which shares are dealt."""
        return max(self.counted.get(peer, 0.0), self.given.get(peer, 0.0))
