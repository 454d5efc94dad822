"""Rules and outer steps of federated rounds, one number at a time: slow, and written from their formulas.

Sources: McMahan 2017 (FedAvg), Hsu 2019 (FedAvgM), Reddi 2021 (FedAdagrad, FedAdam, FedYogi), Yin 2018 (median and
trimmed mean), Douillard 2023 (DiLoCo).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch


def mean(column: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted mean of the contributions to one value."""
    products = [value * weight for value, weight in zip(column, weights, strict=True)]
    return math.fsum(products) / math.fsum(weights)


def median(column: Sequence[float], weights: Sequence[float]) -> float:
    """The middle one; of an even number, the mean of the middle two."""
    return statistics.median(column)


def trimmed(column: Sequence[float], weights: Sequence[float], beta: float = 0.2) -> float:
    """The mean without the int(beta n) lowest and highest."""
    drop = int(beta * len(column))
    kept = sorted(column)[drop : len(column) - drop]
    return math.fsum(kept) / len(kept)


RULES: dict[str, Callable[..., float]] = {"mean": mean, "median": median, "trimmed": trimmed}


class Server:
    """One parameter w of a model, and a server's step after each round.

    `go` takes `moved`, what the rule made of the clients' w_i - w in this round, and changes `w`.
    """

    def __init__(self, w: float, **options: float) -> None:
        self.w = w
        self.m = self.v = 0.0
        self.round = 0
        self.options = options

    def go(self, moved: float) -> None:
        """Make a step."""
        self.round += 1
        self.step(moved, **self.options)

    def step(self, d: float) -> None:
        """FedAvg: the mean of the clients' parameters."""
        self.w += d


class Nesterov(Server):
    """m <- mu m + D, w <- w - alpha (D + mu m), with D = -d."""

    def step(self, d: float, lr: float = 0.7, momentum: float = 0.9) -> None:
        """Make a step."""
        self.m = momentum * self.m - d
        self.w -= lr * (-d + momentum * self.m)


class Descent(Server):
    """w <- w - lr g, with g = -d."""

    def step(self, d: float, lr: float = 1.0) -> None:
        """Make a step."""
        self.w += lr * d


class FedAvgM(Server):
    """Heavy ball: v <- m v + g, w <- w - lr v, with g = -d."""

    def step(self, d: float, lr: float = 1.0, momentum: float = 0.9) -> None:
        """Make a step."""
        self.v = -d if self.round == 1 else momentum * self.v - d
        self.w -= lr * self.v


class FedAdagrad(Server):
    """v <- v + d^2, w <- w + eta d / (sqrt v + tau)."""

    def step(self, d: float, eta: float = 0.1, tau: float = 1e-3) -> None:
        """Make a step."""
        self.v += d**2
        self.w += eta * d / (math.sqrt(self.v) + tau)


class FedAdam(Server):
    """Adam with Flower's bias correction, whose exponent is 2 in the first round."""

    def step(
        self, d: float, eta: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
    ) -> None:
        """Make a step."""
        self.m = beta1 * self.m + (1 - beta1) * d
        self.v = beta2 * self.v + (1 - beta2) * d**2
        rate = eta * math.sqrt(1 - beta2 ** (self.round + 1)) / (1 - beta1 ** (self.round + 1))
        self.w += rate * self.m / (math.sqrt(self.v) + tau)


class FedYogi(Server):
    """Yogi, without a bias correction."""

    def step(
        self, d: float, eta: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
    ) -> None:
        """Make a step."""
        self.m = beta1 * self.m + (1 - beta1) * d
        sign = math.copysign(1, self.v - d**2) if self.v != d**2 else 0
        self.v -= (1 - beta2) * d**2 * sign
        self.w += eta * self.m / (math.sqrt(self.v) + tau)


OUTER: dict[str, type[Server]] = {
    "average": Server,
    "descent": Descent,
    "nesterov": Nesterov,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
}

ROUNDS = 4

SIZES = {"bias": (7,), "weight": (20, 10)}


def noise(*seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(sum(one * 1000**at for at, one in enumerate(seed, 1)))
    return {name: scale * torch.randn(size, generator=chance) for name, size in SIZES.items()}


class Noisy:
    """A script whose training moves the model by numbers drawn from a seed."""

    def __init__(self, index: int) -> None:
        self.index, self.samples, self.model = index, 10.0 + 7 * index, noise(99)

    def fit(self, task: Any) -> tuple[float, dict[str, float]]:
        for name, moved in noise(self.index, task.number, scale=0.1).items():
            self.model[name].add_(moved)
        return self.samples, {"loss": math.sin(self.index + task.number)}

    def evaluate(self, task: Any) -> tuple[float, dict[str, float]]:
        return 1.0 + self.index, {"score": math.cos(self.index + task.number)}


def assert_reference(scripts: Mapping[str, Noisy], history: Sequence[Any], outer: str, rule: str) -> None:
    """The model of the scripts, by PeerID, after `ROUNDS` rounds, and all metrics are those of one number at a time."""
    name, _, beta = rule.partition(":beta=")
    peers, weights = [*scripts.values()], [one.samples for one in scripts.values()]
    servers = {key: [OUTER[outer](w) for w in one.flatten().tolist()] for key, one in noise(99).items()}
    for number in range(1, ROUNDS + 1):
        moved = [noise(one.index, number, scale=0.1) for one in peers]
        for key, column in servers.items():
            rows = torch.stack([one[key].flatten() for one in moved]).T.tolist()
            for server, values in zip(column, rows, strict=True):
                server.go(RULES[name](values, weights, *([float(beta)] if beta else [])))
    for key, column in servers.items():
        expected = torch.tensor([server.w for server in column], dtype=torch.float64)
        found = peers[0].model[key].flatten().double()
        assert float((found - expected).abs().max() / expected.abs().max()) <= 2e-6
    for record in history:
        assert record.contributors == {peer: one.samples for peer, one in scripts.items()}
        losses = [math.sin(one.index + record.number) for one in peers]
        scores = [math.cos(one.index + record.number - 1) for one in peers]
        # Metrics are averaged, or their medians are taken.
        loss, score = sorted(losses)[2], sorted(scores)[2]
        if rule == "mean":
            loss, score = mean(losses, weights), mean(scores, [1.0 + one.index for one in peers])
        assert record.metrics["loss"] == pytest.approx(loss, rel=1e-12, abs=1e-15)
        assert record.evaluation["score"] == pytest.approx(score, rel=1e-12, abs=1e-15)
