"""The weighted mean, the rule of FedAvg (McMahan et al. 2017, arXiv:1602.05629).

`Codec.reduce` computes the same from payloads in one pass, and rounds use that.
"""

from __future__ import annotations

import torch

from equipoise.averaging.rules.rule import Reduced, Rule


class Mean(Rule):
    """Adds the rows, times their weights, in member order, and divides by the sum of the weights."""

    name = spec = "mean"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """See `Rule.reduce`."""
        total = torch.zeros_like(rows[0])
        for row, weight in zip(rows, weights.to(rows.dtype), strict=True):
            total += row * weight
        return Reduced(total / weights.sum().to(rows.dtype), weights / weights.sum())
