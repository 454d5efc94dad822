"""Peers train a convolutional network with BatchNorm on handwritten digits, with augmentation.

Each peer has its share of scikit-learn's 1,797 images; a quarter is for the test. BatchNorm's statistics are averaged
with the parameters. `--method optimizer` makes each step together, `--method diloco` exchanges every 10 steps.

    python images.py --peers 3 --small              # a whole swarm on this machine
    python images.py --of 2                         # the first of two machines; it prints its address
    python images.py --of 2 --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse

import torch
from local_swarm import Curve, Result, main
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, pad

from equipoise.peer import Peer
from equipoise.peer.simulation import partition
from equipoise.peer.training import DiLoCo

BATCH, EVERY = 32, 10

Images = tuple[torch.Tensor, torch.Tensor]
"""Pixels from 0 to 1, f32 [N, 1, 8, 8], and labels, i64 [N]."""


def data(index: int, peers: int) -> tuple[Images, Images]:
    """One peer's share of the images, and the test."""
    bunch = load_digits()
    pixels = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    tests = torch.arange(len(labels)) % 4 == 0
    mine = torch.as_tensor(partition(labels[~tests], peers, "iid")[index])
    return (pixels[~tests][mine], labels[~tests][mine]), (pixels[tests], labels[tests])


def augmented(pixels: torch.Tensor) -> torch.Tensor:
    """Shift a batch by up to one pixel in each direction, f32 [n, 1, 8, 8]."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    return pad(pixels, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]


def network() -> nn.Module:
    """Two convolutions with BatchNorm; all peers begin from the same parameters."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(32 * 16, 10))


def train(peer: Peer | None, options: argparse.Namespace) -> Result:
    """Train for some hundred steps."""
    (pixels, labels), test = data(options.index, options.of)
    model, steps = network(), 60 if options.small else 600
    torch.manual_seed(1 + options.index + 100 * options.seed)  # Each peer draws and shifts images of its own.
    inner = torch.optim.AdamW(model.parameters(), 2e-3)

    def backward() -> None:
        chosen = torch.randint(len(labels), (BATCH,))
        inner.zero_grad()
        loss = cross_entropy(model(augmented(pixels[chosen])), labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def judged() -> float:
        model.eval()
        loss = cross_entropy(model(test[0]), test[1]).item()
        model.train()
        return loss

    curve = Curve(judged)
    if peer is None:
        for step in range(steps):
            if step % EVERY == 0:
                curve.add(None)
            backward()
            inner.step()
        curve.add(None)
    else:
        others = options.of - 1
        with peer.join("images", model, codec="nf4" if options.method == "diloco" else "int8") as run:
            if options.method == "diloco":
                with DiLoCo(run, every=EVERY, buffers=True, wait_for=others) as group:
                    while group.epoch < steps // EVERY:
                        if group.steps % EVERY == 0:
                            curve.add(run)
                        backward()
                        inner.step()
            else:
                target = BATCH * options.of
                optimizer = run.optimizer(
                    inner, target_batch_size=target, batch_size=BATCH, buffers=True, wait_for=others
                )
                while optimizer.epoch < steps:
                    if optimizer.epoch % EVERY == 0:
                        curve.add(run)
                    backward()
                    optimizer.step()
                optimizer.finish()
            curve.add(run)
    return curve.result(model.parameters())


if __name__ == "__main__":
    main(
        train,
        __doc__,
        lambda parser: parser.add_argument(
            "--method", choices=["optimizer", "diloco"], default="optimizer", help="how to train together"
        ),
    )
