"""DiLoCo's outer step: Nesterov momentum over what the peers have moved by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import MomentumStep


class Nesterov(MomentumStep):
    """m <- mu m + D; theta <- theta - alpha (D + mu m), with D the mean of theta - theta_i, and m = 0 at first.

    DiLoCo (Douillard 2023, 2311.08105, section 2), which names this step and its defaults; the form is that of
    Sutskever 2013 as torch.optim.SGD(nesterov=True) computes it. It is not heavy ball (theta <- theta - alpha m): the
    step looks ahead by one more application of the momentum.
    """

    moments = ("moments",)

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        """See `MomentumStep`; `lr` is alpha, `momentum` is mu."""
        super().__init__("nesterov", lr, momentum)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (moment,) = moments
        moment.mul_(self.momentum).add_(mean)
        parameter.sub_((moment * self.momentum).add_(mean).mul_(self.lr))
