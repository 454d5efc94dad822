"""A training loop twice: plain PyTorch, and with target batches.

They differ in what makes peers train together, and in nothing else; the README shows the difference.
"""

from __future__ import annotations

from collections.abc import Iterator

from text_data import Batch
from text_model import TextModel
from torch.optim import AdamW

from equipoise.peer import connect

LR = 3e-3


def plain(model: TextModel, batches: Iterator[Batch], steps: int) -> None:
    """What anybody writes who trains alone."""
    optimizer = AdamW(model.parameters(), lr=LR)
    for _ in range(steps):
        optimizer.zero_grad()
        model(next(batches)).backward()
        optimizer.step()


def target_batch(model: TextModel, batches: Iterator[Batch], steps: int, size: int, target: int) -> None:
    """All peers make the same step, whenever they have seen `target` samples together, `size` in each batch."""
    with connect() as peer, peer.join("text-sync", model) as run:
        optimizer = run.optimizer(AdamW(model.parameters(), lr=LR), batch_size=size, target_batch_size=target)
        while optimizer.epoch < steps:
            optimizer.zero_grad()
            model(next(batches)).backward()
            optimizer.step()
