"""The swarm's clock: this machine's clock plus the median of its peers' clock offsets, its own offset 0 included."""

from __future__ import annotations

import statistics
import time

from humanfriendly import format_timespan

from equipoise.dht.limits import LruDict

MAX_SAMPLES = 64
"""Most peers whose clocks are remembered: a few liars do not move a median of so many."""
MAX_OFFSET_SECONDS = 86_400.0
"""Largest offset of the swarm's clock from this machine's clock. Machines whose clocks are off by a day can take part,
and no number of liars moves this peer's idea of the time by more."""
FRESH_SECONDS = 600.0
"""Longest time for which a sample of a peer's clock counts: either clock may be set meanwhile."""
WARN_SECONDS = 10.0
"""Largest difference without a warning: a busy machine answers that late."""


class SwarmClock:
    """Time that peers roughly agree on, so that a machine whose clock is off can take part."""

    def __init__(self) -> None:
        self._samples: LruDict[str, tuple[float, float]] = LruDict(MAX_SAMPLES)

    def learn(self, peer: str, theirs: float, asked: float, answered: float) -> None:
        """Take the clock that `peer` sent between two readings of ours, all in seconds since 1970."""
        self._samples[peer] = theirs - (asked + answered) / 2, time.monotonic()

    @property
    def offset(self) -> float:
        """Seconds to add to this machine's clock, `MAX_OFFSET_SECONDS` at most either way."""
        median = statistics.median([0.0, *self._others()])
        return max(-MAX_OFFSET_SECONDS, min(median, MAX_OFFSET_SECONDS))

    @property
    def warning(self) -> str:
        """The difference of this machine's clock from most others', and what to do; empty if it is small.

        Two peers alone cannot tell whose clock is right, so both warn.
        """
        others = self._others()
        ahead = statistics.median(others) if others else 0.0
        if abs(ahead) <= WARN_SECONDS or abs(statistics.median([0.0, *others])) <= WARN_SECONDS / 2:
            return ""
        amount = format_timespan(round(abs(ahead), -1), max_units=2)
        whose = "that of the other peer" if len(others) == 1 else "those of most other peers"
        differs = f"this machine's clock is {amount} {'behind' if ahead > 0 else 'ahead of'} {whose}"
        effect = (
            "rounds work all the same"
            if abs(ahead) <= MAX_OFFSET_SECONDS + WARN_SECONDS
            else "above a day others refuse its records, and it gets no group"
        )
        return f"{differs}; {effect}; set the clock that is wrong (timedatectl set-ntp true)"

    def now(self) -> float:
        """Return the swarm's time, seconds since 1970."""
        return time.time() + self.offset

    def _others(self) -> list[float]:
        """Return the fresh offsets of other peers' clocks, in seconds ahead of this machine's clock."""
        oldest = time.monotonic() - FRESH_SECONDS
        return [ahead for ahead, at in self._samples.values() if at >= oldest]
