"""What every simulated world stands on: virtual time, the events to come, and processes that stop and die in it.

A world is deterministic: what happens at one time happens in the order in which it was asked for; chance has a seed.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Container
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


class Process(ABC):
    """One process of a world. Its events wait while it is stopped, and never happen once it is dead.

    Attributes:
        clock: Of the world.
        dead: Whether it was killed.
        stopped: Whether it is stopped (SIGSTOP).
        resumed_at: When it last went on after a stop.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.dead = self.stopped = False
        self.resumed_at = 0.0
        self._waiting: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []
        self._wakes_at = NEVER

    @property
    @abstractmethod
    def deadline(self) -> float:
        """When to wake it, in virtual seconds."""

    @abstractmethod
    def wake(self) -> None:
        """Its deadline may have passed."""

    @property
    @abstractmethod
    def flows(self) -> Container[bytes]:
        """The flows whose frames wait while no channel to another process can be opened."""

    @abstractmethod
    def lose(self, other: Any, reason: str) -> None:
        """No channel to another process can be opened: frames to it wait if they belong to `flows`, or are lost."""

    def happen(self, timer: bool, event: Callable[..., None], *args: Any) -> None:
        """Have something happen to the process as soon as it runs."""
        if self.stopped and not self.dead:
            self._waiting.append((timer, event, args))
        elif not self.dead:
            event(*args)

    def after(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        """Have something happen to the process some time later."""
        self.clock.at(self.clock.now + seconds, self.happen, False, event, *args)

    def arm(self) -> None:
        """Have the process woken at its deadline."""
        if self.deadline < self._wakes_at:
            self._wakes_at = self.deadline
            self.clock.at(self._wakes_at, self._wake)

    def _wake(self) -> None:
        self._wakes_at = NEVER
        self.happen(True, self.wake)

    def stop(self) -> None:
        """As by SIGSTOP."""
        self.stopped = True

    def resume(self, timers_first: bool = False) -> None:
        """As by SIGCONT: what came meanwhile comes at once.

        Args:
            timers_first: Whether the process sees its timers before all else.
        """
        self.stopped, self.resumed_at = False, self.clock.now
        waiting, self._waiting = self._waiting, []
        for timer, event, args in sorted(waiting, key=lambda one: timers_first and not one[0]):
            self.happen(timer, event, *args)

    def kill(self) -> None:
        """As by SIGKILL."""
        self.dead = True
