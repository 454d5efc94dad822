"""Outer steps along the mean of what the peers have moved by, with and without momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import OuterStep, above_zero, below_one


class Average(OuterStep):
    """theta <- theta - D, with D the mean of theta - theta_i: the mean of the peers' parameters theta_i.

    Local SGD (Stich 2018, 1805.09767, algorithm 1; McMahan 2017, 1602.05629, calls it FedAvg).
    """

    def __init__(self) -> None:
        super().__init__("average")

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        parameter.sub_(mean)


class MomentumStep(OuterStep):
    """An outer step with a rate and a momentum."""

    def __init__(self, name: str, lr: float, momentum: float) -> None:
        """`lr` is above 0; `momentum` is at least 0 and below 1.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.lr, self.momentum = above_zero("lr", lr), below_one("momentum", momentum)
        super().__init__(name, lr=self.lr, momentum=self.momentum)


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
