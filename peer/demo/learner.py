"""One learner: a small network, AdamW, and batches drawn from its own share of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from equipoise.peer.demo.digits import Digits
from equipoise.peer.demo.options import BATCH, BATCHES_PER_PEER

HIDDEN = 256
LEARNING_RATE = 5e-3

MODEL_SEED = 1
"""All peers start from the same parameters, as the peer that trains alone does."""


class Learner:
    """Trains on one share of the data.

    Attributes:
        model: The network.
        optimizer: Steps it, by itself or wrapped by a run.
    """

    def __init__(self, share: Digits, seed: int) -> None:
        self.model = _network()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._batches = _batches(share, torch.Generator().manual_seed(seed))

    def backward(self, batches: int = 1) -> tuple[float, int]:
        """Put the mean gradient of the next `batches` into the parameters' `.grad`; returns (mean loss, samples)."""
        drawn = [next(self._batches) for _ in range(batches)]
        pixels, labels = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(pixels), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), len(labels)

    def accuracy(self, test: Digits) -> float:
        """Fraction of `test` that is classified correctly, 0 to 1."""
        with torch.no_grad():
            return float((self.model(test.pixels).argmax(1) == test.labels).float().mean())

    def digest(self) -> str:
        """SHA-256 in hex of all parameters' bytes."""
        content = hashlib.sha256()
        for parameter in self.model.parameters():
            content.update(parameter.detach().contiguous().numpy().tobytes())
        return content.hexdigest()

    @property
    def values(self) -> int:
        """Number of values in the gradient."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def train_alone(share: Digits, seed: int, updates: int) -> Learner:
    """A learner that has made `updates` from its own share alone, each from a peer's part of the target batch."""
    learner = Learner(share, seed)
    for _ in range(updates):
        learner.backward(BATCHES_PER_PEER)
        learner.optimizer.step()
    return learner


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(MODEL_SEED)
        return nn.Sequential(
            nn.Linear(64, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 10),
        )


def _batches(share: Digits, generator: torch.Generator) -> Iterator[Digits]:
    """Batches of `BATCH` samples for ever, the share shuffled anew each time it has been seen whole."""
    while True:
        order = torch.randperm(len(share.labels), generator=generator)
        for start in range(0, len(order), BATCH):
            yield share.pick(order[start : start + BATCH])
