"""What a simulated round stands on: virtual time, and the events to come.

A world is deterministic: what happens at one time happens in the order in which it was asked for; chance has a seed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

MAX_EVENTS = 2_000_000
"""Of one stretch of time, more than any sound machines take: machines that talk in circles are found by it."""

NEVER = float("inf")


class Violation(Exception):
    """A machine broke a promise; the message says which member and which promise."""


class Clock:
    """Virtual time, and what is to happen in it.

    Attributes:
        now: Virtual seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, happen: Callable[..., None], *args: Any) -> None:
        """Have something happen at a time, or at once if that is past."""
        if time < NEVER:
            heapq.heappush(self._events, (max(time, self.now), next(self._order), happen, args))

    def run_until(self, reached: Callable[[], bool], end: float = NEVER) -> bool:
        """Let time pass until a condition holds, until its end, or until nothing more will happen.

        Returns:
            Whether the condition holds.

        Raises:
            Violation: Too much happens.
        """
        for _ in range(MAX_EVENTS):
            if reached():
                return True
            if not self._events or self._events[0][0] > end:
                self.now = self.now if end == NEVER else end
                return reached()
            self.now, _, happen, args = heapq.heappop(self._events)
            happen(*args)
        raise Violation(f"no end after {MAX_EVENTS} events: the machines talk in circles")
