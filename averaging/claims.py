"""The weights that other peers claim to have accumulated towards the next round, as far as they count.

A record can claim anything: a claim of 1e12 samples would make every peer meet at once. So a claim counts up to twice
the peer's last contribution, which a signed manifest shows. The claim of a peer that has contributed nothing yet counts
up to its fair share of the target, until a round without it. A peer that claimed and did not come counts as 0 until it
contributes again.
"""

from __future__ import annotations

from collections.abc import Mapping

GROWTH = 2.0
"""Most that a claim counts, in multiples of the peer's last contribution: peers speed up by less between rounds."""

FULL = 0.95
"""Least share of its target with which a round does not count as short: peers meet a micro-batch early or late."""

MAX_NAMED = 3
"""Most peers that an event names."""


class Claims:
    """The claims of the others in one run."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._given: dict[str, float] = {}
        self._counted: dict[str, float] = {}
        self._target = float("inf")
        self._claimed: dict[str, float] = {}
        self._expected: dict[str, float] = {}
        self._due = float("inf")

    def count(self, claimed: Mapping[str, float], target: float | None) -> float:
        """Count the weight that the others claim to have accumulated.

        Args:
            claimed: PeerID -> weight, of the others that answer; 0 for peers that are at another round.
            target: Weight that all peers accumulate for a round; None if the run has no target, so that no fair share
                is known.

        Returns:
            The sum of the counted claims.
        """
        self._target = float("inf") if target is None else target
        share = self._target / (len(claimed) + 1)
        self._given = {peer: given for peer, given in self._given.items() if peer in claimed}
        most = {peer: GROWTH * self._given[peer] if peer in self._given else share for peer in claimed}
        self._counted = {peer: min(claim, most[peer]) for peer, claim in claimed.items()}
        return sum(self._counted.values())

    def begin(self) -> None:
        """Note what the round that begins now may expect of each peer: its counted claim or its last contribution."""
        self._claimed, self._due = self._counted, self._target
        self._expected = {
            peer: max(claim, self._given.get(peer, 0.0)) for peer, claim in self._claimed.items()
        }

    def settle(self, contributors: Mapping[str, float]) -> str:
        """Learn each peer's contribution from the round that `begin` began and that is over.

        Args:
            contributors: PeerID -> weight in the round.

        Returns:
            If the round fell short of its target, the peers that had claimed and gave less, one line; else empty.
        """
        self._given.update(contributors)
        absent = [peer for peer, claim in self._claimed.items() if claim and peer not in contributors]
        if len(self._claimed) >= self._group_size:
            # The peers that have contributed before may be in another group.
            absent = [peer for peer in absent if peer not in self._given]
        self._given.update(dict.fromkeys(absent, 0.0))
        total = sum(contributors.values())
        if self._due == float("inf") or total >= FULL * self._due:
            return ""
        owed = {peer: weight - contributors.get(peer, 0.0) for peer, weight in self._expected.items()}
        worst = sorted((peer for peer in owed if owed[peer] > 0), key=lambda peer: (-owed[peer], peer))
        named = [
            f"{peer} gave {contributors.get(peer, 0.0):g} where {self._expected[peer]:g} was counted on"
            for peer in worst[:MAX_NAMED]
        ]
        return f"{total:g} of {self._due:g} came together: {'; '.join(named)}" if named else ""
