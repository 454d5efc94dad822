"""DiLoCo's outer step: Nesterov momentum over what the peers have moved by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


class Nesterov:
    """m <- mu m + D; theta <- theta - alpha (D + mu m), with D the mean of theta - theta_i, and m = 0 at first.

    DiLoCo (Douillard 2023, 2311.08105, section 2), which names this step and its defaults; the form is that of
    Sutskever 2013 as torch.optim.SGD(nesterov=True) computes it. It is not heavy ball (theta <- theta - alpha m): the
    step looks ahead by one more application of the momentum.
    """

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        """`lr` is alpha, above 0; `momentum` is mu, at least 0 and below 1.

        Raises:
            ValueError: One of them is out of its range.
        """
        self.lr = _in_range("lr", lr, 0 < lr < math.inf, "a finite number above 0")
        self.momentum = _in_range("momentum", momentum, 0 <= momentum < 1, "a number from 0 to below 1")
        self._moments: dict[str, torch.Tensor] = {}

    def __str__(self) -> str:
        return f"Nesterov(lr={float(self.lr)!r}, momentum={float(self.momentum)!r})"

    def step(self, agreed: Mapping[str, torch.Tensor], mean: Mapping[str, torch.Tensor]) -> None:
        """See `Outer`."""
        for name, parameter in agreed.items():
            if name not in self._moments:
                self._moments[name] = torch.zeros_like(parameter)
            # Those of a checkpoint, or of another peer, come on the CPU.
            moment = self._moments[name] = self._moments[name].to(parameter.device)
            moment.mul_(self.momentum).add_(mean[name])
            parameter.sub_(mean[name] + self.momentum * moment, alpha=self.lr)

    def state_dict(self) -> dict[str, Any]:
        """The moments, by the names of the parameters."""
        return {"moments": dict(self._moments)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take on another's moments."""
        self._moments = dict(state_dict["moments"])


def _in_range(name: str, value: float, valid: bool, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not valid:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return float(value)
