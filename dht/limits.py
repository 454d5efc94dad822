"""How much one peer may ask for: a token bucket each."""

from __future__ import annotations

from collections import OrderedDict

CALLS_PER_SECOND = 100.0
"""A run-mate stores 10 records a second in each run and looks up every 2 s."""
BURST = 200.0
MAX_PEERS = 4096
"""The least recently seen is forgotten: its bucket was full again long before."""


class RateLimit:
    """Token buckets by peer."""

    def __init__(self, rate: float = CALLS_PER_SECOND, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allow(self, peer: str, now: float) -> bool:
        """Take one token of `peer` at `now` (seconds, monotonic); False if it has none."""
        tokens, since = self._buckets.get(peer, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        allowed = tokens >= 1
        self._buckets[peer] = (tokens - 1 if allowed else tokens, now)
        self._buckets.move_to_end(peer)
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        return allowed
