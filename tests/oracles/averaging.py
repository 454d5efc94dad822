"""Slow, obvious references for the arithmetic of averaging."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def butterfly_seconds(fractions: Sequence[float], bandwidths: Sequence[float]) -> float:
    """How long the slowest member sends, for a vector of one byte, counted transfer by transfer."""
    members = range(len(fractions))
    seconds = []
    for member in members:
        scattered = sum(fractions[owner] for owner in members if owner != member)
        gathered = sum(fractions[member] for other in members if other != member)
        seconds.append((scattered + gathered) / bandwidths[member])
    return max(seconds)


def best_butterfly_seconds(bandwidths: Sequence[float], owns: Sequence[bool]) -> float:
    """The least that `butterfly_seconds` can be, by bisection: what owners can take within a time must add up to 1.

    A member with fraction f sends 1 + (n - 2) f, so within t it can take (t b - 1) / (n - 2), and needs t b >= 1.
    """
    size = len(bandwidths)
    least, most = 1 / min(bandwidths), size / min(bandwidths)
    for _ in range(200):
        middle = (least + most) / 2
        owners = (bandwidth for bandwidth, is_owner in zip(bandwidths, owns, strict=True) if is_owner)
        room = sum((middle * bandwidth - 1) / (size - 2) for bandwidth in owners)
        least, most = (least, middle) if room >= 1 else (middle, most)
    return most


def largest_remainders(granules: int, fractions: Sequence[float]) -> list[int]:
    """Whole granules in proportion to `fractions` (Hamilton's method), in rational arithmetic; ties to the first."""
    total = sum(map(Fraction, fractions))
    exact = [granules * Fraction(fraction) / total for fraction in fractions]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: granules - sum(counts)]:
        counts[index] += 1
    return counts
