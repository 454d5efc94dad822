"""The demo from beginning to end: peers are started, heard, killed half-way where asked, and ended."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.processes import Child, Family
from equipoise.peer.demo.summary import BARS, Report, Summary, summarize, summary_lines, write_plot

NOTICE_SECONDS = 10.0
"""Silence after which the demo says what it waits for, again and again."""

PATIENCE_SECONDS = 300.0
"""Time without progress after which the demo gives up. A busy machine has needed 170 s to import torch in all peers."""

DEATH_SECONDS = 1.0
"""A child that has closed its standard output ends at once, or is made to."""

Say = Callable[[str], None]


class DemoSwarm:
    """One run of the demo; all its processes belong to `family`, all its files to `folder`."""

    def __init__(
        self,
        options: DemoOptions,
        family: Family,
        folder: Path,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._family, self._folder = options, family, folder
        self._say, self._clock = say, clock
        self._peers: list[Child] = []
        self._reports: list[list[Report]] = []  # Of each peer.
        self._killed = 0
        self._problems: list[str] = []
        self._start = self._progress = clock()

    def run(self) -> Summary:
        """Start everything, train, kill half-way where asked, and return the result.

        It ends when all peers have finished, or at the first problem: a peer has ended, or nothing goes on.
        """
        self._start_peer()
        while not self._problems and (awaited := self._awaited()):
            silence = self._clock() - self._progress
            heard = False
            for child, line in self._family.hear(NOTICE_SECONDS):
                heard = True
                self._hear(self._peers.index(child), line)
            self._kill_half_way()
            if silence > PATIENCE_SECONDS:
                hint = "if the machine is busy, try again later, or with --peers 2"
                self._problems.append(f"nothing happened for {silence:.0f} s: {awaited}; {hint}")
            elif not heard:
                self._say(f"waits, no news for {silence:.0f} s: {awaited}")
        seconds = self._clock() - self._start
        return summarize(self._options, self._reports, self._killed, self._problems, seconds)

    def _start_peer(self, *join: str) -> None:
        index = len(self._peers)
        options = msgspec.json.encode(self._options).decode()
        words = [str(self._folder / f"peer{index + 1}"), str(index), options, *join]
        command = [sys.executable, "-m", "equipoise.peer.demo.trainer", *words]
        self._peers.append(self._family.start(f"peer {index + 1}", command))
        self._reports.append([])
        self._take(index, Report(doing="imports torch"))

    def _awaited(self) -> str:
        """What the peers do that have not finished, for people."""
        latest = [
            (child.name, reports[-1]) for child, reports in zip(self._peers, self._reports, strict=True)
        ]
        return ", ".join(f"{name} {last.doing}" for name, last in latest[self._killed :] if not last.digest)

    def _hear(self, peer: int, line: str | None) -> None:
        child = self._peers[peer]
        if line is None:
            if peer >= self._killed:
                child.reap(DEATH_SECONDS)
                self._problems.append(child.ending)
            return
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:  # A library that prints is no reason to give up.
            self._say(f"{child.name}: {line}")
            return
        self._take(peer, report)
        if report.address and len(self._peers) == 1:
            for _ in range(1, self._options.peers):
                self._start_peer(report.address)

    def _take(self, peer: int, report: Report) -> None:
        most = max((reports[-1].updates for reports in self._reports if reports), default=0)
        self._reports[peer].append(report)
        if (
            not report.accuracy or report.updates > most
        ):  # Of all peers that make an update, the first is shown.
            self._say(f"{self._peers[peer].name} {report.doing}")
        if not report.failed:  # Attempts that fail for ever are no progress.
            self._progress = self._clock()

    def _kill_half_way(self) -> None:
        """SIGKILL the first peers, through which the others joined: the rest needs nobody."""
        kill, made = self._options.kill, min(reports[-1].updates for reports in self._reports)
        if not self._killed and kill and made >= max(1, self._options.rounds // 2):
            self._killed = kill
            for child in self._peers[:kill]:
                child.kill()
            self._say(
                f"killed {kill} of {self._options.peers} peers after round {made}, the first among them"
            )


def run_demo(options: DemoOptions, json: bool = False) -> Summary:
    """Run the demo and print its result to standard output; notes go to standard error where `json`.

    Raises:
        FlagError: An option is out of its range.
        EquipoiseError: scikit-learn is missing.
    """
    out = sys.stderr if json else sys.stdout
    say: Say = partial(print, file=out, flush=True)
    say(f"{options.peers} peers, each with its own images: how well do they read digits, together and alone?")
    say("imports torch to check the options: seconds, or a minute where the machine is busy")
    options.check()
    with (
        tempfile.TemporaryDirectory(prefix="equipoise-demo-", ignore_cleanup_errors=True) as folder,
        Family(Path(folder)) as family,
    ):
        summary = DemoSwarm(options, family, Path(folder), say).run()
    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        bars = BARS if out.encoding.lower().startswith("utf") else "12345678"
        say("\n" + "\n".join(summary_lines(summary, bars)))
    if options.plot:
        say(write_plot(summary, options.plot, f"{options.peers} peers, {options.strategy}, {options.split}"))
    return summary
