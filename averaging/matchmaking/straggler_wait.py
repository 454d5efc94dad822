"""The time for which it is worth waiting for the last member: learnt from the lateness of peers."""

from __future__ import annotations

from collections import deque

WINDOW = 32
"""Most rounds remembered: long enough for a quantile, short enough to follow a swarm that changes."""

QUANTILE, FACTOR, MARGIN = 0.9, 1.25, 0.1
"""Share of the rounds in which the last peer is waited for, the factor on its lateness in them, and seconds beyond that
for the jitter of a network and of two busy cores. The tenth round goes on without it."""

FEW = 4
"""Fewest rounds from which the wait may fall below the initial one."""

INITIAL_WAIT = 3.0
"""Least wait, in seconds, until then: the first step of a training script (warm-up, compilation) is the most uneven."""

MIN_WAIT = 1.0
"""Least wait, in seconds: below it a hiccup of busy cores costs a member its round. It is spent only on a peer that is
alive and late: the dead are found out sooner."""

MAX_WAIT = 10.0
"""Longest wait, in seconds, and so all that a liar can teach. A peer that is later than this every time belongs in the
next round."""


class StragglerWait:
    """Seconds from the first ready to the last in past rounds, and the wait that follows from them."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """Note how late the last peer of a round was, in seconds after the first; clamped to 0 .. `MAX_WAIT`."""
        self._seen.append(min(max(seconds, 0.0), MAX_WAIT))

    @property
    def wait(self) -> float:
        """Seconds to wait beyond the first ready."""
        if not self._seen:
            return INITIAL_WAIT
        floor = INITIAL_WAIT if len(self._seen) < FEW else MIN_WAIT
        return min(max(self._usual() * FACTOR + MARGIN, floor), MAX_WAIT)

    @property
    def reason(self) -> str:
        """Why it is that long, one line."""
        if len(self._seen) < FEW:
            return f"{self.wait:.2f} s, with {len(self._seen)} rounds seen so far"
        return f"{self.wait:.2f} s: in {len(self._seen)} rounds the last was up to {self._usual():.2f} s late"

    def _usual(self) -> float:
        ordered = sorted(self._seen)
        return ordered[min(int(QUANTILE * len(ordered)), len(ordered) - 1)]
