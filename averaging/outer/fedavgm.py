"""FedAvgM: heavy-ball momentum over what the peers have moved by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import MomentumStep


class FedAvgM(MomentumStep):
    """v <- m v + g; w <- w - lr v, with g the mean of w - w_i, and v = 0 at first.

    Hsu 2019 (arXiv:1909.06335), section 4. It does not look ahead, as `Nesterov` does. With momentum 0 and lr 1 it is
    FedAvg.
    """

    moments = ("momentum",)

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        """See `MomentumStep`; `momentum` is m."""
        super().__init__("fedavgm", lr, momentum)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (velocity,) = moments
        velocity.mul_(self.momentum).add_(mean)
        parameter.sub_(velocity * self.lr)
