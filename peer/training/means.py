"""Means in memory: those that are applied, and those that are kept while a snapshot comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from equipoise.peer.accumulate import Accumulator
from equipoise.peer.training.replica import HELD_MEANS

HELD_MEMORY = 0.25
"""Share of the memory that is available for means that are kept while a snapshot comes: that takes as much again, and
the loop goes on."""

MEAN_BYTES = 4
"""Of a value of a mean."""

LEAST_HELD = 2
"""Means kept whatever memory there is: with fewer no snapshot, which always is some rounds old, could be used."""


class Mean(NamedTuple):
    """What one round came to: gradients, or differences, by name, fp32; and averaged buffers."""

    values: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def copy(self) -> Mean:
        """A copy in the machine's memory: an accelerator has less of it."""
        return Mean(_copied(self.values), _copied(self.buffers))


def affordable(size: int, available: int) -> int:
    """How many means of `size` bytes to keep at most where so many bytes are available."""
    return max(min(int(available * HELD_MEMORY) // max(size, 1), HELD_MEANS), LEAST_HELD)


def mean_of(accumulator: Accumulator, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one peer alone has accumulated, on the devices of the tensors that it is `like`."""
    mean = {
        name: torch.empty(one.shape, dtype=torch.float32, device=one.device) for name, one in like.items()
    }
    accumulator.mean_into(mean)
    return mean


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
