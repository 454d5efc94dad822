"""The bandwidth of this peer, learnt from its sending.

A member's share follows from its bandwidth (`balance`), so the estimate must be steady: the shares of equal members
should be equal. It is the upper quartile of the rates over windows in which something waited to be sent all the time
(in the others, receivers held it up; the very fastest owe their speed to buffers), averaged over recent bursts, old
ones counting half as much as the next. A rate above `FAST` counts as `FAST`: there the machines, not the wire, set the
pace, and measurements are noise.
"""

from __future__ import annotations

FAST = 250e6
"""Bytes per second (2 Gbit/s). Encoding, encrypting and reducing int8 values takes a core about as long."""

WINDOW_SECONDS = 0.1
"""Least time that a rate is taken over: what socket buffers and token buckets swallow at once is no rate."""

MIN_BYTES = 256 * 1024
"""Fewest bytes of a window that counts: with fewer it tells more of round trips than of bandwidth."""

MAX_WINDOWS = 1024
"""Most windows of one burst: more than a minute's, after which others tell nothing new."""

KEPT = 0.5
"""Weight of all earlier bursts against the newest: a link that slows down by half is known after three rounds."""


class Bandwidth:
    """An estimate from samples of a counter of delivered bytes.

    Attributes:
        estimate: Bytes per second, at most `FAST`; 0 if unknown.
    """

    def __init__(self) -> None:
        self.estimate = 0.0
        self._began: tuple[float, int] | None = None
        self._rates: list[float] = []

    def observe(self, now: float, delivered: int) -> None:
        """Something has been waiting to be sent since the last call, if there was one in this burst.

        Args:
            now: Monotonic seconds.
            delivered: Bytes delivered to all peers so far, ever.
        """
        if self._began is None:
            self._began = (now, delivered)
            return
        since, before = self._began
        seconds, count = now - since, delivered - before
        if seconds >= WINDOW_SECONDS:
            self._began = (now, delivered)
            if count >= MIN_BYTES and len(self._rates) < MAX_WINDOWS:
                self._rates.append(count / seconds)

    def end_burst(self, now: float, delivered: int) -> None:
        """Nothing waits any more."""
        if self._began is not None and not self._rates:
            # The whole burst was shorter than a window; that it was over so soon is what counts.
            since, before = self._began
            if delivered - before >= MIN_BYTES and now > since:
                self._rates.append((delivered - before) / (now - since))
        if self._rates:
            rate = sorted(self._rates)[len(self._rates) * 3 // 4]
            kept = KEPT if self.estimate else 0.0
            self.estimate = kept * self.estimate + (1 - kept) * min(rate, FAST)
        self._began = None
        self._rates.clear()
