"""DiLoCo's outer step: Nesterov momentum over what the peers have moved by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import OuterStep, above_zero, below_one


class Nesterov(OuterStep):
    """m <- mu m + D; theta <- theta - alpha (D + mu m), with D the mean of theta - theta_i, and m = 0 at first.

    DiLoCo (Douillard 2023, 2311.08105, section 2), which names this step and its defaults; the form is that of
    Sutskever 2013 as torch.optim.SGD(nesterov=True) computes it. It is not heavy ball (theta <- theta - alpha m): the
    step looks ahead by one more application of the momentum.
    """

    moments = ("moments",)

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        """`lr` is alpha, above 0; `momentum` is mu, at least 0 and below 1.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.lr, self.momentum = above_zero("lr", lr), below_one("momentum", momentum)
        super().__init__("nesterov", lr=self.lr, momentum=self.momentum)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (moment,) = moments
        moment.mul_(self.momentum).add_(mean)
        parameter.sub_((moment * self.momentum).add_(mean).mul_(self.lr))
