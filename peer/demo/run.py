"""The demo from beginning to end, for the command line."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from equipoise.peer.demo.display import LiveTable, PlainLines, render_summary
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.processes import Family
from equipoise.peer.demo.summary import Summary
from equipoise.peer.demo.swarm import DemoSwarm


def run_demo(options: DemoOptions, json: bool = False) -> Summary:
    """Run the demo and print its result to standard output; notes go to standard error where `json`.

    Raises:
        DemoUsageError: An option is out of its range.
        DemoError: scikit-learn is missing, or a daemon did not come up.
    """
    options.check()
    options = options.complete()
    console = Console(stderr=json)
    with (
        _terminated_like_interrupted(),
        tempfile.TemporaryDirectory(prefix="equipoise-demo-", ignore_cleanup_errors=True) as folder,
        Family(Path(folder)) as family,
        _display(console, options, json) as display,
    ):
        summary = DemoSwarm(options, family, Path(folder), display).run()
    if json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        console.print(render_summary(summary, options))
    return summary


def _display(console: Console, options: DemoOptions, json: bool) -> LiveTable | PlainLines:
    if console.is_terminal and not json:
        return LiveTable(console, options)
    return PlainLines(console, options, rounds=not json)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds the stack as Ctrl-C does, so that every process is ended."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
