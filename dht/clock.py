"""The swarm's clock: this machine's plus the median of what its peers' clocks are ahead, its own 0 among them."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict

MAX_SAMPLES = 64
"""A median of so many peers is not moved by a few liars."""


class SwarmClock:
    """Time that peers roughly agree on, so that a machine whose clock is off can take part."""

    def __init__(self) -> None:
        self._ahead: OrderedDict[str, float] = OrderedDict()

    def learn(self, peer: str, theirs: float, asked: float, answered: float) -> None:
        """Take the clock that `peer` sent between two readings of ours, all in seconds since 1970."""
        self._ahead[peer] = theirs - (asked + answered) / 2
        self._ahead.move_to_end(peer)
        if len(self._ahead) > MAX_SAMPLES:
            self._ahead.popitem(last=False)

    @property
    def offset(self) -> float:
        """Seconds to add to this machine's clock."""
        return statistics.median([0.0, *self._ahead.values()])

    def now(self) -> float:
        """Return the swarm's time, seconds since 1970."""
        return time.time() + self.offset
