"""Training loops as users would write them, for a swarm in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from equipoise.averaging.outcome import Outcome
from equipoise.peer.run import Run
from equipoise.peer.training import SwarmOptimizer
from fakes.world import World
from oracles.training import batch_of, loss_of, network

SAMPLES = 8


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Trainer:
    """One peer; the target is what four of them come to with one batch each."""

    def __init__(self, swarm: World, index: int, epochs: int, seconds: float = 0.5, **options: Any) -> None:
        self.swarm, self.index, self.epochs, self.seconds = swarm, index, epochs, seconds
        self.options = {
            "target_batch_size": 4 * SAMPLES,
            "batch_size": SAMPLES,
            **options,
        }
        self.make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = adamw
        self.model: Any = network()
        self.run: Run
        self.opt: SwarmOptimizer
        self.calls = 0
        self.seen: list[tuple[int, str]] = []
        """Epoch and reason after each call of `step`."""

    @property
    def name(self) -> str:
        return f"peer{self.index}"

    def begin(self, at: float = 0.0) -> Trainer:
        self.swarm.peer(self.name, self.train, at)
        return self

    def join(self) -> None:
        self.run = self.swarm.join(self.name, "text", self.model)
        self.opt = self.run.optimizer(self.make(self.model.parameters()), **self.options)

    def train(self) -> None:
        self.join()
        while self.opt.epoch < self.epochs:
            self.swarm.compute(self.seconds)
            self.opt.zero_grad()
            self.backward()
            self.calls += 1
            self.opt.step()
            self.seen.append((self.opt.epoch, self.opt.reason))

    def backward(self) -> None:
        loss_of(self.model, batch_of(self.index, self.calls, SAMPLES)).backward()

    @property
    def last(self) -> Outcome:
        """The last outcome."""
        assert self.opt.last is not None, "it has met nobody"
        return self.opt.last

    def named(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters()}


def trained(swarm: World, peers: int = 4, epochs: int = 5, **options: Any) -> list[Trainer]:
    trainers = [Trainer(swarm, index, epochs, **options).begin() for index in range(peers)]
    swarm.run()
    return trainers


def given(swarm: World, name: str) -> float:
    """The samples of a peer in the means of all rounds together; each mean counts once."""
    rounds = {one.state: one.contributors.get(name, 0.0) for _, _, one in swarm.outcomes if one.ok}
    return round(sum(rounds.values()))


def assert_alike(trainers: Iterable[Trainer]) -> None:
    """Their ids, images, and so parameters and what the optimizers remember, are the same."""
    first, *others = trainers
    for other in others:
        assert other.opt.id == first.opt.id
        assert torch.equal(other.opt.image(), first.opt.image())
