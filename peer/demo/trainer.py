"""One peer of the demo, a process of its own: `python -m equipoise.peer.demo.trainer`.

It uses the public client only, as any training script would. Its learner is a small network with AdamW, its data a
share of scikit-learn's handwritten digits, half of which are for the test.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import torch
from rich.filesize import decimal
from torch import nn

from equipoise.averaging.counts import count
from equipoise.peer import Outcome, Peer, Run
from equipoise.peer.demo.options import CLASSES, DemoOptions
from equipoise.peer.demo.summary import Report
from equipoise.peer.simulation import partition
from equipoise.peer.training import Federated, Gossip, Record, Task
from equipoise.peer.training.image import digest

BATCH = 32
PEER_SAMPLES = 2 * BATCH
"""The swarm steps when it has as many samples for each peer, whichever peers they are from."""

EXCHANGE_STEPS = 4
"""Local steps from one exchange to the next, where the peers gossip."""

UPDATE_SECONDS = 0.1
"""Least time for a gossiping peer's update: else all of them would be over before two peers have met."""

FIT_EPOCHS = 2
"""Times that a peer drawn for a federated round draws as many images as it has."""

TEST_FRACTION = 0.5
"""Share of the test: so few images remain that a peer's own are too few, which is what a swarm is for."""

HIDDEN, LEARNING_RATE = 256, 5e-3

SPLIT_SEED, MODEL_SEED = 0, 1
"""All processes deal alike and start from the same parameters, as does the learner that trains alone."""

Step = tuple[int, Outcome | Record | None]
"""The number of updates made, and how the last one was made with others: None for local steps, not ok if it failed."""


class Digits(NamedTuple):
    """Images, f32 [N, 64] with pixels about 0 and a deviation of 1, and their labels, i64 [N] from 0 to 9."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def pick(self, index: torch.Tensor) -> Digits:
        """The images at `index`, i64 [n]."""
        return Digits(self.pixels[index], self.labels[index])


def split_digits() -> tuple[Digits, Digits]:
    """All images as (training, test), shuffled alike in every process."""
    from sklearn.datasets import load_digits  # A second, for those that only want the rest of this module.

    bunch = load_digits()
    pixels = torch.as_tensor(bunch.data, dtype=torch.float32)
    digits = Digits((pixels - pixels.mean()) / pixels.std(), torch.as_tensor(bunch.target, dtype=torch.int64))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    tests = int(len(order) * TEST_FRACTION)
    return digits.pick(order[tests:]), digits.pick(order[:tests])


def deal(images: Digits, index: int, peers: int, split: str = "iid") -> Digits:
    """Peer `index`'s own share of the images, dealt by `split`: each image belongs to one of `peers` at most."""
    return images.pick(torch.as_tensor(partition(images.labels, peers, split)[index]))


class Learner:
    """Trains `model` by `optimizer` on one share of the data, which has `samples` images."""

    def __init__(self, share: Digits, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(MODEL_SEED)
            layers = nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        self.model: nn.Module = nn.Sequential(*layers)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.samples = len(share.labels)
        self._share, self._chance = share, torch.Generator().manual_seed(seed)

    def backward(self, samples: int = BATCH) -> float:
        """Put the mean gradient of own images, drawn at random, into the parameters' `.grad`; returns the mean loss."""
        batch = self._share.pick(torch.randint(self.samples, (samples,), generator=self._chance))
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch.pixels), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def step(self, samples: int = BATCH) -> float:
        """Make one step from own images, drawn at random; returns the mean loss."""
        loss = self.backward(samples)
        self.optimizer.step()
        return loss

    def fit(self) -> float:
        """Train as a drawn peer does; returns the mean loss."""
        return fmean(self.step() for _ in range(FIT_EPOCHS * math.ceil(self.samples / BATCH)))

    def accuracy(self, test: Digits) -> float:
        """Fraction of `test` that is classified correctly, 0 to 1."""
        with torch.no_grad():
            return float((self.model(test.pixels).argmax(1) == test.labels).float().mean())

    def digest(self) -> str:
        """BLAKE3 in hex of all parameters."""
        return digest(dict(self.model.named_parameters()))


