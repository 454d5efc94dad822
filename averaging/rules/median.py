"""The median of the contributions to each value (Yin et al. 2018, arXiv:1803.01498, option I; Flower's FedMedian)."""

from __future__ import annotations

from equipoise.averaging.rules.ranking import mean_of_middle
from equipoise.averaging.rules.rule import Reduced, Rule, require_rows
from equipoise.compression.late_torch import torch


class Median(Rule):
    """Takes the middle one of the contributions to each value; of an even number, the mean of the middle two.

    Weights have no effect. As long as fewer than half of the contributions are broken, each value of the result lies
    between values of whole ones. One or two contributions therefore give a result that nothing protects: a run that
    relies on the rule has a quorum of 3 or more. The rule does not protect from an owner that lies about the result.
    """

    name = spec = "median"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        """See `Rule.reduce`."""
        require_rows(self.spec, rows)
        return mean_of_middle(rows, (len(rows) - 1) // 2)
