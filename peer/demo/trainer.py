"""One trainer of the demo, a process of its own: `python -m equipoise.peer.demo.trainer`.

It uses the public client only, as any training script would. Its learner is a small network with AdamW, its data a
share of scikit-learn's handwritten digits, half of which are for the test. In federated rounds the learner is a softmax
regression with plain SGD: peers that each have a few classes pull a deeper network too far apart for so few rounds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from equipoise.averaging.counts import count
from equipoise.peer import Outcome, Run, connect
from equipoise.peer.demo.options import CLASSES, DemoOptions
from equipoise.peer.demo.summary import Doing, Failed, Finished, Report, Stepped, is_point
from equipoise.peer.simulation import partition
from equipoise.peer.training import Federated, Gossip, Task
from equipoise.peer.training.image import digest

BATCH = 32

BATCHES_PER_PEER = 2
"""The swarm steps when it has this many batches for each peer, wherever they came from."""

EXCHANGE_STEPS = 4
"""Local steps from one exchange to the next, where the peers gossip."""

UPDATE_SECONDS = 0.1
"""Least time for a gossiping peer's update: else all of them would be over before two peers have met."""

FIT_EPOCHS = 2
"""Times that a peer drawn for a federated round goes through its own images."""

TEST_FRACTION = 0.5
"""Share of the test: so few images remain that a peer's own are too few, which is what a swarm is for."""

MAX_PIXEL, PIXEL_MEAN, PIXEL_DEVIATION = 16.0, 0.3, 0.38
"""Of all pixels, the last two after division by the first: SGD wants inputs about 0, with a deviation of 1."""

HIDDEN, LEARNING_RATE, FIT_RATE = 256, 5e-3, 0.1

SPLIT_SEED, MODEL_SEED = 0, 1
"""All processes deal alike and start from the same parameters, as does the peer that trains alone."""


class Digits(NamedTuple):
    """Images, f32 [N, 64] with pixels from 0 to 1, and their labels, i64 [N] from 0 to 9."""

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
    """Trains `model` by `optimizer` on one share of the data, which has `samples` images."""

    def __init__(self, share: Digits, seed: int, federated: bool = False) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(MODEL_SEED)
            inner = (nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
            deep = nn.Sequential(*inner, nn.Linear(HIDDEN, CLASSES))
            self.model: nn.Module = nn.Linear(64, CLASSES) if federated else deep
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=FIT_RATE)
            if federated
            else torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
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

    def steps(self, count: int) -> float:
        """Make steps of one batch each; returns the mean loss."""
        losses = []
        for _ in range(count):
            losses.append(self.backward()[0])
            self.optimizer.step()
        return fmean(losses)

    def fit(self) -> float:
        """Train as a drawn peer does, `FIT_EPOCHS` times through its share; returns the mean loss."""
        return self.steps(FIT_EPOCHS * math.ceil(self.samples / BATCH))

    def accuracy(self, test: Digits) -> float:
        """Fraction of `test` that is classified correctly, 0 to 1."""
        with torch.no_grad():
            return float((self.model(test.pixels).argmax(1) == test.labels).float().mean())

    def digest(self) -> str:
        """BLAKE3 in hex of all parameters."""
        return digest(dict(self.model.named_parameters()))


def train_alone(
    share: Digits,
    seed: int,
    updates: int,
    federated: bool = False,
    look: Callable[[Learner], object] = lambda learner: None,
) -> Learner:
    """A learner that has made `updates` from its own share alone: each as a drawn peer trains in a federated round, or
    from a peer's part of the target batch. `look` is called after each."""
    learner = Learner(share, seed, federated)
    for _ in range(updates):
        if federated:
            learner.fit()
        else:
            learner.backward(BATCHES_PER_PEER)
            learner.optimizer.step()
        look(learner)
    return learner


def _batches(share: Digits, generator: torch.Generator) -> Iterator[Digits]:
    """Batches of `BATCH` samples for ever, the share shuffled anew each time it has been seen whole."""
    while True:
        order = torch.randperm(len(share.labels), generator=generator)
        for start in range(0, len(order), BATCH):
            yield share.pick(order[start : start + BATCH])


