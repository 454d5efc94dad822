"""Slow, obvious references for the arithmetic of averaging."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def butterfly_seconds(fractions: Sequence[float], bandwidths: Sequence[float]) -> float:
    """How long a round of a vector of one byte takes, transfer by transfer: the slowest of each phase is waited for."""
    members = range(len(fractions))
    phases = []
    for scattering in (True, False):
        sent, received = [0.0] * len(fractions), [0.0] * len(fractions)
        for owner in members:
            for other in members:
                if other != owner:
                    source, target = (other, owner) if scattering else (owner, other)
                    sent[source] += fractions[owner]
                    received[target] += fractions[owner]
        phases.append(max(max(sent[m], received[m]) / bandwidths[m] for m in members))
    return sum(phases)


def best_butterfly_seconds(bandwidths: Sequence[float], owns: Sequence[bool]) -> float:
    """The least that `butterfly_seconds` can be, by bisection over the time of a phase.

    Within t a member sends 1 - f <= t b and receives (n - 1) f <= t b; all fractions add up to 1.
    """
    size = len(bandwidths)
    least, most = 0.0, size / min(bandwidths)
    for _ in range(200):
        middle = (least + most) / 2
        low = [max(0.0, 1 - middle * b) for b in bandwidths]
        high = [
            middle * b / (size - 1) if is_owner else 0.0 for b, is_owner in zip(bandwidths, owns, strict=True)
        ]
        possible = all(a <= z for a, z in zip(low, high, strict=True)) and sum(low) <= 1 <= sum(high)
        least, most = (least, middle) if possible else (middle, most)
    return 2 * most


def largest_remainders(granules: int, fractions: Sequence[float]) -> list[int]:
    """Whole granules in proportion to `fractions` (Hamilton's method), in rational arithmetic; ties to the first."""
    total = sum(map(Fraction, fractions))
    exact = [granules * Fraction(fraction) / total for fraction in fractions]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: granules - sum(counts)]:
        counts[index] += 1
    return counts


def counted(weights: Sequence[float], contributors: int, cap: int, attends: float) -> list[float]:
    """What counts of each contributor's weight: at most `cap` medians of those above `attends`, in rational numbers."""
    inside = [index for index in range(len(weights)) if contributors >> index & 1]
    given = sorted(Fraction(weights[index]) for index in inside if weights[index] > attends)
    found = []
    for index, weight in enumerate(weights):
        if index not in inside:
            found.append(0.0)
        elif not given:
            found.append(weight)
        else:
            middle = Fraction(float((given[(len(given) - 1) // 2] + given[len(given) // 2]) / 2))
            found.append(float(min(Fraction(weight), Fraction(float(cap * middle)))))
    return found
