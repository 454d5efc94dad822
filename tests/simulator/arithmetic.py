"""Values whose weighted mean is exact in float64, whoever adds them up and in whatever order.

Values are integers of 20 bits and weights multiples of 1/4 below 2**10: the sum over a group of 64 stays below 2**53
quarters, so every addition is exact and the one division is rounded correctly. `exact_mean` gets the same bits
by rational arithmetic, without any of that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction
from random import Random

MAX_VALUE = 2**20


def draw_values(random: Random, size: int) -> tuple[float, ...]:
    """`size` values that a member contributes."""
    return tuple(float(random.randint(-MAX_VALUE, MAX_VALUE)) for _ in range(size))


def draw_weight(random: Random) -> float:
    """A weight > 0."""
    return random.randint(1, 2**12 - 1) / 4


def encode(values: Sequence[float]) -> bytes:
    """The values as little-endian float64."""
    return struct.pack(f"<{len(values)}d", *values)


def decode(payload: bytes) -> tuple[float, ...]:
    """The values in a payload."""
    return struct.unpack(f"<{len(payload) // 8}d", payload)


def mean(weighted: Sequence[tuple[float, bytes]]) -> bytes:
    """The encoded weighted mean of encoded contributions, added in the order given."""
    total = sum(weight for weight, _ in weighted)
    columns = zip(*(decode(payload) for _, payload in weighted), strict=True)
    weights = [weight for weight, _ in weighted]
    return encode(
        [
            sum(weight * value for weight, value in zip(weights, column, strict=True)) / total
            for column in columns
        ]
    )


def exact_mean(weighted: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, ...]:
    """The weighted mean of vectors in rational arithmetic, rounded once to float64."""
    total = sum(Fraction(weight) for weight, _ in weighted)
    size = len(weighted[0][1])
    return tuple(
        float(sum(Fraction(weight) * Fraction(values[at]) for weight, values in weighted) / total)
        for at in range(size)
    )
