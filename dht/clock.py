"""The swarm's clock: this machine's plus the median of what its peers' clocks are ahead, its own 0 among them."""

from __future__ import annotations

import statistics
import time

from humanfriendly import format_timespan

from equipoise.dht.limits import LruDict

MAX_SAMPLES = 64
"""Most peers whose clocks are remembered: a median of so many is not moved by a few liars."""
MAX_OFFSET_SECONDS = 86_400.0
"""Most that the swarm's clock is taken to be off this machine's. Clocks that are off by a day take part; and peers that
lie about theirs, however many, move this peer's idea of the time by no more."""
FRESH_SECONDS = 600.0
"""Longest time that a peer's clock counts after the peer was last asked for it: either clock may be set meanwhile."""
WARN_SECONDS = 10.0
"""Largest difference that is not worth a person's time: a busy machine answers that late."""


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
        """The difference of this machine's clock from most others', and what to do; empty if there is none.

        Of two peers neither knows whose clock is right: both are told.
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
        """Return the seconds that the clocks of others are ahead of this machine's."""
        oldest = time.monotonic() - FRESH_SECONDS
        return [ahead for ahead, at in self._samples.values() if at >= oldest]
