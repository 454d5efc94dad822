"""How often what costs something is done for peers that ask: once each, and so many times in all, in a while."""

from __future__ import annotations


class Allowance:
    """Admits one request of a peer, and a few in all, at a time. Times are the seconds of one monotonic clock."""

    def __init__(self, seconds: float, count: int) -> None:
        """So many in so long a time."""
        self._seconds = seconds
        self._count = count
        self._since = float("-inf")
        self._peers: set[str] = set()

    def admits(self, peer: str, now: float) -> bool:
        """Whether to do it for this peer now; if so, it counts."""
        if now - self._since >= self._seconds:
            self._since, self._peers = now, set()
        if peer in self._peers or len(self._peers) >= self._count:
            return False
        self._peers.add(peer)
        return True
