"""Outer steps of training with local steps: what all peers do alike with the mean of what they have moved by.

Each is one file. Between two exchanges every peer trains by itself, from the parameters on which all agreed; then the
mean of the differences takes those one step further, on every peer the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from equipoise.averaging.outer.average import Average
from equipoise.averaging.outer.nesterov import Nesterov

__all__ = ["Average", "Nesterov", "Outer"]


class Outer(Protocol):
    """An outer step and what it remembers; bit for bit the same on all peers that are given the same means."""

    def __str__(self) -> str:
        """Name and hyperparameters: what peers must have alike."""

    def step(self, agreed: Mapping[str, torch.Tensor], mean: Mapping[str, torch.Tensor]) -> None:
        """Take the agreed parameters one step further, in place.

        Args:
            agreed: f32, by name: the parameters on which all peers agreed last.
            mean: f32, by name: the mean over the peers of agreed parameters minus own ones.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember what another did."""
