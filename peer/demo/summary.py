"""Reports of the demo's trainers, one JSON line each, and what they come to: whether it really worked."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from statistics import fmean

import msgspec
from rich.filesize import decimal

from equipoise.peer.demo.options import DemoOptions

MIN_GAIN = 0.01
"""Least gain in accuracy over a peer alone: above the noise of 898 images. It is .025 to .045 where few are killed."""

POINTS = 50
"""Most points of a curve, apart from its end: as many as fit into a line."""

BARS = "▁▂▃▄▅▆▇█"

LOWEST = 0.5
"""Accuracy of the lowest bar, and below; the highest bar stands for 1. A scale from 0 would not show the difference."""


class Doing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trainer begins something that takes time, as in "waits for 3 others"."""

    what: str


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has made an update.

    Attributes:
        update: Number of the update, from 1.
        loss: Mean loss of the trainer's own samples since the update before; of a federated round, of all peers.
        counted, of: Number of peers whose work is in it, 0 for local steps without an exchange, and of those that took
            part in its round; of a federated round, that were drawn to train.
        bytes_sent, seconds: By its daemon for the round, and the round's duration.
        accuracy: Of the model after the update on the test images, 0 to 1.
    """

    update: int
    loss: float
    counted: int = 0
    of: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A round failed, nothing was changed, and the trainer tries again."""

    update: int
    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has made all its updates.

    Attributes:
        digest: BLAKE3 in hex of its parameters.
        accuracy: On the test images, 0 to 1.
        alone: The accuracy of the same network by as much training on its own samples alone, at each `is_point`.
    """

    digest: str
    accuracy: float
    alone: tuple[float, ...]


Report = Doing | Stepped | Failed | Finished


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; `equipoise demo --json` prints it.

    Attributes:
        ok: Whether it really worked: `problems`, one line each, is empty.
        peers, killed: Daemons started, and killed half-way.
        rounds, failed_rounds: Updates that every surviving trainer has made, and attempts that changed nothing.
        accuracy: Of the swarm's model on the test images, 0 to 1; None if no trainer has finished.
        accuracy_alone: Mean over the survivors of a peer's accuracy alone with its share; None likewise.
        equal: Number of surviving trainers that ended with the same parameters, bit for bit.
        bit_identical: Whether these are all survivors.
        bytes_sent: By all daemons in rounds that succeeded.
        seconds: Duration of the whole demo.
        curve, curve_alone: (updates made, accuracy) of the swarm's model, and of a peer alone.
    """

    ok: bool
    problems: tuple[str, ...]
    peers: int
    killed: int
    rounds: int
    failed_rounds: int
    accuracy: float | None
    accuracy_alone: float | None
    equal: int
    bit_identical: bool
    bytes_sent: int
    seconds: float
    curve: tuple[tuple[int, float], ...]
    curve_alone: tuple[tuple[int, float], ...]


