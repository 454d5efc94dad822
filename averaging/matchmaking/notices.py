"""How many groups of others are looked at: each has up to 64 signatures, and anybody in the run can send one."""

from __future__ import annotations

NOTICE_SECONDS = 1.0
"""A convener sends one notice for each round that went on without a peer; one a second says all there is to learn."""

MAX_NOTICES = 4
"""In so long a time, of all peers: a twentieth of a core. Whoever misses a notice learns from the directory."""


class Notices:
    """Admits one notice of a peer, and a few in all, at a time. Times are the seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._peers: set[str] = set()

    def admits(self, peer: str, now: float) -> bool:
        """Whether a notice of this peer is to be verified now."""
        if now - self._since >= NOTICE_SECONDS:
            self._since, self._peers = now, set()
        if peer in self._peers or len(self._peers) >= MAX_NOTICES:
            return False
        self._peers.add(peer)
        return True
