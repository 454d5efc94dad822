"""Peers train a small transformer from scratch, by local steps and exchanges of 4 or 8 bits a value.

The text is the source of Python's standard library, character by character: each peer has a piece that no other has.
With `--method diloco` the peers exchange every `--every` steps what they have moved by, with `--method optimizer` the
gradients of each step. The steps are those of Muon, where torch has it, or of AdamW.

    python pretrain_text.py --peers 4 --small       # a whole swarm on this machine
    python pretrain_text.py --of 2                  # the first of two machines; it prints its address
    python pretrain_text.py --of 2 --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from local_swarm import Curve, Result, main

from equipoise.peer import Peer
from equipoise.peer.training import DiLoCo

sys.path.append(str(Path(__file__).resolve().parents[1]))  # The benchmarks train the same transformer.

from text_data import Windows, evaluation_batches, piece, read_text
from text_model import TextModel, held_out_loss

LENGTH, BATCH, POINTS = 64, 8, 10
"""Characters of a window, windows of a batch, and points of the curve."""

INNER = ["muon", "adamw"] if hasattr(torch.optim, "Muon") else ["adamw"]


def optimizer_of(model: TextModel, name: str) -> torch.optim.Optimizer:
    """Muon for all matrices, and this model has nothing else; or AdamW."""
    if name == "muon":
        return torch.optim.Muon(model.parameters(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(peer: Peer | None, options: argparse.Namespace) -> Result:
    """Train for so many steps, each of a batch of this peer's piece."""
    text, model = read_text(), TextModel(length=LENGTH)
    seed = options.index + 100 * options.seed
    batches = Windows(piece(text.training, options.index, options.of), BATCH, LENGTH, seed)
    tests = evaluation_batches(text, 2 if options.small else 8, 32, LENGTH)
    steps, every = (30, 10) if options.small else (options.steps, options.every)
    pause = every if options.small else max(steps // POINTS, 1)
    inner = optimizer_of(model, options.inner)
    curve = Curve(lambda: held_out_loss(model, tests))

    def backward() -> None:
        inner.zero_grad()
        model(next(batches)).backward()

    if peer is None:
        for step in range(steps):
            if step % pause == 0:
                curve.add(None)
            backward()
            inner.step()
        curve.add(None)
        return curve.result(model.parameters())
    others = options.of - 1
    with peer.join("pretrain", model, codec=options.codec) as run:
        if options.method == "diloco":
            with DiLoCo(run, every=every, wait_for=others) as group:
                while group.epoch < steps // every:
                    if group.steps % every == 0:
                        curve.add(run)
                    backward()
                    inner.step()
        else:
            target = BATCH * options.of
            optimizer = run.optimizer(inner, target_batch_size=target, batch_size=BATCH, wait_for=others)
            while optimizer.epoch < steps:
                if optimizer.epoch % pause == 0:
                    curve.add(run)
                backward()
                optimizer.step()
            optimizer.finish()
        curve.add(run)
    return curve.result(model.parameters())


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", choices=["diloco", "optimizer"], default="diloco", help="how to train together"
    )
    parser.add_argument("--inner", choices=INNER, default=INNER[0], help="the optimizer of each peer")
    parser.add_argument("--codec", default="int8", help="how values travel")
    parser.add_argument("--steps", type=int, default=400, help="steps of each peer")
    parser.add_argument("--every", type=int, default=50, help="steps between two exchanges of diloco")


if __name__ == "__main__":
    main(train, __doc__, add)
