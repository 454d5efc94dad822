"""The demo's display, on a terminal or as plain lines, and its summary."""

from __future__ import annotations

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
