"""FedAvgM: heavy-ball momentum over what the peers have moved by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import OuterStep, above_zero, below_one


class FedAvgM(OuterStep):
    """v <- m v + g; w <- w - lr v, with g the mean of w - w_i, and v = 0 at first.

    Hsu 2019 (arXiv:1909.06335), section 4. It does not look ahead, as `Nesterov` does. With momentum 0 and lr 1 it is
    FedAvg.
    """

    moments = ("momentum",)

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        """`lr` is above 0; `momentum` is m, at least 0 and below 1.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.lr, self.momentum = above_zero("lr", lr), below_one("momentum", momentum)
        super().__init__("fedavgm", lr=self.lr, momentum=self.momentum)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (velocity,) = moments
        velocity.mul_(self.momentum).add_(mean)
        parameter.sub_(velocity * self.lr)
