"""The training loop of `train_text.py` three times: plain PyTorch, with target batches, and with DiLoCo.

They differ in what makes peers train together, and in nothing else; the README shows the difference.
"""

from __future__ import annotations

from collections.abc import Iterator

from text_data import Batch
from text_model import TextModel
from torch.optim import AdamW

from equipoise.peer import connect
from equipoise.peer.training import DiLoCo

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


def diloco(model: TextModel, batches: Iterator[Batch], steps: int, every: int) -> None:
    """Each peer by itself for `every` steps, then an outer step from where all have come to."""
    with connect() as peer, peer.join("text-diloco", model) as run, DiLoCo(run, every=every) as group:
        optimizer = AdamW(model.parameters(), lr=LR)
        while group.steps < steps:
            optimizer.zero_grad()
            model(next(batches)).backward()
            optimizer.step()
