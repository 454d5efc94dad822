"""FedAdagrad: each value's step shrinks with the sum of the squares of what it has moved by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.averaging.outer.step import OuterStep, above_zero, root


class FedAdagrad(OuterStep):
    """v <- v + d^2; w <- w + eta d / (sqrt v + tau), with d the mean of w_i - w, and v = 0 at first.

    Reddi 2021 (arXiv:2003.00295), algorithm 2, without the first moment.
    """

    moments = ("v",)

    def __init__(self, eta: float = 0.1, tau: float = 1e-3) -> None:
        """`eta` and `tau` are above 0; with a tiny `tau` the rounding of a codec becomes a full step.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.eta, self.tau = above_zero("eta", eta), above_zero("tau", tau)
        super().__init__("fedadagrad", eta=self.eta, tau=self.tau)

    def move(self, parameter: torch.Tensor, mean: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """See `OuterStep`."""
        (v,) = moments
        v.add_(mean * mean)
        parameter.sub_((mean * self.eta).div_(root(v).add_(self.tau)))
