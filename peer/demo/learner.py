"""One learner: a small network, AdamW, and batches drawn from its own share of the data.

The data are scikit-learn's handwritten digits: half of them for the test, the rest dealt out to the peers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn

from equipoise.peer.demo.options import BATCH, BATCHES_PER_PEER

TEST_FRACTION = 0.5
"""Share of the test: so few images remain that a peer's own are too few, which is what a swarm is for."""

SPLIT_SEED = 0
"""Seed of the split: all processes must deal alike."""

MAX_PIXEL = 16.0

HIDDEN = 256
LEARNING_RATE = 5e-3

MODEL_SEED = 1
"""All peers start from the same parameters, as the peer that trains alone does."""


class Digits(NamedTuple):
    """Images and their labels.

    Attributes:
        pixels: f32 [N, 64], from 0 to 1.
        labels: i64 [N], from 0 to 9.
    """

    pixels: torch.Tensor
    labels: torch.Tensor

    def pick(self, index: torch.Tensor) -> Digits:
        """The images at `index`, i64 [n]."""
        return Digits(self.pixels[index], self.labels[index])


def split_digits() -> tuple[Digits, Digits]:
    """All images as (training, test), shuffled alike in every process."""
    bunch = load_digits()
    pixels = torch.as_tensor(bunch.data, dtype=torch.float32) / MAX_PIXEL
    digits = Digits(pixels, torch.as_tensor(bunch.target, dtype=torch.int64))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    tests = int(len(order) * TEST_FRACTION)
    return digits.pick(order[tests:]), digits.pick(order[:tests])


def deal(training: Digits, index: int, peers: int) -> Digits:
    """Peer `index`'s own share of the training images: each image belongs to exactly one of `peers`."""
    return training.pick(torch.arange(index, len(training.labels), peers))


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
