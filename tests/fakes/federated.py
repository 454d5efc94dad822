"""Clients of federated runs as users would write them, for a swarm in one process."""

from __future__ import annotations

from typing import Any

import torch

from equipoise.peer.training import Federated
from equipoise.peer.training.federated import Task
from equipoise.peer.training.history import History, Record
from fakes.world import World

CURVATURES = (1.0, 4.0, 10.0)


def federated(strategy: str = "federated", codec: str = "fp32") -> World:
    return World(codec, strategy=strategy)


class Client:
    """A peer whose loss is a/2 (w - b)^2 in each of two parameters, with steps of size 0.05."""

    def __init__(self, swarm: World, index: int, seconds: float = 1.0, **options: Any) -> None:
        self.swarm, self.index, self.seconds = swarm, index, seconds
        self.name = f"peer{index}"
        self.options = {"rounds": 3, **options}
        self.model: Any = {"w": torch.zeros(2), "v": torch.zeros(3)}
        self.samples = 10.0 * (index + 1)
        self.steps = 5
        self.fits: list[tuple[int, float]] = []
        self.evaluations: list[tuple[int, float]] = []
        self.fits_at_all = True
        self.proximal = False
        self.stops_after: int | None = None
        self.records: list[Record] = []
        self.trained: Federated

    def begin(self, at: float = 0.0) -> Client:
        self.swarm.peer(self.name, self.work, at)
        return self

    def join(self) -> None:
        self.run = self.swarm.join(self.name, "digits", self.model)
        fit = self.fit if self.fits_at_all else None
        self.trained = Federated(self.run, fit, self.evaluate, **self.options)

    def work(self) -> None:
        self.join()
        while not self.trained.ended and self.trained.epoch != self.stops_after:
            self.records.append(self.trained.step())
        self.trained.finish()

    def fit(self, task: Task) -> tuple[float, dict[str, float]]:
        self.fits.append((task.number, self.swarm.now))
        self.swarm.compute(self.seconds)
        own = list(self.model.values())
        for _ in range(self.steps):
            for one in own:
                one.requires_grad_()
            losses = [CURVATURES[self.index % 3] / 2 * (one - self.index).square().sum() for one in own]
            loss = torch.stack(losses).sum() + (task.proximal() if self.proximal else 0.0)
            gradients = torch.autograd.grad(loss, own)
            with torch.no_grad():
                for one, gradient in zip(own, gradients, strict=True):
                    one.requires_grad_(False).sub_(0.05 * gradient)
        return self.samples, {"loss": float(loss.detach()), "number": task.number}

    def evaluate(self, task: Task) -> tuple[float, dict[str, float]]:
        value = float(self.model["w"][0])
        self.evaluations.append((task.number, value))
        return self.samples, {"w": value}

    @property
    def history(self) -> History:
        return self.trained.history

    def image(self) -> bytes:
        return bytes(self.trained.member.image().numpy())


def clients(swarm: World, count: int, **options: Any) -> list[Client]:
    return [Client(swarm, index, **options).begin() for index in range(count)]


def trained(swarm: World, count: int, **options: Any) -> list[Client]:
    found = clients(swarm, count, **options)
    swarm.run()
    return found


def assert_alike(peers: list[Client]) -> None:
    for peer in peers[1:]:
        assert peer.trained.member.id == peers[0].trained.member.id
        assert peer.image() == peers[0].image()
        assert peer.history == peers[0].history
    assert_same_models(peers)


def assert_same_models(peers: list[Client]) -> None:
    for peer in peers[1:]:
        for name, one in peer.model.items():
            assert torch.equal(one, peers[0].model[name])
