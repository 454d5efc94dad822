"""Training in one process, slow and plain: what peers that train together must come to."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

INPUTS, OUTPUTS = 8, 4

_drawing = threading.Lock()
"""Trainers in threads draw from one generator, torch's own: two at once would not get what their seeds say."""

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class Batch(NamedTuple):
    """Samples of a small regression.

    Attributes:
        inputs: f32 [n, INPUTS].
        targets: f32 [n, OUTPUTS].
    """

    inputs: torch.Tensor
    targets: torch.Tensor


def batch_of(peer: int, number: int, samples: int) -> Batch:
    """The `number`-th batch of `peer`, the same in every process."""
    chance = torch.Generator().manual_seed(1_000_003 * (peer + 1) + number)
    inputs = torch.randn(samples, INPUTS, generator=chance)
    noise = torch.randn(samples, OUTPUTS, generator=chance)
    targets = torch.stack(
        [inputs.sin().sum(1), inputs.prod(1), inputs[:, 0] * inputs[:, 1], inputs.norm(dim=1)], 1
    )
    return Batch(inputs, targets + 0.1 * noise)


def network(hidden: int = 32, seed: int = 0) -> nn.Module:
    """A network without kinks, whose gradients therefore vanish nowhere by accident; equal for an equal seed."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, OUTPUTS),
        )


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error, f32 []."""
    return nn.functional.mse_loss(model(batch.inputs), batch.targets)


def joined(batches: Sequence[Batch]) -> Batch:
    """All samples of several batches as one."""
    return Batch(torch.cat([one.inputs for one in batches]), torch.cat([one.targets for one in batches]))


def train_whole(
    model: nn.Module, make: MakeOptimizer, updates: Iterable[Sequence[Batch]], clip: float | None = None
) -> None:
    """One optimizer step for each update, from the gradient of all its samples at once."""
    optimizer = make(model.parameters())
    for batches in updates:
        optimizer.zero_grad()
        loss_of(model, joined(batches)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


class Nesterov(NamedTuple):
    """DiLoCo's outer step: m <- mu m + D; w <- w - alpha (D + mu m), D the mean of what the workers moved back by."""

    lr: float = 0.7
    momentum: float = 0.9


def train_diloco(
    model: nn.Module,
    make: MakeOptimizer,
    workers: Sequence[Sequence[Batch]],
    every: int,
    outer: Nesterov,
) -> None:
    """Workers in turn, each with its own batches and inner optimizer; `model` ends as the last outer step leaves it."""
    shared = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in shared]
    copies = [copy.deepcopy(model) for _ in workers]
    optimizers = [make(worker.parameters()) for worker in copies]
    for start in range(0, len(workers[0]), every):
        moved = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in shared]
        for worker, optimizer, batches in zip(copies, optimizers, workers, strict=True):
            set_parameters(worker, shared)
            for batch in batches[start : start + every]:
                optimizer.zero_grad()
                loss_of(worker, batch).backward()
                optimizer.step()
            for total, before, after in zip(moved, shared, worker.parameters(), strict=True):
                total += (before - after.detach()).double() / len(workers)
        for moment, delta in zip(moments, moved, strict=True):
            moment.mul_(outer.momentum).add_(delta)
        shared = [
            (before.double() - outer.lr * (delta + outer.momentum * moment)).float()
            for before, delta, moment in zip(shared, moved, moments, strict=True)
        ]
    set_parameters(model, shared)


@torch.no_grad()
def set_parameters(model: nn.Module, values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The greatest difference of a value, relative to the largest value of its tensor, over all tensors."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in expected.items()
    )