def in_step(run: Run, learner: Learner, options: DemoOptions) -> Iterator[Step]:
    """Make all updates together with the others, by the swarm's batches."""
    target = PEER_SAMPLES * options.peers
    optimizer = run.optimizer(learner.optimizer, batch_size=BATCH, target_batch_size=target, alone="wait")
    while optimizer.epoch < options.rounds:
        epoch, last = optimizer.epoch, optimizer.last
        learner.backward()
        optimizer.step()
        outcome = optimizer.last
        if outcome is not None and outcome is not last and (optimizer.epoch > epoch or not outcome.ok):
            yield optimizer.epoch, outcome


def gossip(run: Run, learner: Learner, options: DemoOptions) -> Iterator[Step]:
    """Make as many local steps, with an exchange with some other peer now and then."""
    with Gossip(run, every=EXCHANGE_STEPS) as trained:
        for update in range(1, options.rounds + 1):
            began, exchanged = time.monotonic(), trained.exchanged
            for _ in range(PEER_SAMPLES // BATCH):
                learner.step()
            yield update, trained.last if trained.exchanged > exchanged else None
            time.sleep(max(0.0, began + UPDATE_SECONDS - time.monotonic()))
    yield options.rounds, trained.finished


def federated(run: Run, learner: Learner, options: DemoOptions) -> Iterator[Step]:
    """Train when drawn, and make the same outer step as the others."""

    def fit(task: Task) -> tuple[float, dict[str, float]]:
        return float(learner.samples), {"loss": learner.fit()}

    trained = Federated(run, fit, outer=options.outer, rounds=options.rounds)
    while not trained.ended:
        record = trained.step()
        yield record.number, record


def take_part(peer: Peer, learner: Learner, alone: Learner, test: Digits, options: DemoOptions) -> None:
    """Train `learner` with the other peers, and `alone` as much without them, and report both."""
    specs: dict[str, Any] = {"strategy": options.strategy, "rule": options.rule, "codec": options.codec}
    made = 0

    def measured() -> dict[str, Any]:
        return {"updates": made, "accuracy": learner.accuracy(test), "alone": alone.accuracy(test)}

    with peer.join("digits", learner.model, group_size=options.peers, **specs) as run:
        report(f"waits for {count(options.peers - 1, 'other peer')} to join")
        while not run.wait_for(options.peers - 1):
            pass  # For ever: the demo gives up, and says what it has waited for.
        report("trains")
        train = federated if options.federated else gossip if run.core.strategy.pairs else in_step
        for number, result in train(run, learner, options):
            if result is not None and not result.ok:
                report(f"tries again: {result.reason}", updates=made, failed=True)
                continue
            for _ in range(made, number):
                alone.fit() if options.federated else alone.step(PEER_SAMPLES)
            made = number
            found, sent = measured(), 0 if result is None else result.bytes_sent
            both = f"{found['accuracy']:.1%} together, {found['alone']:.1%} alone".replace("%", " %")
            report(f"made round {made}: {both}, {how(result)}", bytes_sent=sent, **found)
    report("has finished", digest=learner.digest(), **measured())


def how(result: Outcome | Record | None) -> str:
    """With whom an update was made, for people."""
    if result is None:
        return "local steps"
    counted = result.givers if isinstance(result, Outcome) else result.contributors
    return (
        f"by {count(len(counted), 'peer')}, {decimal(result.bytes_sent)} sent" if counted else "local steps"
    )


def report(doing: str, **measured: Any) -> None:
    """Report on standard output."""
    print(msgspec.json.encode(Report(doing=doing, **measured)).decode(), flush=True)


def main() -> None:
    """Train as told by the arguments HOME INDEX OPTIONS [ADDRESS], until terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # Unwinds the stack, so that the daemon is stopped.
    torch.set_num_threads(1)
    home, index, join = sys.argv[1], int(sys.argv[2]), sys.argv[4:]
    options = msgspec.json.decode(sys.argv[3], type=DemoOptions)
    with Peer(join, home, ["/ip4/127.0.0.1/tcp/0"]) as peer:
        report("loads the images", address=peer.addresses[0])
        training, test = split_digits()
        share = deal(training, index, options.peers, options.split)
        take_part(peer, Learner(share, index), Learner(share, index), test, options)
        signal.pause()  # Its daemon still serves the peers that are not through.


if __name__ == "__main__":
    main()
