"""The weights of contributors, as far as their claims count.

A weight is a peer's own claim: a peer that claims 1e12 samples would make the mean its own. So in a run with the
weights `capped:10`, a contributor counts at most 10 times the lower median. All members compute that alike, from the
signed joins of all contributors in the manifest. An exchange of gossip counts both weights as the smaller of the two,
so half of each vector is its peer's own. In a run with the weights `any`, claims count as they are.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

ANY = "any"
CAPPED = "capped:10"

MAX_WEIGHT = 1e12
"""Largest weight of one contribution; 64 times this, times any sane value, is far from overflow in fp32."""

Weight = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WEIGHT)]

ATTENDANCE_LIMIT = 2.0**-30
"""Most weight of a contributor that only attends: it sends zeros, so that a round has two contributors. A round of only
such contributors introduces them to each other, and changes nothing. The median excludes their weights, or a real
contributor beside two attending peers would count as almost nothing. It includes all larger weights, or honest peers
with small weights would leave the median to a peer with a large one."""

LEAST_CONTRIBUTION = 1e-3
"""Least weight of a contributor of a federated round; with less, a member only attends, and does not count towards the
quorum."""

LEAST_SHARE = 2.0**-126
"""Least share that counts. Devices round smaller ones differently, or take them for 0."""

_CAP = re.compile(r"\Acapped:([1-9][0-9]{0,5})\Z")


def cap_of(rule: str, what: str = "weights") -> float:
    """The largest weight or norm that counts, in medians; infinite for `any`.

    Raises:
        ValueError: The rule is unknown; names the known rules.
    """
    if rule == ANY:
        return math.inf
    found = _CAP.match(rule) if isinstance(rule, str) else None
    if found is None:
        raise ValueError(
            f"expected {what} as {CAPPED!r}, with any whole number, or {ANY!r}, got {str(rule)[:80]!r}"
        )
    return float(found[1])


def shrinkage(
    weights: Sequence[float], norms: Sequence[float], expected: int, cap: float
) -> tuple[float, ...]:
    """Return the factor of each member's values, at most 1, with which its norm is at most `cap` lower medians.

    Args:
        weights: As claimed, one per member.
        norms: The 2-norm of each member's contribution, as signed; infinite if unsaid.
        expected: Bitmask of the members that were to contribute. The median is of their norms, but for norms of 0,
            unsaid ones, and those of members that only attend.
        cap: In medians; infinite for no cap.
    """
    pairs = enumerate(zip(weights, norms, strict=True))
    given = [n for at, (w, n) in pairs if expected >> at & 1 and w > ATTENDANCE_LIMIT and 0 < n < math.inf]
    most = cap * statistics.median_low(given) if given else math.inf
    return tuple(1.0 if norm <= most else most / norm for norm in norms)


def discounted(weight: float, age: int) -> float:
    """The weight of a contribution `age` rounds after its own: weight / sqrt(1 + age) (FedBuff, Nguyen 2022,
    2106.06639)."""
    return weight / math.sqrt(1 + max(age, 0))


def contributing(weights: Sequence[float], least: float = 0.0) -> int:
    """Return the bitmask of the members that contribute: those with a weight above 0, and of at least `least`.

    Where no weight is that large, all with a weight above 0 contribute: they introduce themselves to each other.
    """
    counts = sum(1 << member for member, weight in enumerate(weights) if weight > 0 and weight >= least)
    return counts or sum(1 << member for member, weight in enumerate(weights) if weight > 0)


def counted_weights(
    weights: Sequence[float], contributors: int, cap: float, expected: int = -1
) -> tuple[float, ...]:
    """Return the part of each member's weight that counts in the mean over `contributors`.

    Args:
        weights: As claimed, one per member, finite and >= 0.
        contributors: Bitmask of the members that are in the mean.
        cap: The most that a contributor counts, in lower medians of the weights of the `expected` members; contributors
            that only attend are not in the median. Of two it is the smaller one, so the cap holds in a pair, too.
        expected: Bitmask of the members that were to contribute. The median is of their weights, or a leader would
            choose it with the contributors.

    Returns:
        One per member; 0 for those that are not in the mean.
    """
    given = [one for at, one in enumerate(weights) if expected >> at & 1 and one > ATTENDANCE_LIMIT]
    most = cap * statistics.median_low(given) if given else math.inf
    return tuple(min(weight, most) if contributors >> at & 1 else 0.0 for at, weight in enumerate(weights))


def shares(counted: Iterable[float], factors: Sequence[float] = ()) -> list[float]:
    """Return the share of each counted weight in their sum, times its factor; one below `LEAST_SHARE` is 0.

    They are the same in every order, and beside any zeros.
    """
    counted = list(counted)
    # `sum` rounds otherwise from Python 3.12 on, and all members must get the same shares.
    total = math.fsum(counted)
    pairs = zip(counted, factors or [1.0] * len(counted), strict=True)
    given = (weight / total * factor if total else 0.0 for weight, factor in pairs)
    return [share if share >= LEAST_SHARE else 0.0 for share in given]
