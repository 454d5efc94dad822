"""Bounds how often others can make a peer do costly work: each of them, and all together, within a time."""

from __future__ import annotations

from collections import Counter


class Allowance:
    """Admits a few requests of a peer, and a few in all, at a time. Times are the seconds of one monotonic clock."""

    def __init__(self, seconds: float, count: int, each: int = 1) -> None:
        """Admit `count` requests within `seconds`, and `each` of one peer."""
        self._seconds = seconds
        self._count = count
        self._each = each
        self._admitted = 0
        self._since = float("-inf")
        self._peers: Counter[str] = Counter()

    def admits(self, peer: str, now: float) -> bool:
        """Return whether a request of this peer is admitted now; if so, it counts."""
        if now - self._since >= self._seconds:
            self._since, self._admitted = now, 0
            self._peers.clear()
        if self._peers[peer] >= self._each or self._admitted >= self._count:
            return False
        self._peers[peer] += 1
        self._admitted += 1
        return True
