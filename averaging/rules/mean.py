"""The weighted mean, the rule of FedAvg (McMahan et al. 2017, arXiv:1602.05629).

`Codec.reduce` computes the same from payloads in one pass, and rounds use that.
"""

from __future__ import annotations

import math

from equipoise.averaging.rules.rule import Reduced, Rule, require_rows
from equipoise.compression.late_torch import torch


class Mean(Rule):
    """Adds the rows, times their weights, in member order, and divides by the sum of the weights."""

    name = spec = "mean"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """See `Rule.reduce`."""
        require_rows(self.spec, rows)
        total = torch.zeros_like(rows[0])
        for row, own in zip(rows, weights.to(rows.dtype), strict=True):
            total += row * own
        weight = math.fsum(weights.tolist())  # torch adds in an order of its own.
        return Reduced(total / rows.new_tensor(weight), weights / weight)
