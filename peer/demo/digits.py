"""The demo's data: scikit-learn's handwritten digits, half of them for the test, the rest dealt out to the peers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits

TEST_FRACTION = 0.5
"""898 of 1,797 images: few enough remain for a peer's own share to be too little, which is what a swarm is for."""

SPLIT_SEED = 0
"""All processes must deal alike."""

MAX_PIXEL = 16.0


class Digits(NamedTuple):
    """Images and what they show.

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
