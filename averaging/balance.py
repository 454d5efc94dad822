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
    """What members say of their bandwidths, in bytes per second, without the noise; 0 counts as the median."""
    known = [bandwidth for bandwidth in bandwidths if bandwidth > 0]
    usual = statistics.median_low(known) if known else MIN_BANDWIDTH
    return [
        usual if bandwidth <= 0 or usual / ALIKE < bandwidth < usual * ALIKE else bandwidth
        for bandwidth in bandwidths
    ]


def balance(bandwidths: Sequence[float], owns: Sequence[bool]) -> list[float]:
    """The fractions of the vector that minimise the time of the slowest member of a butterfly in two phases.

    Of n members over a vector of S bytes, one with fraction f sends (1 - f) S and receives (n - 1) f S when scattering;
    when gathering, which begins once contributors are decided, it is the other way round. Over a link of b bytes per
    second each way a phase takes it max(1 - f, (n - 1) f) S / b. Within c seconds per byte of S it can do with
    fractions from max(0, 1 - c b) to c b / (n - 1), and needs c b >= (n - 1) / n, or c b >= 1 if it owns nothing; the
    least c that all can do with, and with which the fractions can add up to 1, is known in closed form. So a slow
    member owns 1 / n like others: with less, it would be busy with its own contribution for longer. What is left to
    choose goes to whom it costs least.

    Args:
        bandwidths: Bytes per second of each member, > 0 and finite; less than `MIN_BANDWIDTH` counts as that.
        owns: Whether each member may own a share; at least one does.

    Returns:
        One fraction per member, >= 0, summing to 1 up to rounding.
    """
    size = len(bandwidths)
    bandwidths = [max(bandwidth, MIN_BANDWIDTH) for bandwidth in bandwidths]
    # `sum` rounds otherwise from Python 3.12 on, and members' fractions must agree.
    together = math.fsum(b for b, is_owner in zip(bandwidths, owns, strict=True) if is_owner)
    needs = [
        (size - 1) / size / b if is_owner else 1 / b for b, is_owner in zip(bandwidths, owns, strict=True)
    ]
    time = max(*needs, (size - 1) / together)
    least = [
        max(0.0, 1 - time * b) if is_owner else 0.0 for b, is_owner in zip(bandwidths, owns, strict=True)
    ]
    room = [
        max(0.0, min(1.0, time * b / (size - 1)) - low) if is_owner else 0.0
        for b, is_owner, low in zip(bandwidths, owns, least, strict=True)
    ]
    rest = max(0.0, 1 - math.fsum(least)) / (math.fsum(room) or 1.0)
    return [low + rest * free for low, free in zip(least, room, strict=True)]
