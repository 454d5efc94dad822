"""The trimmed mean of the contributions to each value (Yin et al. 2018, arXiv:1803.01498, option II).

Flower calls it FedTrimmedAvg.
"""

from __future__ import annotations

from equipoise.averaging.rules.ranking import mean_of_middle
from equipoise.averaging.rules.rule import Reduced, Rule, require_rows
from equipoise.compression.grammar import canonical
from equipoise.compression.late_torch import torch


class Trimmed(Rule):
    """Drops the k = int(beta n) lowest and highest of the n contributions to each value, and takes the others' mean.

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
