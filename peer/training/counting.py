"""The weight of a contribution: the steps, or the samples or tokens, that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from equipoise.averaging.outcome import check_weight
from equipoise.peer.errors import Refused

Count = Callable[[Any], float | torch.Tensor]
"""Returns the number of samples, or of tokens without padding, in a batch."""


def counted(number: float | torch.Tensor) -> float:
    """A number of samples or tokens, also as a tensor of one value.

    Raises:
        ValueError: It is not a finite number >= 0.
    """
    return check_weight(number.item() if isinstance(number, torch.Tensor) else number)


def watch_batches(
    source: object, count: Count, add: Callable[[float | torch.Tensor], None]
) -> RemovableHandle:
    """Count what a module gets before each of its forward passes in training.

    The batch is the module's only positional argument, or all of them as a tuple; without any, its keywords as a dict.

    Raises:
        Refused: The run was not joined with a module.
    """
    if not isinstance(source, torch.nn.Module):
        told = "expected a run that was joined with a module, whose batches `count` gets"
        raise Refused(told, "join it with the module, or call `count(number)` before each step")

    def see(module: torch.nn.Module, batch: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training:
            add(count((batch[0] if len(batch) == 1 else batch) if batch else keywords))

    return source.register_forward_pre_hook(see, with_kwargs=True)


class Seen:
    """What a local copy has been trained on since it was the agreed one.

    Attributes:
        steps: Steps of the loop's optimizer.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._counted: float | None = None
        self._given = 0, 0.0

    @property
    def weight(self) -> float:
        """What the script has counted or, if it does not count, the number of steps."""
        return float(self.steps) if self._counted is None else self._counted

    def count(self, number: float) -> None:
        """Note so many samples, or tokens, of the next step."""
        self._counted = (self._counted or 0.0) + number

    def give(self) -> None:
        """Note that a contribution has all so far."""
        self._given = self.steps, self._counted or 0.0

    def settle(self, kept: bool) -> None:
        """Note that the local copy is the agreed one, but for what came after the contribution if that is `kept`."""
        steps, number = self._given if kept else (self.steps, self._counted or 0.0)
        self.steps -= steps
        self._counted = None if self._counted is None else self._counted - number
        self._given = 0, 0.0
