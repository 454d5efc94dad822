"""`Run.optimizer`: many peers, one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from equipoise.peer.training import SwarmOptimizer
from fakes.training import FakeSwarm
from oracles.training import Batch, batch_of, network

SAMPLES = 8


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch.inputs), batch.targets)


class Trainer:
    """The loop that a user would write."""

    def __init__(
        self, swarm: FakeSwarm, index: int, epochs: int, seconds: float = 0.5, **options: Any
    ) -> None:
        self.swarm, self.index, self.epochs, self.seconds = swarm, index, epochs, seconds
        self.options = {"target_batch_size": 4 * SAMPLES, "batch_size": SAMPLES, **options}
        self.make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-2)
        self.model = network()
        self.opt: SwarmOptimizer
        self.batches: list[int] = []

    @property
    def name(self) -> str:
        return f"peer{self.index}"

    def begin(self, at: float = 0.0) -> Trainer:
        self.swarm.peer(self.name, self.train, at)
        return self

    def join(self) -> None:
        run = self.swarm.join(self.name, "text", self.model)
        self.opt = run.optimizer(self.make(self.model.parameters()), **self.options)

    def train(self) -> None:
        self.join()
        count = 0
        while self.opt.epoch < self.epochs:
            self.swarm.compute(self.seconds)
            self.opt.zero_grad()
            loss_of(self.model, batch_of(self.index, count, SAMPLES)).backward()
            count += 1
            self.opt.step()

    def flat(self) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])


def trained(swarm: FakeSwarm, peers: int = 4, epochs: int = 5, **options: Any) -> list[Trainer]:
    trainers = [Trainer(swarm, index, epochs, **options).begin() for index in range(peers)]
    swarm.run()
    return trainers


def test_all_peers_end_alike(fake: FakeSwarm) -> None:
    trainers = trained(fake)
    assert len({trainer.opt.id for trainer in trainers}) == 1
    assert all(torch.equal(trainer.flat(), trainers[0].flat()) for trainer in trainers)
    assert not torch.equal(trainers[0].flat(), Trainer(fake, 9, 1).flat())
