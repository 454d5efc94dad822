"""The demo's display, on a terminal or as plain lines, its summary, and the plot of federated rounds."""

from __future__ import annotations

import importlib
from collections import deque

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import Stepped, Summary

ROWS = 12
"""Rows of the live table; with the notes they fit a terminal of 24 lines."""

COLUMNS = ("round", "group", "contributors", "loss", "bytes", "seconds")

FEDERATED_COLUMNS = ("round", "drawn", "contributors", "loss", "accuracy", "bytes", "seconds")
"""Columns of federated rounds: the accuracy is that of the model from which a round began."""


class LiveTable(Live):
    """The last rounds, each as its first trainer reports it, as a table that is drawn anew in place."""

    def __init__(self, console: Console, options: DemoOptions) -> None:
        # No thread that refreshes: children are tied to the life of the thread that started them.
        super().__init__(console=console, auto_refresh=False)
        self._options = options
        self._rounds = deque[Stepped](maxlen=ROWS)

    def note(self, text: str) -> None:
        """Print a line above the table."""
        self.console.print(Text(text, style="dim"))

    def show(self, round_: Stepped) -> None:
        """Draw the table with one more round."""
        self._rounds.append(round_)
        table = Table(
            title=_title(self._options), caption="figures of the first trainer that ended the round"
        )
        for column in _columns(self._options):
            table.add_column(column, justify="right")
        for shown in self._rounds:
            table.add_row(*_cells(shown, self._options))
        self.update(table, refresh=True)


class PlainLines:
    """One line for each round, for files and pipes; `rounds` off leaves the notes."""

    def __init__(self, console: Console, options: DemoOptions, rounds: bool = True) -> None:
        self._console = console
        self._options = options
        self._rounds = rounds

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def show(self, round_: Stepped) -> None:
        """Print a round."""
        if self._rounds:
            cells = zip(_columns(self._options), _cells(round_, self._options), strict=True)
            self.note("  ".join(f"{column} {cell}" for column, cell in cells))


def render_summary(summary: Summary, options: DemoOptions) -> Group:
    """The summary for people."""
    grid = Table.grid(padding=(0, 3))
    for name, value in _facts(summary, options):
        grid.add_row(name, value)
    text, style = ("It worked.", "bold green") if summary.ok else ("It did not work:", "bold red")
    return Group(
        Text(), grid, Text(), Text(text, style=style), *(Text(f"  {problem}") for problem in summary.problems)
    )


def write_plot(summary: Summary, options: DemoOptions) -> str:
    """Draw the accuracy of the swarm's model by round, beside that of a peer alone, into the file `options.plot`.

    Returns:
        One line that names the plot's file, or the reason for which no plot was written.
    """
    if not summary.curve:
        return "no plot: no round told an accuracy"
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4), layout="constrained")
    except ImportError:
        return "no plot: matplotlib is missing; install it: pip install 'equipoise[demo]'"
    axes = figure.subplots()
    rounds, accuracies = zip(*summary.curve, strict=True)
    axes.plot(rounds, [100 * one for one in accuracies], marker=".", label=f"{options.rule}, {options.outer}")
    axes.axhline(100 * summary.accuracy_alone, color="gray", linestyle="--", label="a peer alone, at its end")
    axes.set(xlabel="round", ylabel="test accuracy (%)", ylim=(0, 100))
    axes.set_title(f"{options.peers} peers, {options.strategy}, {options.split}", fontsize="medium")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    try:
        figure.savefig(options.plot)
    except OSError as error:
        return f"no plot: cannot write {options.plot}: {error.strerror}"
    return f"accuracy by round: {options.plot}"


def _facts(summary: Summary, options: DemoOptions) -> list[tuple[str, str]]:
    survivors = summary.peers - summary.killed
    alike = "bit-identical" if summary.bit_identical else "NOT bit-identical"
    made = "rounds" if options.federated else "updates"
    sent = decimal(summary.bytes_sent)
    if summary.bytes_saved > 0:  # Of a small model, headers take more than the values.
        sent += f"; {options.codec} saved {decimal(summary.bytes_saved)} against fp32"
    return [
        ("test accuracy", f"{100 * summary.accuracy:.1f} % in the swarm"),
        ("", f"{100 * summary.accuracy_alone:.1f} % alone with one peer's data, as many {made}"),
        ("rounds", f"{summary.rounds}, and {summary.failed_rounds} attempts that failed and were made again"),
        ("sent", sent),
        ("parameters", f"{alike} on {survivors} of {summary.peers} peers ({summary.killed} killed)"),
        ("duration", f"{summary.seconds:.1f} s"),
    ]


def _title(options: DemoOptions) -> str:
    ways = [options.strategy, options.rule, options.outer] if options.federated else [options.strategy]
    return ", ".join((f"{options.peers} peers", *ways, options.codec, f"{options.rounds} rounds"))


def _columns(options: DemoOptions) -> tuple[str, ...]:
    return FEDERATED_COLUMNS if options.federated else COLUMNS


def _cells(round_: Stepped, options: DemoOptions) -> tuple[str, ...]:
    size, accuracy = str(round_.group), []
    if options.federated:
        size = str(round_.drawn)
        accuracy = ["" if round_.accuracy is None else f"{100 * round_.accuracy:.1f} %"]
    contributors, loss = str(round_.contributors), f"{round_.loss:.3f}"
    sent, seconds = decimal(round_.bytes_sent), f"{round_.seconds:.2f}"
    return (str(round_.update), size, contributors, loss, *accuracy, sent, seconds)
