"""Parameters of half precision: an optimizer steps fp32 masters in their place, or it is told what the cast loses.

Mixed Precision Training (Micikevicius 2018, 1710.03740), section 3.1: where a step is below half the distance of two
values of bf16 or fp16, the parameter stays as it was, for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

LOST_SHARE = 0.5
"""The share of lost updates that is told. Good learning rates lose a few percent in bf16."""

SAMPLE = 4096
"""Most values of each parameter that are compared: a copy of all would take as much memory as the model."""

log = logging.getLogger(__name__)


class Masters:
    """The run's parameters as an optimizer steps them; `begin` and `end` stand around its step.

    In between, the parameters are their masters, so that the optimizer's state, its groups and the script's references
    are those of the parameters. Without masters, steps are watched: by their numbers, the 1st, 2nd, 4th, ...

    Attributes:
        tensors: What is stepped, by name: fp32 masters of parameters of half precision, the others themselves.
    """

    def __init__(self, run: str, parameters: Mapping[str, torch.Tensor], wanted: bool) -> None:
        """`run` is its name. Without masters that are `wanted`, all `tensors` are the parameters."""
        self._run, self._wanted = run, wanted
        self._half = {name: one for name, one in parameters.items() if one.element_size() < 4}
        copies = {name: one.detach().float() for name, one in self._half.items()} if wanted else {}
        self.tensors: dict[str, torch.Tensor] = {**parameters, **copies}
        self._casts: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._watched: dict[str, torch.Tensor] = {}
        self._steps, self._told = 0, wanted

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer` step the masters, by the gradients in fp32. An optimizer that has stepped takes them too."""
        self._steps += 1
        self._watched = {}
        if not self._wanted:
            looks = not self._told and self._steps.bit_count() == 1
            if looks and all(float(group.get("lr", 1.0)) for group in optimizer.param_groups):
                self._watched = {name: _sample(one) for name, one in self._half.items()}
            return
        for name, one in self._half.items():
            if name in self._casts:
                continue  # The step before has raised an error.
            gradient = one.grad
            self._casts[name], one.grad = (one.data, gradient), None
            one.data = self.tensors[name]
            one.grad = gradient if gradient is None else gradient.float()
            for key, value in optimizer.state.get(one, {}).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == one.shape:
                    optimizer.state[one][key] = value.float()

    def end(self) -> None:
        """Let the parameters be in half precision again, cast from the masters; idempotent."""
        for name, (cast, gradient) in self._casts.items():
            one = self._half[name]
            one.grad = None
            one.data, one.grad = cast, gradient
        if self._casts:
            self._casts = {}
            self.write()
        if self._watched:
            self._look_at_lost()

    @torch.no_grad()
    def write(self) -> None:
        """Cast the masters into the parameters."""
        for name, one in self._half.items() if self._wanted else ():
            one.copy_(self.tensors[name])

    @torch.no_grad()
    def take(self) -> None:
        """Take what the script has written to the parameters into the masters."""
        for name, one in self._half.items() if self._wanted else ():
            master = self.tensors[name]
            master.copy_(torch.where(master.to(one.dtype) == one, master, one.float()))

    def _look_at_lost(self) -> None:
        """Warn once if most of the updates of the watched step were rounded away."""
        updates = lost = 0
        for name, before in self._watched.items():
            gradient = self._half[name].grad
            if gradient is not None and not gradient.is_sparse:
                moves = _sample(gradient) != 0
                updates += int(moves.sum())
                lost += int((moves & (_sample(self._half[name]) == before)).sum())
        if updates and lost > LOST_SHARE * updates:
            self._told = True
            told = "run %s: rounding to half precision lost %d %% of the updates of a step: masters=True keeps them"
            log.warning(told, self._run, 100 * lost // updates)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:SAMPLE].clone()
