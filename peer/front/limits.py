"""Bounds on what other peers send, and on the memory and work that they cause. Times are seconds of one clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TypeVar

MAX_PEERS = 4096
"""Most peers with a bucket. The least recently seen is forgotten: its bucket has long been full again."""

MAX_HEADER_BYTES = 192 * 1024
"""Longest header of a frame, of one control message; the largest is a manifest of 64 signed joins, up to 160 KB."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Longest body of a frame, of one part: 1 Mi values in fp32."""

MAX_CREDENTIAL_BYTES = 1024
"""Longest credential: its owner's addresses, of which two take about 50 bytes, and long host names more."""

MAX_BANDWIDTH = 1e13
"""Highest bandwidth, in bytes per second: a hundred times today's fastest link. It bounds the harm of false claims."""

_K = TypeVar("_K")
_V = TypeVar("_V")


class LruDict(OrderedDict[_K, _V]):
    """Keeps the `limit` keys that were set last."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


def backoff(pause: float, first: float, most: float, growth: float = 2.0) -> float:
    """Return the pause after one more failure: `first`, then `growth` times the `pause` before, `most` at most."""
    return min(pause * growth or first, most)


class RateLimit:
    """Token buckets by peer: `rate` tokens come in a second, and a bucket holds `burst` of them."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: LruDict[str, tuple[float, float]] = LruDict(MAX_PEERS)

    def allow(self, peer: str, now: float) -> bool:
        """Take one token of `peer`; False if it has none."""
        tokens, since = self._buckets.get(peer, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        allowed = tokens >= 1
        self._buckets[peer] = (tokens - 1 if allowed else tokens, now)
        return allowed


class Allowance:
    """Admits `each` requests of a peer within `seconds`, and `count` requests of all peers together."""

    def __init__(self, seconds: float, count: int, each: int = 1) -> None:
        self._seconds = seconds
        self._count = count
        self._each = each
        self._since = float("-inf")
        self._left = count
        self._peers: Counter[str] = Counter()

    def admits(self, peer: str, now: float) -> bool:
        """Return whether a request of this peer is admitted now; if so, it counts."""
        if now - self._since >= self._seconds:
            self._since, self._left = now, self._count
            self._peers.clear()
        if self._peers[peer] >= self._each or not self._left:
            return False
        self._peers[peer] += 1
        self._left -= 1
        return True
