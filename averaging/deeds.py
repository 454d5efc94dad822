"""A memory of deeds: which peers were lost by their own fault in rounds, why, and for how long that counts.

A peer that this one blames is asked last for an exchange. Each join names the peers that its signer blames. A member
that more than half of a group name owns and leads nothing in its round, coordinates nothing for a while, and still
contributes: a slow peer loses no round by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from equipoise.averaging.manifest import MAX_SUSPECTS, Join
from equipoise.limits import LruDict

FIRST_SECONDS, MOST_SECONDS = 60.0, 3600.0
"""Shortest and longest time for which a fault counts: twice as long after each. The longest time after its end, it is
forgotten."""

MAX_PEERS = 256
"""Most peers remembered."""


class _Fault(NamedTuple):
    seconds: float
    until: float
    why: str


class Deeds:
    """One peer's memory of the others in a run. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.now = float("-inf")
        self._faults: LruDict[str, _Fault] = LruDict(MAX_PEERS)

    def blame(self, peer: str, why: str) -> float:
        """Note a fault; return for how many seconds it counts."""
        before = self._faults.get(peer)
        again = before is not None and self.now < before.until + MOST_SECONDS
        seconds = min(2 * before.seconds, MOST_SECONDS) if before and again else FIRST_SECONDS
        self._faults[peer] = _Fault(seconds, self.now + seconds, why)
        return seconds

    def absolve(self, peer: str) -> None:
        """Forget all faults of a peer."""
        self._faults.pop(peer, None)

    def blames(self, peer: str) -> bool:
        """True if a fault of the peer counts now."""
        return peer in self._faults and self.now < self._faults[peer].until

    @property
    def suspects(self) -> tuple[str, ...]:
        """The peers that this one blames now, the latest first; as many as a join names."""
        return tuple(peer for peer in reversed(self._faults) if self.blames(peer))[:MAX_SUSPECTS]

    def told(self, peer: str) -> str:
        """What a peer did and for how long that counts, one line; empty if it is not blamed."""
        fault = self._faults.get(peer)
        if fault is None or not self.blames(peer):
            return ""
        return f"comes last for {fault.until - self.now:.0f} s: {fault.why}"


def suspected(joins: Sequence[Join]) -> frozenset[str]:
    """The members that more than half of a group name."""
    named = Counter(peer for join in joins for peer in set(join.suspects))
    return frozenset(peer for peer, count in named.items() if 2 * count > len(joins))