def in_step(run: Run, learner: Learner, options: DemoOptions) -> Iterator[Report]:
    """Make all updates together with the others, by the swarm's batches."""
    target = BATCH * BATCHES_PER_PEER * options.peers
    optimizer = run.optimizer(learner.optimizer, target_batch_size=target, alone="wait")
    _wait_for_others(run, options)
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
            yield Failed(update=before + 1, reason=outcome.reason)
        elif optimizer.epoch > before:
            yield _stepped(optimizer.epoch, fmean(losses), outcome)
            losses.clear()


def gossip(run: Run, learner: Learner, options: DemoOptions) -> Iterator[Report]:
    """Make as many local steps, exchange with some other peer now and then, and report each stretch between."""
    with Gossip(run, every=EXCHANGE_STEPS) as trained:
        _wait_for_others(run, options)
        for update in range(1, options.rounds + 1):
            began, before = time.monotonic(), trained.last
            loss, last = learner.steps(BATCHES_PER_PEER), trained.last
            yield _stepped(update, loss, None if last is before else last)
            time.sleep(max(0.0, began + UPDATE_SECONDS - time.monotonic()))
    if trained.finished is not None and not trained.finished.ok:
        yield Failed(update=options.rounds, reason=trained.finished.reason)


def federated(run: Run, learner: Learner, options: DemoOptions) -> Iterator[Report]:
    """Train when drawn, and report each round."""

    def fit(task: Task) -> tuple[float, dict[str, float]]:
        return float(learner.samples), {"loss": learner.fit()}

    trained = Federated(run, fit, outer=options.outer, rounds=options.rounds)
    _wait_for_others(run, options)
    while not trained.ended:
        record = trained.step()
        if not record.ok:
            yield Failed(update=record.number, reason=record.reason)
            continue
        yield Stepped(
            update=record.number,
            loss=record.metrics.get("loss", 0.0),
            counted=len(record.contributors),
            of=max(len(record.drawn), len(record.contributors)),  # Late ones of a round before may count too.
            bytes_sent=record.bytes_sent,
            seconds=record.seconds,
        )


def _stepped(update: int, loss: float, outcome: Outcome | None) -> Stepped:
    if outcome is None or not outcome.ok:
        return Stepped(update=update, loss=loss)
    counted, of, seconds = len(outcome.givers), len(outcome.group), outcome.seconds.get("total", 0.0)
    sent = outcome.bytes_sent
    return Stepped(update=update, loss=loss, counted=counted, of=of, bytes_sent=sent, seconds=seconds)


def _wait_for_others(run: Run, options: DemoOptions) -> None:
    _say(Doing(what=f"waits for {count(options.peers - 1, 'other peer')} to join"))
    while not run.wait_for(options.peers - 1):
        pass  # For ever: the demo gives up, and says what it has waited for.
    _say(Doing(what="trains"))


def main() -> None:
    """Train as told by the arguments HOME INDEX OPTIONS, and report on standard output."""
    home, index = Path(sys.argv[1]), int(sys.argv[2])
    options = msgspec.json.decode(sys.argv[3], type=DemoOptions)
    torch.set_num_threads(1)
    _say(Doing(what="loads the images"))
    training, test = split_digits()
    if options.federated:
        training, test = standardised(training), standardised(test)
    share = deal(training, index, options.peers, options.split)
    learner = Learner(share, index, options.federated)
    words: dict[str, Any] = {"strategy": options.strategy, "rule": options.rule, "codec": options.codec}
    with (
        connect(home=home) as peer,
        peer.join("digits", learner.model, group_size=options.peers, **words) as run,
    ):
        train = federated if options.federated else gossip if run.strategy.pairs else in_step
        for report in train(run, learner, options):
            if isinstance(report, Stepped):
                report = msgspec.structs.replace(report, accuracy=learner.accuracy(test))
            _say(report)
    alone: list[float] = []
    train_alone(share, index, options.rounds, options.federated, lambda one: alone.append(one.accuracy(test)))
    points = tuple(accuracy for at, accuracy in enumerate(alone, 1) if is_point(at, options.rounds))
    _say(Finished(digest=learner.digest(), accuracy=learner.accuracy(test), alone=points))


def _say(report: Report) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    main()
