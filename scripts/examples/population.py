"""Peers search for a learning rate while they train: a population on handwritten digits.

Each peer begins with a rate of its own between 1e-5 and 1e-1, and all have the same images. Those with the worst scores
copy the weights of those with the best, and go on with their rate, a little changed. The picture shows the rate and the
loss of each member against the steps behind its weights; a dot is a copy.

    python population.py --peers 4 --small          # a whole swarm on this machine
    python population.py                            # the first of two machines; it prints its address
    python population.py --index 1 --join ADDRESS
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from local_swarm import Curve, Result, Train, answer, children, main, told_of, trained_together
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from equipoise.peer import Peer
from equipoise.peer.training import Log, Population

BATCH, STEPS, PAUSE_SECONDS = 32, 10, 0.05
"""Samples of a batch, steps between two reports, and the time that the steps of a larger model take."""

RATES = Log(1e-5, 1e-1)


def images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pixels from 0 to 1, f32 [1797, 64], labels, i64 [1797], and each image's part, i64 [1797]: 0 and 1 train,
    2 scores the members, 3 is for the test."""
    bunch = load_digits()
    labels = torch.as_tensor(bunch.target, dtype=torch.int64)
    return torch.as_tensor(bunch.data, dtype=torch.float32) / 16, labels, torch.arange(len(labels)) % 4


class Moment(NamedTuple):
    """A report of one member.

    Attributes:
        steps: Behind its weights.
        rate: Its learning rate in the steps before.
        loss: Of the images that score, in nats.
        copied: Whether it has just become a copy of another.
    """

    steps: int
    rate: float
    loss: float
    copied: bool


@dataclass(frozen=True)
class Life(Result):
    """What came of one member, or of a learner with one rate.

    Attributes:
        moments: Its reports.
    """

    moments: list[Moment]


def train(peer: Peer | None, options: argparse.Namespace) -> Life:
    """Train some thousand steps, as a member or, alone, with the rate that the index draws."""
    pixels, labels, parts = images()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    torch.manual_seed(1 + options.index + 100 * options.seed)
    inner = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    training = (parts < 2).nonzero().flatten()

    @torch.no_grad()
    def loss_of(part: int) -> float:
        return cross_entropy(model(pixels[parts == part]), labels[parts == part]).item()

    def some_steps(rate: float) -> None:
        for group in inner.param_groups:
            group["lr"] = rate
        for _ in range(STEPS):
            chosen = training[torch.randint(len(training), (BATCH,))]
            inner.zero_grad()
            cross_entropy(model(pixels[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            inner.step()

    curve, moments, reports = Curve(lambda: loss_of(3)), [], 60 if options.small else 400
    with contextlib.ExitStack() as leaving:
        run = leaving.enter_context(peer.join("population", model)) if peer else None
        member = leaving.enter_context(Population(run, {"lr": RATES})) if run else None
        if run:
            run.wait_for(options.of - 1)
        fixed = RATES.draw(Random(options.index + 100 * options.seed))
        curve.add(run)
        for report in range(reports):
            rate = member["lr"] if member else fixed
            some_steps(rate)
            loss = loss_of(2)
            copied = bool(member and member.report(-loss))
            moments.append(Moment(member.steps if member else (report + 1) * STEPS, rate, loss, copied))
            if member:
                time.sleep(PAUSE_SECONDS)
        curve.add(run)
    one = curve.result([])
    return Life(one.points, "", moments)


def run_population(train: Train, options: argparse.Namespace) -> int:
    """Run a population on this machine, and beside it as many learners, each with a rate of its own."""
    count = options.peers
    with children(train, options) as start:
        together = trained_together(start, count)
        alone = [answer(one) for one in [start(alone=True, index=index) for index in range(count)]]
    if options.plot:
        plot(together, options.plot)
    found = {
        "loss": min(one.end.loss for one in together),
        "loss_mean": sum(one.end.loss for one in together) / count,
        "loss_alone": min(one.end.loss for one in alone),
        "loss_alone_mean": sum(one.end.loss for one in alone) / count,
        "bytes": sum(one.end.sent for one in together),
        "seconds": max(one.end.seconds for one in together),
        "copies": sum(moment.copied for one in together for moment in one.moments),
    }
    named = [(f"member {at}", one) for at, one in enumerate(together)]
    named += [(f"alone, {one.moments[0].rate:.2g}", one) for one in alone]
    print(json.dumps(found) if options.json else "\n".join(told_of(*one) for one in named))
    return 0


def plot(lives: list[Life], file: str) -> None:
    """Draw rates and losses of all members against the steps behind their weights."""
    from matplotlib.figure import Figure  # Nothing else needs it.

    figure = Figure(figsize=(8, 3), layout="constrained")
    rates, losses = figure.subplots(1, 2)
    for at, one in enumerate(lives):
        steps = [moment.steps for moment in one.moments]
        copies = [index for index, moment in enumerate(one.moments) if moment.copied]
        for axes, values in ((rates, [m.rate for m in one.moments]), (losses, [m.loss for m in one.moments])):
            (line,) = axes.plot(steps, values, label=f"member {at}")
            axes.plot([steps[i] for i in copies], [values[i] for i in copies], "o", color=line.get_color())
    rates.set(xlabel="steps", ylabel="learning rate", yscale="log")
    losses.set(xlabel="steps", ylabel="loss of the images that score", yscale="log")
    rates.legend()
    figure.savefig(file, dpi=90)


if __name__ == "__main__":
    main(train, __doc__, swarm=run_population)
