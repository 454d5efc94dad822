"""One trainer of the demo, a process of its own: `python -m equipoise.peer.demo.trainer`.

It uses the public client only, as any training script would: connect, join, wrap the optimizer, train. Its learner is a
small network, AdamW, and batches drawn from its own share of the data: scikit-learn's handwritten digits, half of them
for the test, the rest dealt out to the peers. In federated rounds the learner is a softmax regression with plain SGD:
peers that each have a few classes pull a deeper network too far apart for so few rounds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from equipoise.peer import Outcome, Run, connect
from equipoise.peer.demo.options import (
    BATCH,
    BATCHES_PER_PEER,
    CLASSES,
    EXCHANGE_STEPS,
    FIT_EPOCHS,
    DemoOptions,
)
from equipoise.peer.demo.summary import Failed, Finished, Report, Stepped
from equipoise.peer.simulation import partition
from equipoise.peer.training import Federated, Gossip, Task
from equipoise.peer.training.image import digest

TEST_FRACTION = 0.5
"""Share of the test: so few images remain that a peer's own are too few, which is what a swarm is for."""

SPLIT_SEED = 0
"""Seed of the split: all processes must deal alike."""

MAX_PIXEL = 16.0

PIXEL_MEAN, PIXEL_DEVIATION = 0.3, 0.38
"""Of all pixels, from 0 to 1: SGD wants its inputs about 0, with a deviation of 1."""

HIDDEN = 256
LEARNING_RATE = 5e-3
FIT_RATE = 0.1

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
    from sklearn.datasets import load_digits  # A second, for those that only want the rest of this module.

    bunch = load_digits()
    pixels = torch.as_tensor(bunch.data, dtype=torch.float32) / MAX_PIXEL
    digits = Digits(pixels, torch.as_tensor(bunch.target, dtype=torch.int64))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    tests = int(len(order) * TEST_FRACTION)
    return digits.pick(order[tests:]), digits.pick(order[:tests])


def standardised(digits: Digits) -> Digits:
    """The images with pixels about 0, with a deviation of about 1."""
    return Digits((digits.pixels - PIXEL_MEAN) / PIXEL_DEVIATION, digits.labels)


def deal(images: Digits, index: int, peers: int, split: str = "iid") -> Digits:
    """Peer `index`'s own share of the images, dealt by `split`: each image belongs to one of `peers` at most."""
    return images.pick(torch.as_tensor(partition(images.labels, peers, split)[index]))


class Learner:
    """Trains on one share of the data.

    Attributes:
        model: The network.
        optimizer: Steps it, by itself or wrapped by a run.
        samples: Images of its share.
    """

    def __init__(self, share: Digits, seed: int, federated: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(MODEL_SEED)
            inner = (nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
            deep = nn.Sequential(*inner, nn.Linear(HIDDEN, CLASSES))
            self.model: nn.Module = nn.Linear(64, CLASSES) if federated else deep
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=FIT_RATE)
            if federated
            else torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        )
        self.samples = len(share.labels)
        self._batches = _batches(share, torch.Generator().manual_seed(seed))

    def backward(self, batches: int = 1) -> tuple[float, int]:
        """Put the mean gradient of the next `batches` into the parameters' `.grad`; returns (mean loss, samples)."""
        drawn = [next(self._batches) for _ in range(batches)]
        pixels, labels = (torch.cat(tensors) for tensors in zip(*drawn, strict=True))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(pixels), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item(), len(labels)

    def fit(self) -> float:
        """Train as a drawn peer does, `FIT_EPOCHS` times through its share; returns the mean loss."""
        losses = []
        for _ in range(FIT_EPOCHS * math.ceil(self.samples / BATCH)):
            losses.append(self.backward()[0])
            self.optimizer.step()
        return fmean(losses)

    def accuracy(self, test: Digits) -> float:
        """Fraction of `test` that is classified correctly, 0 to 1."""
        with torch.no_grad():
            return float((self.model(test.pixels).argmax(1) == test.labels).float().mean())

    def digest(self) -> str:
        """BLAKE3 in hex of all parameters."""
        return digest(dict(self.model.named_parameters()))


def train_alone(share: Digits, seed: int, updates: int, federated: bool = False) -> Learner:
    """A learner that has made `updates` from its own share alone: each as a drawn peer trains in a federated round, or
    from a peer's part of the target batch."""
    learner = Learner(share, seed, federated)
    for _ in range(updates):
        if federated:
            learner.fit()
            continue
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
        learner.optimizer,
        target_batch_size=BATCH * BATCHES_PER_PEER * options.peers,
        alone="wait",
        wait_for=options.peers - 1,
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


def federated(run: Run, learner: Learner, options: DemoOptions, test: Digits) -> str:
    """Train when drawn, evaluate on `test`, and report each round; returns the digest of the agreed state."""

    def fit(task: Task) -> tuple[float, dict[str, float]]:
        return float(learner.samples), {"loss": learner.fit()}

    def evaluate(task: Task) -> tuple[float, dict[str, float]]:
        return float(len(test.labels)), {"accuracy": learner.accuracy(test)}

    wait_for = options.peers - 1
    trained = Federated(run, fit, evaluate, options.outer, rounds=options.rounds, wait_for=wait_for)
    while not trained.ended:
        record = trained.step()
        if not record.ok:
            _say(Failed(update=record.number, reason=record.reason))
            continue
        outcome = trained.member.last
        # Where the mean was fetched, the last outcome is of an earlier round.
        if outcome is None or outcome.digest != record.digest:
            outcome = Outcome(ok=True, reason=record.reason)
        report = _stepped(learner, record.number, record.metrics.get("loss", 0.0), outcome)
        _say(
            msgspec.structs.replace(
                report,
                contributors=len(record.contributors),
                seconds=record.seconds,
                drawn=len(record.drawn),
                accuracy=record.evaluation.get("accuracy"),
            )
        )
    trained.finish()
    return digest({"state": trained.member.image()})


def main() -> None:
    """Train as told by the arguments HOME INDEX OPTIONS, and report on standard output."""
    home, index = Path(sys.argv[1]), int(sys.argv[2])
    options = msgspec.json.decode(sys.argv[3], type=DemoOptions)
    torch.set_num_threads(1)
    training, test = split_digits()
    if options.federated:
        training, test = standardised(training), standardised(test)
    share = deal(training, index, options.peers, options.split)
    learner = Learner(share, index, options.federated)
    with (
        connect(home=home) as peer,
        peer.join(
            "digits",
            learner.model,
            strategy=options.strategy,
            rule=options.rule,
            codec=options.codec,
            group_size=options.peers,
        ) as run,
    ):
        agreed = ""
        if options.federated:
            agreed = federated(run, learner, options, deal(test, index, options.peers))
        else:
            (gossip if run.strategy.pairs else train)(run, learner, options)
    alone = train_alone(share, index, options.rounds, options.federated).accuracy(test)
    _say(Finished(digest=agreed or learner.digest(), accuracy=learner.accuracy(test), alone=alone))


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
