"""How much one peer may ask for: a token bucket each; and whose records are looked at."""

from __future__ import annotations

from collections import OrderedDict

CALLS_PER_SECOND = 100.0
"""A run-mate stores 10 records a second in each run and looks up every 2 s."""
BURST = 200.0
SIGNATURES_PER_SECOND = 100.0
SIGNATURES_BURST = 300.0
"""Records of one sender whose signatures are verified, 0.15 ms each; a run-mate sends 10 a second in each run."""
HEARSAY_PER_SECOND = 100.0
HEARSAY_BURST = 600.0
"""The same of all senders together, for records of others than the sender. What a peer says of itself is not among
them: strangers that pass on what they like must not keep it from being heard."""
DISTRUST_SECONDS = 60.0
"""How long nothing is taken from a peer that has sent a forged record."""
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


class Scrutiny:
    """Whose records are looked at, before a signature is verified. Times are seconds of one monotonic clock.

    Every daemon verifies a record before it keeps it or passes it on. So a peer that sends one with a false signature
    has forged it, and one signature is what that costs this peer.
    """

    def __init__(self) -> None:
        self._senders = RateLimit(SIGNATURES_PER_SECOND, SIGNATURES_BURST)
        self._hearsay = RateLimit(HEARSAY_PER_SECOND, HEARSAY_BURST)
        self._distrusted: OrderedDict[str, float] = OrderedDict()

    def admits(self, sender: str, author: str, now: float) -> bool:
        """Whether to verify a record of `author` that `sender` has sent."""
        if self.distrusts(sender, now) or not self._senders.allow(sender, now):
            return False
        return sender == author or self._hearsay.allow("", now)

    def distrust(self, sender: str, now: float) -> None:
        """Note that `sender` has sent a forged record."""
        self._distrusted[sender] = now + DISTRUST_SECONDS
        self._distrusted.move_to_end(sender)
        if len(self._distrusted) > MAX_PEERS:
            self._distrusted.popitem(last=False)

    def distrusts(self, sender: str, now: float) -> bool:
        """Whether nothing is taken from `sender` for now."""
        return now < self._distrusted.get(sender, float("-inf"))
