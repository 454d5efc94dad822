"""Whoever cannot train with those who are there is told why, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from e2e.learners import daemons
from e2e.swarm import Swarm, eventually
from equipoise.peer import Client, Refused, Run, connect
from equipoise.peer.training import SwarmOptimizer
from oracles.training import batch_of, loss_of, network

pytestmark = pytest.mark.timeout(180)

SAMPLES = 8

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


class Trainee:
    """One peer's side of a run, within this process."""

    def __init__(self, peer: Client, name: str, hidden: int = 16, make: Make = adamw, **options: Any) -> None:
        codec = options.pop("codec", "fp32")
        self.model = network(hidden)
        self.run: Run = peer.join(name, self.model, codec=codec)
        given = {"target_batch_size": 2 * SAMPLES, "batch_size": SAMPLES, "patience": 0.5, **options}
        self.optimizer: SwarmOptimizer = self.run.optimizer(make(self.model), **given)

    def step(self) -> bool:
        """A step of training; returns whether an update came of it."""
        loss_of(self.model, batch_of(0, self.optimizer.epoch, SAMPLES)).backward()
        before = self.optimizer.epoch
        self.optimizer.step()
        return self.optimizer.epoch > before


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"hidden": 12}, r"0\.weight"),
    "codec": ({"codec": "int8"}, "codec"),
    "target": ({"target_batch_size": 4 * SAMPLES}, "target batch size"),
    "optimizer": ({"make": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2)}, "optimizer"),
    "rate": ({"make": lambda model: adamw(model, 1e-3)}, "hyperparameters"),
    "clip": ({"clip": 1.0}, "clip"),
}


def test_who_comes_with_a_mistake_is_told_which_and_those_who_are_there_go_on(swarm: Swarm) -> None:
    first, second = daemons(swarm, 2)
    with connect(first.home) as here, connect(second.home) as there:
        for name, (options, said) in MISTAKES.items():
            right = Trainee(here, name)
            with pytest.raises(Refused, match=said) as refused:
                Trainee(there, name, **options)
            print(f"{name}: {refused.value}")
            assert "\n" not in str(refused.value)
            eventually(right.step, f"{name}: an update of the one who was there")