def is_point(update: int, rounds: int) -> bool:
    """Return whether a curve over `rounds` updates shows the update's accuracy."""
    return update % -(-rounds // POINTS) == 0 or update == rounds


class Ledger:
    """Collects the trainers' reports, by trainer index."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._updates: dict[int, int] = {}
        self._failed = self._sent = 0
        self._curve: dict[int, float] = {}
        self.finished: dict[int, Finished] = {}

    def add(self, trainer: int, report: Report) -> bool:
        """Take in a report; returns whether it is the first one of its update."""
        match report:
            case Finished():
                self.finished[trainer] = report
            case Failed():
                self._failed += 1
            case Stepped(update=update):
                first = update > max(self._updates.values(), default=0)
                self._updates[trainer] = update
                self._sent += report.bytes_sent
                if first and is_point(update, self._options.rounds):
                    self._curve[update] = report.accuracy
                return first
        return False

    def updates(self, trainer: int) -> int:
        """Return the updates of `trainer`. A trainer that missed a round made that update later, unreported."""
        return self._options.rounds if trainer in self.finished else self._updates.get(trainer, 0)

    def summarize(self, killed: frozenset[int], problems: list[str], seconds: float) -> Summary:
        """The result, given which trainers' daemons were killed and what went wrong besides."""
        rounds = self._options.rounds
        survivors = [index for index in range(self._options.peers) if index not in killed]
        done = [self.finished[index] for index in survivors if index in self.finished]
        digests = [report.digest for report in done]
        accuracy = alone = None
        means = [fmean(at) for at in zip(*(report.alone for report in done), strict=True)]
        if done:
            self._curve[rounds] = accuracy = fmean(report.accuracy for report in done)
            alone = means[-1]
        found = [*problems]
        for index in survivors:
            if index not in self.finished:
                found.append(f"trainer {index + 1} made {self.updates(index)} of {rounds} updates")
        if len(killed) != self._options.kill:
            found.append(f"{len(killed)} of {self._options.kill} daemons were killed")
        if len(set(digests)) > 1:
            found.append("the survivors' parameters differ")
        if accuracy is not None and alone is not None and accuracy - alone < MIN_GAIN:
            gain = (
                f"{100 * (accuracy - alone):+.1f} points above a peer alone, expected {100 * MIN_GAIN:+.1f}"
            )
            found.append(f"the swarm's accuracy is only {gain}; more --rounds help")
        points = [update for update in range(1, rounds + 1) if is_point(update, rounds)]
        return Summary(
            ok=not found,
            problems=tuple(found),
            peers=self._options.peers,
            killed=len(killed),
            rounds=min(map(self.updates, survivors), default=0),
            failed_rounds=self._failed,
            accuracy=accuracy,
            accuracy_alone=alone,
            equal=max(map(digests.count, digests), default=0),
            bit_identical=len(done) == len(survivors) and len(set(digests)) == 1,
            bytes_sent=self._sent,
            seconds=seconds,
            curve=tuple(sorted(self._curve.items())),
            curve_alone=tuple(zip(points, means, strict=False)),
        )


def line(update: Stepped, options: DemoOptions) -> str:
    """One line for an update."""
    told = f"round {update.update}  accuracy {_percent(update.accuracy)}  loss {update.loss:.3f}  "
    if not update.counted:
        return f"{told}local steps"
    whose = "drawn peers" if options.federated else "peers"
    sent = f"{decimal(update.bytes_sent)} sent in {update.seconds:.2f} s"
    return f"{told}{update.counted} of {update.of} {whose}  {sent}"


def summary_lines(summary: Summary, bars: str = BARS) -> Iterator[str]:
    """The summary for people, line by line; its point and a picture of the accuracy come first."""
    if summary.accuracy is not None and summary.accuracy_alone is not None:
        equal = f"equal bit for bit on {summary.equal} of {summary.peers - summary.killed}"
        yield f"{_percent(summary.accuracy)} together, {_percent(summary.accuracy_alone)} alone, {equal}"
        yield f"\ntogether  {_picture(summary.curve, bars)}  test accuracy by round"
        yield f"alone     {_picture(summary.curve_alone, bars)}  the same, of a peer with its own images only"
        yield f"          {bars[0]} is {100 * LOWEST:.0f} % or less, {bars[-1]} is 100 %\n"
    failed = f", after {summary.failed_rounds} failed attempts" if summary.failed_rounds else ""
    killed = f"; {summary.killed} of {summary.peers} peers were killed" if summary.killed else ""
    yield f"{summary.rounds} rounds{failed}, in {summary.seconds:.0f} s; {decimal(summary.bytes_sent)} sent{killed}"
    yield "It worked." if summary.ok else "It did not work:"
    yield from (f"  {problem}" for problem in summary.problems)


def write_plot(summary: Summary, options: DemoOptions) -> str:
    """Draw both curves into the file `options.plot`; returns one line that names it, or why there is none."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    except ImportError:
        return "no plot: matplotlib is missing; install it: pip install 'equipoise[demo]'"
    axes = figure.subplots()
    for name, curve in (("together", summary.curve), ("a peer alone", summary.curve_alone)):
        axes.plot([at for at, _ in curve], [100 * accuracy for _, accuracy in curve], marker=".", label=name)
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.set_title(f"{options.peers} peers, {options.strategy}, {options.split}", fontsize="medium")
    axes.legend(loc="lower right")
    try:
        figure.savefig(options.plot)
    except OSError as error:
        return f"no plot: cannot write {options.plot}: {error.strerror}"
    return f"accuracy by round: {options.plot}"


def _picture(curve: Sequence[tuple[int, float]], bars: str) -> str:
    top = len(bars) - 1
    return "".join(bars[max(0, round(top * (accuracy - LOWEST) / (1 - LOWEST)))] for _, accuracy in curve)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
