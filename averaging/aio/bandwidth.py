"""The bandwidth of this peer, learnt from its sending.

A member's share follows from its bandwidth (`balance`), so the estimate must be steady: the shares of equal members
should be equal. It is the upper quartile of the rates over windows in which something waited to be sent all the time
(in the others, receivers held it up; the very fastest owe their speed to buffers), averaged over recent bursts, old
ones counting half as much as the next. A window is as long as its bytes need, over several bursts on a slow link. The
first window of a burst counts only if it is the only one: a token bucket that has filled meanwhile passes it faster.

A burst lasts until the receivers have acknowledged it: the kernel may take all of it at once, and send it for seconds.
"""

from __future__ import annotations

SAMPLE_SECONDS = 0.05
"""Most time between two looks at what has been delivered."""

IDLE_BYTES = 16 * 1024
"""Most bytes on their way with which nothing is being sent: heartbeats and the like are always on their way."""

WINDOW_SECONDS = 0.1
"""Least time that a rate is taken over: what socket buffers and token buckets swallow at once is no rate."""

MIN_BYTES = 256 * 1024
"""Fewest bytes of a window: with fewer it tells more of round trips than of bandwidth. A link of 1 Mbit/s takes 2 s."""

MAX_WINDOWS = 1024
"""Most windows of one burst: more than a minute's, after which others tell nothing new."""

KEPT = 0.5
"""Weight of all earlier bursts against the newest: a link that slows down by half is known after three rounds."""


class Bandwidth:
    """An estimate from samples of a counter of delivered bytes.

    Attributes:
        estimate: Bytes per second; 0 if unknown.
    """

    def __init__(self) -> None:
        self.estimate = 0.0
        self._began: tuple[float, int] | None = None
        self._last = 0.0, 0
        self._window = 0.0, 0
        self._rates: list[float] = []

    def observe(self, now: float, delivered: int) -> None:
        """Something has been waiting or on its way since the last call, if there was one in this burst.

        Args:
            now: Monotonic seconds.
            delivered: Bytes delivered to all peers so far, ever.
        """
        (since, before), self._last = self._last, (now, delivered)
        if self._began is None:
            self._began = self._last
            return
        seconds, count = self._window[0] + now - since, self._window[1] + delivered - before
        self._window = seconds, count
        if seconds >= WINDOW_SECONDS and count >= MIN_BYTES:
            self._window = 0.0, 0
            if len(self._rates) < MAX_WINDOWS:
                self._rates.append(count / seconds)

    @property
    def sample_seconds(self) -> float:
        """Time until the next look: a tenth of what the burst has lasted, so that the end of a short one is known."""
        lasted = self._last[0] - self._began[0] if self._began else 0.0
        return min(max(lasted, SAMPLE_SECONDS) / 10, SAMPLE_SECONDS)

    def end_burst(self, now: float, delivered: int) -> None:
        """All has been delivered."""
        if self._began is not None and not self._rates:
            # Little was sent, or all of it soon. That it was over so soon is what counts then.
            since, before = self._began
            if delivered - before >= MIN_BYTES and now > since:
                self._window = 0.0, 0
                self._rates.append((delivered - before) / (now - since))
        if rates := sorted(self._rates[1:] or self._rates):
            kept = KEPT if self.estimate else 0.0
            self.estimate = kept * self.estimate + (1 - kept) * rates[len(rates) * 3 // 4]
        self._began = None
        self._rates.clear()
