"""A state of a small round as a few numbers: what the explorer branches on and remembers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Budget(NamedTuple):
    """What may still go wrong."""

    crashes: int
    cuts: int
    blips: int
    duplicates: int
    early: int


class State(NamedTuple):
    """One state of the whole.

    Attributes:
        members: Numbers of the members' states.
        links: Numbers of frames and markers on each link, in order; link sender * size + receiver, and a member's
            link to itself holds its reductions.
        dead: Bitmask.
        cut: Bitmask of links that carry nothing any more.
        budget: What may still go wrong.
        now: Seconds.
    """

    members: tuple[int, ...]
    links: tuple[tuple[int, ...], ...]
    dead: int
    cut: int
    budget: Budget
    now: float


class Numbers:
    """Gives every distinct value a number."""

    def __init__(self) -> None:
        self.values: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}

    def of(self, value: Hashable) -> int:
        """The value's number."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number
