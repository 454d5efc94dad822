"""What a script does to an optimizer and its state, where only the swarm's updates may change them.

Frameworks call `step` without a wish to train, and scripts write to parameters between two updates. Neither shows in
the id of the state, so this module compares the state itself at each step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from equipoise.averaging.schema import SchemaError
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.client.tensors import Tensors, named_tensors, parameters_of
from equipoise.peer.errors import Refused
from equipoise.peer.training.image import Stateful, split

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""

WEIGHTS = 1021
"""Number of different weights that the summands have in turn, so that values do not change places unseen. This is a
prime, so rows of a tensor, whose widths are seldom its multiples, do not either."""


class Guard:
    """The state that peers hold alike, as the last update left it.

    The parameters' values are compared, so a write that is undone, as a swap of averaged weights for an evaluation,
    does no harm. In what the optimizer remembers, and in frozen parameters, torch's counts of writes are compared.
    `writes` is how often the script has written to the state since the last update, as the loop counts.
    """

    def __init__(
        self,
        source: Tensors,
        parameters: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        extra: Mapping[str, Stateful],
    ) -> None:
        self._source = source
        self._parameters = parameters
        present = parameters_of(source) if isinstance(source, torch.nn.Module) else {}
        self._frozen = {name: (one, 0) for name, one in present.items() if name not in parameters}
        self._kinds = {name: (one.dtype, one.device) for name, one in parameters.items()}
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._extra = extra
        self._remembered: list[int] = []
        self._sums: dict[str, int] = {}
        self.writes = 0
        optimizer.register_load_state_dict_pre_hook(self._loading)
        optimizer.register_load_state_dict_post_hook(self._has_loaded)
        self.note()

    def note(self) -> None:
        """Note the state as it is now: an update, or a download, has just written it."""
        self._sums = bit_sums(self._parameters)
        self._loaded = False
        self._writes = self._count_writes()
        self._frozen = {name: (one, _version(one)) for name, (one, _) in self._frozen.items()}
        self._groups = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        if self._scheduler is not None:
            schedule = self._scheduler.state_dict()
            self._schedule = f"{schedule}", copy.deepcopy(schedule)
        self._extras = {name: _told(name, what) for name, what in self._extra.items()}

    def require_same_tensors(self) -> None:
        """Raise SchemaError if a parameter has another dtype or device than at the start, or is another tensor."""
        require_same_tensors(self._source, self._parameters)
        for name, one in self._parameters.items():
            was, kind = self._kinds[name], (one.dtype, one.device)
            if kind != was:
                told = f"expected {was[0]} on {was[1]}, as at the start, got {kind[0]} on {kind[1]}"
                raise SchemaError(f"tensor {name!r}: {told}; convert or move the model before join")

    def written(self) -> str:
        """The first part of the state that the script has written to since `note`; empty if it has written nothing."""
        sums = bit_sums(self._parameters)
        changed = next((repr(name) for name, value in sums.items() if value != self._sums[name]), "")
        remembers = self._loaded or self._count_writes() != self._writes
        return changed or ("the optimizer's state" if remembers else "")

    def written_frozen(self) -> list[str]:
        """Names of the frozen parameters that the script has written to since `note`."""
        return [name for name, (one, version) in self._frozen.items() if _version(one) != version]

    def take_back(self) -> list[str]:
        """Set hyperparameters that the script has changed back; return what was changed, a line for each."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            told = f"expected {len(self._groups)} parameter groups, as at the start, got {len(groups)}"
            raise Refused(told, "join again with all of them")
        lines = []
        for at, (group, noted) in enumerate(zip(groups, self._groups, strict=True)):
            for key, value in noted.items():
                if f"{group.get(key)}" != f"{value}":
                    lines.append(f"group {at}: {key}: {value} became {group.get(key)}")
                    group[key] = _kept(value)
        if self._scheduler is not None and f"{self._scheduler.state_dict()}" != self._schedule[0]:
            lines.append("scheduler: its epoch")
            self._scheduler.load_state_dict(copy.deepcopy(self._schedule[1]))
        return lines

    def changed_extras(self) -> list[str]:
        """Names of the extra state that has changed since `note`."""
        return [name for name, what in self._extra.items() if _told(name, what) != self._extras[name]]

    def _loading(self, *_: object) -> None:
        self._remembered = self._state()

    def _has_loaded(self, *_: object) -> None:
        self._loaded = self._loaded or self._state() != self._remembered
        self._writes = self._count_writes()

    def _memory(self) -> list[Any]:
        state = self._optimizer.state
        return [value for one in self._parameters.values() if one in state for value in state[one].values()]

    def _state(self) -> list[int]:
        kept = (one for one in self._memory() if isinstance(one, torch.Tensor))
        return list(bit_sums(dict(enumerate(kept))).values())

    def _count_writes(self) -> list[Any]:
        memory = self._memory()
        return [(id(one), _version(one)) if isinstance(one, torch.Tensor) else f"{one}" for one in memory]


def require_same_tensors(source: Tensors, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise SchemaError if a parameter of the start has made room for another tensor: updates would miss that."""
    present = parameters_of(source) if isinstance(source, torch.nn.Module) else named_tensors(source)
    for name, one in parameters.items():
        if present.get(name, one) is not one:
            raise SchemaError(f"tensor {name!r} is another tensor than at the start: join again with it")


def is_probe(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is not meant to train: all rates are 0, and all gradients exact zeros.

    `torch.distributed.checkpoint` makes such a step, so that the optimizer has a state. Where a schedule begins at 0,
    a step whose gradients are all zero changes no parameter either.
    """
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups if "lr" in group]
    if not rates or any(rate is None or float(rate) for rate in rates):
        return False
    gradients = (one.grad for group in groups for one in group["params"] if one.grad is not None)
    return not any(bool((one.coalesce().values() if one.is_sparse else one).any()) for one in gradients)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _kept(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _told(name: str, what: Stateful) -> tuple[str, dict[str, int]]:
    """What tells two states of an object apart."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        return f"{split(what.state_dict(), name, tensors)}", bit_sums(tensors)
    except ImageError as error:  # No snapshot can be made of it, which is told there.
        return str(error), {}


def bit_sums(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, int]:
    """A weighted sum over the bits of each tensor, as integers that overflow: one read at a third of memory's speed."""
    if not tensors:
        return {}
    found = [_bit_sum(one) for one in tensors.values()]
    return dict(zip(tensors, torch.stack([one.to(found[0].device) for one in found]).tolist(), strict=True))


def _bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    bits, size = tensor.detach(), tensor.element_size()
    if bits.is_contiguous() and bits.numel():
        bits = bits.reshape(-1).as_strided((bits.numel(),), (1,))
        if not (bits.numel() * size) % 8 and not (bits.storage_offset() * size) % 8:
            size = 8
    values = bits.view(BITS[size]).reshape(-1)
    weights = torch.arange(1, WEIGHTS + 1, device=values.device)
    whole = values.numel() - values.numel() % WEIGHTS
    summands = values[:whole].view(-1, WEIGHTS).sum(0, dtype=torch.int64)
    rest = values[whole:]
    return (summands * weights).sum() + (rest * weights[: rest.numel()]).sum()
