"""The cut of a flat vector into shares (one per owner, by bandwidth) and parts (pieces small enough to pipeline)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial

import msgspec

GRANULE = 256
"""Least granule of cuts between shares, in values: finer cuts gain nothing."""

MIN_BANDWIDTH = 1.0
"""Least bandwidth, in bytes per second: a member's false claim must not make others divide by almost 0."""

FAST = 250e6
"""Bytes per second (2 Gbit/s) above which the machines, not the wire, set the pace, and differences are noise: to
encode, encrypt and reduce int8 values takes a core about as long."""

ALIKE = 1.4
"""Least factor by which a bandwidth counts as different from the median. Measurements of equal links differ by a third
now and then; unequal shares for equal members cost more than equal shares for almost equal ones."""


Link = tuple[float, float]
"""Most bytes per second that a member sends, and that it receives; both > 0."""


class Part(msgspec.Struct, frozen=True):
    """Values `start` to `stop` of the flat vector, reduced by member `owner`."""

    start: int
    stop: int
    owner: int

    @property
    def size(self) -> int:
        """Number of values."""
        return self.stop - self.start


def settle(bandwidths: Sequence[float]) -> list[float]:
    """Return the members' bandwidths, in bytes per second, at most `FAST`, without noise; 0 counts as the median."""
    bandwidths = [min(bandwidth, FAST) for bandwidth in bandwidths]
    known = [bandwidth for bandwidth in bandwidths if bandwidth > 0]
    usual = statistics.median_low(known) if known else MIN_BANDWIDTH
    return [
        usual if bandwidth <= 0 or usual / ALIKE < bandwidth < usual * ALIKE else bandwidth
        for bandwidth in bandwidths
    ]


def balance(links: Sequence[Link], owns: Sequence[bool], growth: float = 1.0) -> list[float]:
    """The fractions of the vector with which the slowest member of a butterfly needs little time.

    Two cuts are tried. Fractions in proportion to the uplinks are best where only uplinks are slow, as in homes. Even
    ones are best where links are alike both ways, as a slow member receives what it does not own. The better of the two
    takes the least possible time for most groups, and 1.4 times that for the worst mixture of links.

    Args:
        links: One per member; less than `MIN_BANDWIDTH` counts as that.
        owns: Whether each member may own a share; at least one does.
        growth: Bytes of a part's mean for each byte of a contribution to it.

    Returns:
        One fraction per member, >= 0, summing to 1 up to rounding.
    """
    links = [(max(up, MIN_BANDWIDTH), max(down, MIN_BANDWIDTH)) for up, down in links]
    owned = [up if is_owner else 0.0 for (up, _), is_owner in zip(links, owns, strict=True)]
    # `sum` rounds otherwise from Python 3.12 on, and members' fractions must agree.
    together = math.fsum(owned)
    even = [is_owner / sum(owns) for is_owner in owns]
    return min(
        (even, [rate / together for rate in owned]), key=partial(exchange_seconds, links, growth=growth)
    )


def exchange_seconds(links: Sequence[Link], fractions: Sequence[float], growth: float = 1.0) -> float:
    """The time of a butterfly for each byte of an encoded contribution, which links alone limit.

    Of n members, one with fraction f sends 1 - f and receives (n - 1) f when scattering. When gathering, which begins
    once contributors are decided, it is the other way round.

    Args:
        links: One per member.
        fractions: Of the vector, one per member.
        growth: See `balance`.

    Returns:
        Seconds a byte.
    """
    others = len(links) - 1
    members = list(zip(links, fractions, strict=True))
    scatter = max(max((1 - own) / up, others * own / down) for (up, down), own in members)
    gather = max(max(others * own / up, (1 - own) / down) for (up, down), own in members)
    return scatter + growth * gather


def partition(
    size: int, fractions: Sequence[float], part_values: int, granule: int = GRANULE
) -> tuple[Part, ...]:
    """Cut a vector of `size` values into shares proportional to `fractions`, and those into parts.

    Shares are whole granules. The granules left by rounding go to the largest remainders, ties to the lower index, so
    that every member computes the same cut. A share may be empty.

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
    """Return the owner of each part when only the members in the bitmask `owners` reduce.

    Parts of absent owners are dealt out to the present ones in turn.

    Returns:
        One member index per part.
    """
    present = [index for index in range(owners.bit_length()) if owners >> index & 1]
    return tuple(
        part.owner if owners >> part.owner & 1 else present[position % len(present)]
        for position, part in enumerate(parts)
    )
