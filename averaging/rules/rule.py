"""The interface of a rule, which makes one vector of the contributions to a round, and the weighted mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from equipoise.compression.late_torch import torch


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
