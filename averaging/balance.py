"""Bandwidth-aware sizes of shares."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MIN_BANDWIDTH = 1.0
"""Bytes per second. Nobody is slower; what a member says of itself must not make others divide by almost nothing."""

ALIKE = 1.4
"""Bandwidths that differ by less than this factor from the median count as equal to it. Measurements of equal links
differ by a third now and then; unequal shares for equal members cost more than equal shares for almost equal ones."""


def settle(bandwidths: Sequence[float]) -> list[float]:
    """What members say of their bandwidths, in bytes per second, without the noise; who says 0 counts as the median."""
    known = [bandwidth for bandwidth in bandwidths if bandwidth > 0]
    usual = statistics.median_low(known) if known else MIN_BANDWIDTH
    return [
        usual if bandwidth <= 0 or usual / ALIKE < bandwidth < usual * ALIKE else bandwidth
        for bandwidth in bandwidths
    ]


def balance(bandwidths: Sequence[float], owns: Sequence[bool]) -> list[float]:
    """The fractions of the vector that minimise the time of the slowest member of a butterfly.

    In a butterfly of n members over a vector of S bytes, a member with fraction f sends (1 - f) S when scattering and
    (n - 1) f S when gathering, and receives as much: S (1 + (n - 2) f) each way. The slowest takes
    T = max (1 + (n - 2) f_i) S / b_i, so the best f_i is max(0, (T b_i / S - 1) / (n - 2)) with T such that the sum
    is 1: water-filling, solved exactly by dropping the members that it would give a negative fraction, slowest first.
    In a group of two, every cut costs the same wire time; the work of reducing is then split evenly.

    Args:
        bandwidths: Bytes per second of each member, > 0 and finite; less than `MIN_BANDWIDTH` counts as that.
        owns: Whether each member may own a share; at least one does.

    Returns:
        One fraction per member, >= 0, summing to 1 up to rounding.
    """
    size = len(bandwidths)
    bandwidths = [max(bandwidth, MIN_BANDWIDTH) for bandwidth in bandwidths]
    owners = [index for index in range(size) if owns[index]]
    if size <= 2:
        return [1 / len(owners) if index in owners else 0.0 for index in range(size)]
    while True:
        # `sum` rounds otherwise from Python 3.12 on, and members' fractions must agree.
        time = (len(owners) + size - 2) / math.fsum(bandwidths[index] for index in owners)
        slowest = min(owners, key=lambda index: (bandwidths[index], index))
        if time * bandwidths[slowest] >= 1 or len(owners) == 1:
            break
        owners.remove(slowest)
    fractions = [0.0] * size
    for index in owners:
        fractions[index] = (time * bandwidths[index] - 1) / (size - 2)
    return fractions
