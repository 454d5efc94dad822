"""One trainer of the demo, a process of its own: `python -m equipoise.peer.demo.trainer`.

It uses the public client only, as any training script would: connect, join, wrap the optimizer, train. Its learner is a
small network, AdamW, and batches drawn from its own share of the data: scikit-learn's handwritten digits, half of them
for the test, the rest dealt out to the peers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from sklearn.datasets import load_digits
from torch import nn

from equipoise.peer import Outcome, Run, connect
from equipoise.peer.demo.options import BATCH, BATCHES_PER_PEER, EXCHANGE_STEPS, DemoOptions
from equipoise.peer.demo.summary import Failed, Finished, Report, Stepped
from equipoise.peer.training import Gossip
from equipoise.peer.training.image import digest

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
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(MODEL_SEED)
            inner = (nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
            self.model = nn.Sequential(*inner, nn.Linear(HIDDEN, 10))
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
        """BLAKE3 in hex of all parameters."""
        return digest(dict(self.model.named_parameters()))


def train_alone(share: Digits, seed: int, updates: int) -> Learner:
    """A learner that has made `updates` from its own share alone, each from a peer's part of the target batch."""
    learner = Learner(share, seed)
    for _ in range(updates):
        learner.backward(BATCHES_PER_PEER)
        learner.optimizer.step()
    return learner


def _batches(share: Digits, generator: torch.Generator) -> Iterator[Digits]:
    """Batches of `BATCH` samples for ever, the share shuffled anew each time it has been seen whole."""
    while True:
        order = torch.randperm(len(share.labels), generator=generator)
        for start in range(0, len(order), BATCH):
            yield share.pick(order[start : start + BATCH])


def train(run: Run, learner: Learner, options: DemoOptions) -> None:
    """Make all updates together with the others, and report each."""
    optimizer = run.optimizer(
        learner.optimizer, target_batch_size=options.target, alone="wait", wait_for=options.peers - 1
    )
    losses: list[float] = []
    while optimizer.epoch < options.rounds:
        before, last = optimizer.epoch, optimizer.last
        loss, optimizer.batch_size = learner.backward()
        losses.append(loss)
        optimizer.step()
        outcome = optimizer.last
        if outcome is None or outcome is last:
            continue
        if not outcome.ok:
            _say(Failed(update=before + 1, reason=outcome.reason))
        elif optimizer.epoch > before:
            _say(_stepped(learner, optimizer.epoch, sum(losses) / len(losses), outcome))
            losses.clear()


def gossip(run: Run, learner: Learner, options: DemoOptions) -> None:
    """Make as many local steps, exchange with some other peer now and then, and report each stretch between."""
    with Gossip(run, every=EXCHANGE_STEPS, wait_for=options.peers - 1) as trained:
        for update in range(1, options.rounds + 1):
            losses, before = [], trained.last
            for _ in range(BATCHES_PER_PEER):
                losses.append(learner.backward()[0])
                learner.optimizer.step()
            new = trained.last if trained.last is not before else None
            outcome = new or Outcome(ok=True, reason="no exchange")
            _say(_stepped(learner, update, sum(losses) / len(losses), outcome))
    finished = trained.finished
    if finished is not None and not finished.ok:
        _say(Failed(update=options.rounds, reason=finished.reason))


def main() -> None:
    """Train as told by the arguments HOME INDEX OPTIONS, and report on standard output."""
    home, index = Path(sys.argv[1]), int(sys.argv[2])
    options = msgspec.json.decode(sys.argv[3], type=DemoOptions)
    torch.set_num_threads(1)
    training, test = split_digits()
    share = deal(training, index, options.peers)
    learner = Learner(share, seed=index)
    with (
        connect(home=home) as peer,
        peer.join(
            "digits", learner.model, strategy=options.strategy, codec=options.codec, group_size=options.peers
        ) as run,
    ):
        (gossip if run.strategy.pairs else train)(run, learner, options)
    alone = train_alone(share, index, options.rounds).accuracy(test)
    _say(Finished(digest=learner.digest(), accuracy=learner.accuracy(test), alone=alone))


def _stepped(learner: Learner, update: int, loss: float, outcome: Outcome) -> Stepped:
    # A peer sends its part of the vector's mean to the others, and of its own values the parts of the others.
    size = sum(parameter.nbytes for parameter in learner.model.parameters())
    in_fp32 = round(2 * size * (1 - 1 / max(len(outcome.group), 1)))
    return Stepped(
        update=update,
        group=len(outcome.group),
        contributors=len(outcome.contributors),
        loss=loss,
        bytes_sent=outcome.bytes_sent,
        bytes_saved=in_fp32 - outcome.bytes_sent,
        seconds=outcome.seconds.get("total", 0.0),
    )


def _say(report: Report) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main()
