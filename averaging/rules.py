"""The rules by which contributions become one vector, by their specs: the weighted mean, median and trimmed mean.

The last two rank the contributions to each value. A network of comparisons sorts the rows, each comparison a minimum
and a maximum of two whole rows: merge exchange (Batcher 1968; Knuth, The Art of Computer Programming, volume 3, section
5.2.2, algorithm M). It is about twenty times as fast as sorting each value's few contributions, and its result depends
on no thread and no order of equal values.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from equipoise.compression.grammar import canonical, decimal
from equipoise.compression.late_torch import torch
from equipoise.compression.registry import Plugins, Registry


class RuleError(ValueError):
    """A rule cannot combine the contributions, because there are too few of them, for example; one line says why."""


class Reduced(NamedTuple):
    """The result of a rule.

    Attributes:
        values: [d], of the contributions' dtype.
        scores: f64 [n]: how much each contribution counted, 0 to 1; they add up to 1.
    """

    values: torch.Tensor
    scores: torch.Tensor


class Rule(ABC):
    """One way to combine contributions, value by value: each owner applies it to its share.

    It is a pure function, each operation rounded on its own, so that every owner would produce the same bytes.

    Attributes:
        name: What specs call it.
        spec: The canonical spec: all options, in the documented order.
    """

    name: str
    spec: str

    @abstractmethod
    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """Combine contributions.

        Args:
            rows: f32 or f64 [n, d], in member order, n >= 1, finite. They are not changed.
            weights: f64 [n], above 0.

        Raises:
            RuleError: There are too few rows; says how many the rule needs.
        """


def require_rows(spec: str, rows: torch.Tensor) -> None:
    """Raise RuleError if a rule got no rows."""
    if not len(rows):
        raise RuleError(f"the rule {spec} needs at least 1 contributions, got 0")


class Mean(Rule):
    """Adds the rows, times their weights, in member order, and divides by the sum of the weights.

    It is the rule of FedAvg (McMahan et al. 2017, arXiv:1602.05629). `Codec.reduce` computes the same from payloads in
    one pass, and rounds use that.
    """

    name = spec = "mean"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """See `Rule.reduce`."""
        require_rows(self.spec, rows)
        total = torch.zeros_like(rows[0])
        for row, own in zip(rows, weights.to(rows.dtype), strict=True):
            total += row * own
        weight = math.fsum(weights.tolist())  # torch adds in an order of its own.
        return Reduced(total / rows.new_tensor(weight), weights / weight)


CHUNK_VALUES = 64 * 1024
"""Values of a row that are sorted at a time: all rows of a chunk stay in the processor's caches."""


class Median(Rule):
    """Takes the middle one of the contributions to each value; of an even number, the mean of the middle two.

    Yin et al. 2018 (arXiv:1803.01498), option I; Flower calls it FedMedian.

    Weights have no effect. As long as fewer than half of the contributions are broken, each value of the result lies
    between values of whole ones. One or two contributions therefore give a result that nothing protects: a run that
    relies on the rule has a quorum of 3 or more. The rule does not protect from an owner that lies about the result.
    """

    name = spec = "median"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """See `Rule.reduce`."""
        require_rows(self.spec, rows)
        return mean_of_middle(rows, (len(rows) - 1) // 2)


class Trimmed(Rule):
    """Drops the k = int(beta n) lowest and highest of the n contributions to each value, and takes the others' mean.

    Yin et al. 2018 (arXiv:1803.01498), option II; Flower calls it FedTrimmedAvg.

    Weights have no effect. As long as at most k contributions are broken, each value of the result lies between values
    of whole ones; with fewer than 1 / beta contributions k is 0, and nothing is protected. The rule does not protect
    from an owner that lies about the result.
    """

    name = "trimmed"

    def __init__(self, beta: float = 0.2) -> None:
        """`beta` is the share to drop at each end, from 0 to below 0.5.

        Raises:
            ValueError: It is out of its range.
        """
        if not 0 <= beta < 0.5:
            raise ValueError(f"{self.name}: expected beta from 0 to below 0.5, got {beta!r}")
        self.beta = float(beta)
        self.spec = canonical(self.name, {"beta": self.beta})

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """See `Rule.reduce`."""
        require_rows(self.spec, rows)
        return mean_of_middle(rows, int(self.beta * len(rows)))


def mean_of_middle(rows: torch.Tensor, drop: int) -> Reduced:
    """Return the unweighted mean of each value's contributions without the `drop` lowest and `drop` highest.

    The mean adds in ascending order. NaN in a row makes the value NaN. A row's score is its share of the values that
    were kept: of n rows of which one is always dropped, that one scores 0.

    Args:
        rows: f32 or f64 [n, d], n > 2 drop. They are not changed.
        drop: At least 0.
    """
    count, size = rows.shape
    values, kept = torch.empty_like(rows[0]), torch.zeros(count, dtype=torch.float64, device=rows.device)
    divisor = rows.new_tensor(count - 2 * drop)  # By a plain number some devices multiply by the reciprocal.
    memory = rows.new_empty(count + 1, min(size, CHUNK_VALUES))
    for start in range(0, size, CHUNK_VALUES):
        chunk = rows[:, start : start + CHUNK_VALUES]
        middle = _sorted(chunk, memory[:, : chunk.shape[1]])[drop : count - drop]
        for at, row in enumerate(chunk):
            kept[at] += int(torch.count_nonzero((row >= middle[0]) & (row <= middle[-1])))
        total = torch.zeros_like(chunk[0])  # Which also makes one zero of the two that floats have.
        for row in middle:
            total += row
        torch.div(total, divisor, out=values[start : start + CHUNK_VALUES])
    total_kept = kept.sum()
    return Reduced(values, kept / total_kept if total_kept else torch.full_like(kept, 1 / count))


def _sorted(rows: torch.Tensor, memory: torch.Tensor) -> list[torch.Tensor]:
    """The rows, sorted value by value, ascending: [d] each, in `memory` [n + 1, d]."""
    *lanes, spare = memory
    memory[:-1].copy_(rows)
    for low, high in _comparisons(len(rows)):
        torch.minimum(lanes[low], lanes[high], out=spare)
        torch.maximum(lanes[low], lanes[high], out=lanes[high])
        lanes[low], spare = spare, lanes[low]
    return lanes


@lru_cache(maxsize=64)
def _comparisons(count: int) -> tuple[tuple[int, int], ...]:
    """The lanes that a network for `count` values compares, in order; the lower value goes to the first."""

    def network() -> Iterator[tuple[int, int]]:
        top = 1 << max(count - 1, 1).bit_length() - 1
        width = top
        while width:
            half, rest, distance = top, 0, width
            while True:
                yield from (
                    (lane, lane + distance) for lane in range(count - distance) if lane & width == rest
                )
                if half == width:
                    break
                distance, half, rest = half - width, half // 2, width
            width //= 2

    return tuple(network())


RULES: Registry[Rule] = Registry(
    "rule", "rules", "trimmed:beta=0.2", plugins=Plugins("equipoise.rules", Rule)
)
"""All rules; `RULES.register` makes another one known, as does an entry point `equipoise.rules` of a package."""

RULES.register("mean", Mean)
RULES.register("median", Median)
RULES.register("trimmed", Trimmed, beta=decimal(0.2))

parse_rule = RULES.parse
"""Returns the rule of a spec; raises ValueError with what came, what is known, and the nearest known name."""
