"""FedYogi: as FedAdam, but the second moment changes by little at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import AdaptiveStep, root


class FedYogi(AdaptiveStep):
    """m <- b1 m + (1 - b1) d; v <- v - (1 - b2) d^2 sign(v - d^2); w <- w + eta m / (sqrt v + tau), m = v = 0 at first.

    d is the mean of w_i - w. Reddi 2021 (arXiv:2003.00295), algorithm 2; there is no bias correction.
    """

    def __init__(self, eta: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        """See `AdaptiveStep`."""
        super().__init__("fedyogi", eta, beta1, beta2, tau)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        m, v = moments
        square = mean * mean
        m.mul_(self.beta1).sub_(mean * (1 - self.beta1))
        v.sub_((v - square).sign_().mul_(square).mul_(1 - self.beta2))
        parameter.add_((m * self.eta).div_(root(v).add_(self.tau)))
