"""Peers train a small transformer that none of them holds whole: four stages, each with a block, and channels between.

The text is the source of Python's standard library, character by character. The first four peers take a stage each, and
further ones help at stages 1 and 2. Peers of stage 0 have the text, and the loss is that of the batches: peers of other
stages than the first and the last see it too.

    python pipeline.py --peers 6 --small            # a whole swarm on this machine
    python pipeline.py --of 4                       # the first of four machines; it prints its address
    python pipeline.py --of 4 --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from local_swarm import Point, Result, Train, answer, children, digest, main, trained_together
from torch.nn.functional import cross_entropy

from equipoise.peer import Peer
from equipoise.peer.training import Pipeline

sys.path.append(str(Path(__file__).resolve().parents[1]))  # The benchmarks train the same transformer.

from text_data import Windows, read_text
from text_model import TextModel, norm

STAGES, LENGTH, BATCH, POINTS = 4, 64, 16, 20
"""Stages, characters of a window, windows of a batch, and points of the curve."""

HELPED = (1, 2)
"""The stages of the fifth peer, the sixth, and so on in turn."""


class Part(torch.nn.Module):
    """One block of the transformer; the first part has the embedding too, and the last one the output layer."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        whole = TextModel(layers=STAGES, length=LENGTH)
        self.embedding = whole.embedding if stage == 0 else None
        self.block = whole.blocks[stage]
        self.head = whole.head if stage == STAGES - 1 else None
        self.rotation = whole.cos, whole.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of characters, i64 (B, T), or f32 (B, T, C), to f32 (B, T, C), or logits (B, T, V)."""
        x = x if self.embedding is None else norm(self.embedding(x))
        x = self.block(x, self.rotation)
        return x if self.head is None else self.head(norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits, f32 (B, T, V), and characters, i64 (B, T)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)  # type: ignore[arg-type]


def train(peer: Peer | None, options: argparse.Namespace) -> Result:
    """Train for so many updates, as a peer of one stage or, alone, with the whole model."""
    updates, losses, points = 40 if options.small else options.updates, list[float](), list[Point]()
    batches = Windows(read_text().training, BATCH, LENGTH, options.seed)
    pause, began = max(updates // POINTS, 1), time.monotonic()

    def note(loss: float) -> None:
        losses.append(loss)
        if len(losses) % pause == 0:
            points.append(Point(time.monotonic() - began, sum(losses[-pause:]) / pause, 0))

    if peer is None:
        model = torch.nn.Sequential(*map(Part, range(STAGES)))
        inner = adamw(model.parameters())
        while len(losses) < updates:
            inputs, targets = next(batches)
            loss = loss_of(model(inputs), targets)
            inner.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            inner.step()
            note(loss.item())
        return Result(points, digest(model.parameters()))
    stage = options.index if options.index < STAGES else HELPED[options.index % len(HELPED)]
    with peer.join("pipeline", [torch.zeros(1)], codec="fp32") as run:
        run.wait_for(options.of - 1)
        parts = [lambda at=at: Part(at) for at in range(STAGES)]
        pipe = Pipeline(run, parts, options.micro_batches, options.codec, options.schedule, stage, adamw)
        while pipe.optimizer.epoch < updates:
            inputs, targets = next(batches)  # Used at stage 0.
            seen = pipe.step(inputs, targets, loss_of)
            if not math.isnan(seen):
                note(seen)
        pipe.finish()
    return Result(points, digest(pipe.module.parameters()))


def run_pipeline(train: Train, options: argparse.Namespace) -> int:
    """Run a pipeline on this machine, and then one machine with the whole model."""
    count = options.peers
    if count < STAGES:
        raise SystemExit(f"expected at least {STAGES} peers, one for each stage, got {count}")
    with children(train, options) as start:
        together = trained_together(start, count)
        alone = answer(start(alone=True))
    found = {
        "loss": together[0].end.loss,
        "loss_alone": alone.end.loss,
        "seconds": together[0].end.seconds,
        "seconds_alone": alone.end.seconds,
        "digests": len({one.digest for one in together}),
    }
    rows = {f"{count} peers together": together[0].end, "alone, whole model": alone.end}
    told = [f"{name:20} loss {end.loss:.4f}  {end.seconds:6.1f} s" for name, end in rows.items()]
    alike = found["digests"] == STAGES
    told.append("peers of a stage hold equal parameters" if alike else "PEERS OF A STAGE DIFFER")
    print(json.dumps(found) if options.json else "\n".join(told))
    return 0 if alike else 1


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--updates", type=int, default=400, help="updates of the model")
    parser.add_argument("--micro-batches", type=int, default=8, help="parts of a batch")
    parser.add_argument("--codec", default="fp16", help="how activations and gradients travel between stages")
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b", help="the order of passes")


if __name__ == "__main__":
    main(train, __doc__, add, swarm=run_pipeline)
