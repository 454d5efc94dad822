"""Reports of the demo's peers, and what they come to: whether it really worked."""

from __future__ import annotations

import importlib
from collections import Counter
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

Curve = tuple[tuple[int, float], ...]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a peer, in JSON.

    Attributes:
        doing: What it does from now on, or has just done, for people.
        updates: Number of updates that it has made.
        failed: Whether its last round has failed, and changed nothing.
        address: The address of its daemon, in the report of its start.
        accuracy: Of its model on the test images, 0 to 1; 0 unless this reports an update, or the end.
        alone: The same, of a model that has made as many updates from the peer's own images only.
        bytes_sent: By its daemon for the update.
        digest: BLAKE3 in hex of its parameters, in the report of its end.
    """

    doing: str
    updates: int = 0
    failed: bool = False
    address: str = ""
    accuracy: float = 0.0
    alone: float = 0.0
    bytes_sent: int = 0
    digest: str = ""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; `equipoise demo --json` prints it.

    Attributes:
        ok: Whether it really worked: `problems`, one line each, is empty.
        peers, killed: Peers started, and killed half-way.
        rounds, failed_rounds: Updates that every surviving peer has made, and attempts that changed nothing.
        accuracy, accuracy_alone: Means over the survivors on the test images, 0 to 1; None if no peer has finished.
        equal: Number of surviving peers that ended with the same parameters, bit for bit.
        bit_identical: Whether these are all survivors.
        bytes_sent: By all daemons in rounds that succeeded.
        seconds: Duration of the whole demo.
        curve, curve_alone: (updates made, accuracy) together and alone, of the last peer that reported the update.
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
    curve: Curve
    curve_alone: Curve


def summarize(
    options: DemoOptions,
    reports: Sequence[Sequence[Report]],
    killed: int,
    problems: list[str],
    seconds: float,
) -> Summary:
    """The result, given all reports of each peer, of which the first `killed` ones were killed, and what went wrong."""
    said = [report for of_peer in reports for report in of_peer]
    survivors = [of_peer[-1] for of_peer in reports[killed:]]
    done = [report for report in survivors if report.digest]
    accuracy = fmean(report.accuracy for report in done) if done else None
    alone = fmean(report.alone for report in done) if done else None
    equal = max(Counter(report.digest for report in done).values(), default=0)
    found = [*problems]
    if equal < len(done):
        found.append(f"only {equal} of {len(done)} peers ended with the same parameters")
    if accuracy is not None and alone is not None and accuracy - alone < MIN_GAIN:
        gain = f"{100 * (accuracy - alone):+.1f} points above a peer alone, expected {100 * MIN_GAIN:+.1f}"
        found.append(f"the swarm's accuracy is only {gain}; more --rounds help")
    step = -(-options.rounds // POINTS)
    points = {report.updates: report for report in said if report.accuracy}
    shown = [points[at] for at in sorted(points) if at % step == 0 or at == options.rounds]
    return Summary(
        ok=not found,
        problems=tuple(found),
        peers=options.peers,
        killed=killed,
        rounds=min(report.updates for report in survivors),
        failed_rounds=sum(report.failed for report in said),
        accuracy=accuracy,
        accuracy_alone=alone,
        equal=equal,
        bit_identical=0 < equal == len(survivors),
        bytes_sent=sum(report.bytes_sent for report in said),
        seconds=seconds,
        curve=tuple((report.updates, report.accuracy) for report in shown),
        curve_alone=tuple((report.updates, report.alone) for report in shown),
    )


def summary_lines(summary: Summary, bars: str = BARS) -> Iterator[str]:
    """The summary for people, line by line; its point and a picture of the accuracy come first."""
    if summary.accuracy is not None and summary.accuracy_alone is not None:
        equal = f"equal bit for bit on {summary.equal} of {summary.peers - summary.killed}"
        yield f"{summary.accuracy:.1%} together, {summary.accuracy_alone:.1%} alone, {equal}".replace(
            "%", " %"
        )
        yield f"\ntogether  {_picture(summary.curve, bars)}  test accuracy by round"
        yield f"alone     {_picture(summary.curve_alone, bars)}  the same, of a peer with its own images only"
        yield f"          {bars[0]} is {100 * LOWEST:.0f} % or less, {bars[-1]} is 100 %\n"
    failed = f", after {summary.failed_rounds} failed attempts" if summary.failed_rounds else ""
    killed = f"; {summary.killed} of {summary.peers} peers were killed" if summary.killed else ""
    yield f"{summary.rounds} rounds{failed}, in {summary.seconds:.0f} s; {decimal(summary.bytes_sent)} sent{killed}"
    yield "It worked." if summary.ok else "It did not work:"
    yield from (f"  {problem}" for problem in summary.problems)


def _picture(curve: Curve, bars: str) -> str:
    top = len(bars) - 1
    return "".join(bars[max(0, round(top * (accuracy - LOWEST) / (1 - LOWEST)))] for _, accuracy in curve)


def write_plot(summary: Summary, path: str, title: str) -> str:
    """Draw both curves into a file; returns one line that names the file, or says why it was not drawn."""
    try:
        axes = importlib.import_module("matplotlib.figure").Figure(layout="constrained").subplots()
        for name, curve in (("together", summary.curve), ("a peer alone", summary.curve_alone)):
            axes.plot([at for at, _ in curve], [100 * accuracy for _, accuracy in curve], ".-", label=name)
        axes.set(title=title, xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
        axes.legend(loc="lower right")
        axes.figure.savefig(path)
    except ImportError:
        return "no plot: matplotlib is missing; install it: pip install 'equipoise[plots]'"
    except OSError as error:
        return f"no plot: cannot write {path}: {error.strerror}"
    return f"accuracy by round: {path}"
