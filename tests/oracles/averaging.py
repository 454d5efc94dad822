"""Slow, obvious references for the arithmetic of averaging."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def butterfly_seconds(
    fractions: Sequence[float], links: Sequence[tuple[float, float]], growth: float = 1.0
) -> float:
    """The time of a round of a vector of one byte, transfer by transfer: the slowest of each phase is waited for.

    Links are bytes a second up and down. A mean has `growth` times the bytes of a contribution.
    """
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
        phases.append(max(max(sent[m] / links[m][0], received[m] / links[m][1]) for m in members))
    return phases[0] + growth * phases[1]


def largest_remainders(granules: int, fractions: Sequence[float]) -> list[int]:
    """Whole granules in proportion to `fractions` (Hamilton's method), in rational arithmetic; ties to the first."""
    total = sum(map(Fraction, fractions))
    exact = [granules * Fraction(fraction) / total for fraction in fractions]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for index in order[: granules - sum(counts)]:
        counts[index] += 1
    return counts


def counted(
    weights: Sequence[float], contributors: int, cap: int, attends: float, expected: int
) -> list[float]:
    """What counts of each contributor's weight: at most `cap` lower medians of the expected above `attends`."""
    inside = [index for index in range(len(weights)) if contributors >> index & 1]
    given = sorted(one for at, one in enumerate(weights) if expected >> at & 1 and one > attends)
    found = []
    for index, weight in enumerate(weights):
        if index not in inside:
            found.append(0.0)
        elif not given:
            found.append(weight)
        else:
            found.append(min(weight, float(cap * Fraction(given[(len(given) - 1) // 2]))))
    return found
