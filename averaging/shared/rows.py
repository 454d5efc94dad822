"""The rows of one shard, with an optimizer's state for each row, and how the tensors of items are one message.

The tensors of a table are named `rows/TABLE`, `ids/TABLE`, `gradients/TABLE`, and `0/TABLE` ... for the states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from equipoise.averaging.options import MAX_SPEC_CHARS
from equipoise.averaging.shared.messages import SHARDS, Item, Message
from equipoise.compression.grammar import canonical, decimal
from equipoise.compression.registry import Registry

Payload = Mapping[str, Any]
"""The tensors that go with an item, by name."""

ROWS, IDS, GRADIENTS = "rows/", "ids/", "gradients/"


class RowOptimizer(NamedTuple):
    """An optimizer of rows: a row moves only with a gradient of its own.

    Attributes:
        spec: The canonical spec.
        widths: Of each state of a row of so many values; states are zeros at first.
        step: Moves rows, fp32 [k, width], by a gradient, and their states, in place.
    """

    spec: str
    widths: Callable[[int], tuple[int, ...]]
    step: Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor]], object]


def _sgd(x: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], lr: float) -> None:
    """x <- x - lr g."""
    x.sub_(g, alpha=lr)


def _adagrad(x: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], lr: float, eps: float) -> None:
    """s <- s + g^2, x <- x - lr g / (sqrt s + eps) (Duchi, Hazan and Singer, 2011), as torch's."""
    x.addcdiv_(g, states[0].addcmul_(g, g).sqrt().add_(eps), value=-lr)


def _adam(x: torch.Tensor, g: torch.Tensor, states: list[torch.Tensor], lr: float, **options: float) -> None:
    """Adam (Kingma and Ba, 2015), as torch's; each row counts its own steps."""
    (first, second, steps), (beta1, beta2, eps) = states, options.values()
    steps.add_(1)
    first.lerp_(g, 1 - beta1)
    scale = (second.mul_(beta2).addcmul_(g, g, value=1 - beta2) / (1 - beta2**steps)).sqrt_().add_(eps)
    x.sub_(lr * (first / (1 - beta1**steps)) / scale)


OPTIMIZERS: Registry[RowOptimizer] = Registry("optimizer", "optimizers", "adagrad:lr=0.1", MAX_SPEC_CHARS)


def _register(step: Callable[..., None], widths: Callable[[int], tuple[int, ...]], **options: float) -> None:
    name = step.__name__.strip("_")
    takes = {option: decimal(value) for option, value in options.items()}
    OPTIMIZERS.register(
        name, lambda **o: RowOptimizer(canonical(name, o), widths, partial(step, **o)), **takes
    )


_register(_sgd, lambda width: (), lr=0.1)
_register(_adagrad, lambda width: (width,), lr=0.1, eps=1e-10)
_register(_adam, lambda width: (width, width, 1), lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)


class RowStore:
    """The values of a shard, every 16th row of each table in fp32, and its states; ValueErrors change nothing."""

    def __init__(self, tables: Mapping[str, torch.Tensor], shard: int, optimizer: RowOptimizer) -> None:
        """Begin with the values of `tables`, each [rows, width]."""
        self._step, self._kept = optimizer.step, dict[str, list[torch.Tensor]]()
        for name, table in tables.items():
            rows = table[shard::SHARDS].float().clone()
            states = [torch.zeros(len(rows), width) for width in optimizer.widths(rows.shape[1])]
            self._kept[name] = [rows, *states]

    def apply(self, push: Payload) -> None:
        """Make the optimizer's step with gradients, fp32 [k, width], of ids, int64 [k]."""
        given = {name: self._ids(name, push) for name in self._kept if IDS + name in push}
        if push.keys() != {part + name for name in given for part in (IDS, GRADIENTS)}:
            raise ValueError("expected ids and gradients of some tables, and nothing else")
        moved = {name: self._moved(name, ids, push[GRADIENTS + name]) for name, ids in given.items()}
        for name, ids in given.items():
            for one, new in zip(self._kept[name], moved[name], strict=True):
                one[ids] = new

    def _moved(self, name: str, ids: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the values of some rows, and their states, after a step."""
        shape = (len(ids), self._kept[name][0].shape[1])
        if (gradient.dtype, gradient.shape) != (torch.float32, shape):
            raise ValueError(f"expected gradients {list(shape)} of table {name!r}, in fp32")
        rows, *states = moved = [one[ids] for one in self._kept[name]]
        self._step(rows, gradient, states)
        if not all(one.isfinite().all() for one in moved):
            raise ValueError(f"expected finite gradients of table {name!r}, which leave its rows finite")
        return moved

    def read(self, pull: Payload) -> Payload:
        """Return rows, fp32 [k, width], of ids, int64 [k]."""
        asked = [name for name in self._kept if IDS + name in pull]
        return {ROWS + name: self._kept[name][0][self._ids(name, pull)] for name in asked}

    def dump(self) -> Payload:
        """Return a copy of all values and states."""
        return {name: one.clone() for name, one in self._named()}

    def load(self, state: Payload) -> None:
        """Take over what `dump` returned elsewhere."""
        for name, one in self._named():
            other = state.get(name)
            if other is None or (other.shape, other.dtype) != (one.shape, one.dtype):
                raise ValueError(f"expected {name!r} of shape {list(one.shape)} in a shard")
        for name, one in self._named():
            one.copy_(state[name])

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        kept = [(name, enumerate(tensors)) for name, tensors in self._kept.items()]
        return [(f"{at - 1}/{name}" if at else ROWS + name, one) for name, all in kept for at, one in all]

    def _ids(self, name: str, asked: Payload) -> torch.Tensor:
        ids, count = torch.as_tensor(asked[IDS + name]), len(self._kept[name][0])
        if ids.dtype != torch.int64 or ids.dim() != 1 or not (ids[1:] > ids[:-1]).all():
            raise ValueError(f"expected rising ids of table {name!r}, int64")
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < count:
            raise ValueError(f"expected ids of table {name!r} below {count}")
        return ids


def packed(view: str, sends: Sequence[tuple[Item, Payload]]) -> tuple[dict[str, torch.Tensor], str, Any]:
    """Make a message, raw; the names of its tensors begin with the place of their item."""
    tensors = {f"{at} {name}": one for at, (_, payload) in enumerate(sends) for name, one in payload.items()}
    return tensors, "raw", msgspec.to_builtins(Message(view, tuple(item for item, _ in sends)))


def unpacked(tensors: Payload, fields: object) -> tuple[str, list[tuple[Item, Payload]]]:
    """Read a message of another script: its view, and its items with their tensors.

    Raises:
        ValueError: It is not what `packed` makes.
    """
    message = msgspec.convert(fields, Message)
    payloads: list[dict[str, torch.Tensor]] = [{} for _ in message.items]
    for key, tensor in tensors.items():
        at, _, name = key.partition(" ")
        if not at.isdecimal() or int(at) >= len(payloads):
            raise ValueError(f"expected tensors of {len(payloads)} items, got {key[:80]!r}")
        payloads[int(at)][name] = tensor
    return message.view, list(zip(message.items, payloads, strict=True))
