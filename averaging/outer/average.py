"""The plain mean of the peers' parameters, as an outer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Average:
    """theta <- theta - D, with D the mean of theta - theta_i: the mean of the peers' parameters theta_i.

    Local SGD (Stich 2018, 1805.09767, algorithm 1; McMahan 2017, 1602.05629, calls it FedAvg).
    """

    def __str__(self) -> str:
        return "Average()"

    def step(self, agreed: Mapping[str, torch.Tensor], mean: Mapping[str, torch.Tensor]) -> None:
        """See `Outer`."""
        for name, parameter in agreed.items():
            parameter.sub_(mean[name])

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """There is nothing to remember."""
