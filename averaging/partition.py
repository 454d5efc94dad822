"""The cut of a flat vector into shares (one per owner, by bandwidth) and parts (pieces small enough to pipeline)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

GRANULE = 256
"""Shares are cut at multiples of this many values at least: finer cuts gain nothing."""


class Part(msgspec.Struct, frozen=True):
    """Values `start` to `stop` of the flat vector, reduced by member `owner`."""

    start: int
    stop: int
    owner: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.stop - self.start


def partition(
    size: int, fractions: Sequence[float], part_values: int, granule: int = GRANULE
) -> tuple[Part, ...]:
    """Cut a vector of `size` values into shares proportional to `fractions`, and those into parts.

    Shares are whole granules; what rounding leaves goes to the largest remainders, ties to the lower index, so that
    every member computes the same cut. A share may be empty.

    Args:
        size: Number of values, >= 0.
        fractions: One per member, >= 0, with a positive sum; 0 for members that own nothing.
        part_values: Most values of a part.
        granule: Shares begin at multiples of this many values; so do parts where `part_values` is a multiple of it.

    Returns:
        The parts in order; together they cover 0 to `size` exactly once.
    """
    granules = -(-size // granule)
    total = math.fsum(fractions)  # `sum` rounds otherwise from Python 3.12 on, and members' cuts must agree
    exact = [granules * fraction / total for fraction in fractions]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: granules - sum(counts)]:
        counts[index] += 1

    parts = []
    start = 0
    for owner, count in enumerate(counts):
        end = min(start + count * granule, size)
        while start < end:
            stop = min(start + part_values, end)
            parts.append(Part(start, stop, owner))
            start = stop
    return tuple(parts)


def assign(parts: Sequence[Part], owners: int) -> tuple[int, ...]:
    """Who reduces each part when only the members in the bitmask `owners` do.

    Parts of absent owners are dealt out to the present ones in turn.

    Returns:
        One member index per part.
    """
    present = [index for index in range(owners.bit_length()) if owners >> index & 1]
    return tuple(
        part.owner if owners >> part.owner & 1 else present[position % len(present)]
        for position, part in enumerate(parts)
    )
