"""The plain mean of the peers' parameters, as an outer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import OuterStep


class Average(OuterStep):
    """theta <- theta - D, with D the mean of theta - theta_i: the mean of the peers' parameters theta_i.

    Local SGD (Stich 2018, 1805.09767, algorithm 1; McMahan 2017, 1602.05629, calls it FedAvg).
    """

    def __init__(self) -> None:
        super().__init__("average")

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        parameter.sub_(mean)
