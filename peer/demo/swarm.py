"""The demo from beginning to end: daemons and trainers are started, heard, killed half-way where asked, and ended."""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console

from equipoise.peer.demo.display import LiveTable, PlainLines, render_summary, write_plot
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.processes import STOP_SECONDS, Child, Family, daemon_command
from equipoise.peer.demo.summary import Failed, Ledger, Report, Stepped, Summary
from equipoise.peer.errors import EquipoiseError

HEAR_SECONDS = 0.5
"""Time to listen before the next look at the clock."""

DEATH_SECONDS = 1.0
"""A child that has closed its standard output ends at once, or is made to."""


class DemoSwarm:
    """One run of the demo; all its processes belong to `family`, all its files to `folder`."""

    def __init__(
        self, options: DemoOptions, family: Family, folder: Path, display: LiveTable | PlainLines
    ) -> None:
        self._options = options
        self._family = family
        self._folder = folder
        self._display = display
        self._ledger = Ledger(options)
        self._daemons: list[Child] = []
        self._trainers: list[Child] = []
        self._ended: set[Child] = set()
        self._killed: set[Child] = set()
        self._problems: list[str] = []
        self._start = time.monotonic()

    def run(self) -> Summary:
        """Start everything, train, kill half-way where asked, and return the result.

        Raises:
            EquipoiseError: A daemon did not come up.
        """
        self._start_daemons()
        self._start_trainers()
        self._train()
        self._stop_daemons()
        killed = frozenset(index for index, daemon in enumerate(self._daemons) if daemon in self._killed)
        return self._ledger.summarize(killed, self._problems, time.monotonic() - self._start)

    def _start_daemons(self) -> None:
        peers = self._options.peers
        self._display.note(f"starting {peers} daemons")
        address = self._addresses([self._start_daemon(0, [])])[0]
        self._addresses([self._start_daemon(index, [address]) for index in range(1, peers)])
        self._display.note(f"{peers - 1} daemons joined through {address}")

    def _start_daemon(self, index: int, join: list[str]) -> Child:
        child = self._family.start(f"daemon {index + 1}", daemon_command(self._home(index), join))
        self._daemons.append(child)
        return child

    def _addresses(self, daemons: list[Child]) -> list[str]:
        """Wait until each of `daemons` has printed an address, and return those."""
        addresses: dict[Child, str] = {}
        while not all(daemon in addresses for daemon in daemons):
            if self._late:
                silent = ", ".join(daemon.name for daemon in daemons if daemon not in addresses)
                raise EquipoiseError(f"{silent} did not start in {self._options.limit:g} s")
            for child, line in self._family.hear(HEAR_SECONDS):
                if line is None:
                    child.reap(DEATH_SECONDS)
                    raise EquipoiseError(child.ending)
                if line.startswith("/"):
                    addresses.setdefault(child, line.strip())
        return [addresses[daemon] for daemon in daemons]

    def _start_trainers(self) -> None:
        self._display.note(f"starting {self._options.peers} trainers, each with its own share of the data")
        options = msgspec.json.encode(self._options).decode()
        for index in range(self._options.peers):
            trainer = [sys.executable, "-m", "equipoise.peer.demo.trainer"]
            command = [*trainer, str(self._home(index)), str(index), options]
            self._trainers.append(self._family.start(f"trainer {index + 1}", command))

    def _train(self) -> None:
        while not self._ended.issuperset(self._trainers):
            if self._late:
                self._problems.append(f"gave up after {self._options.limit:g} s")
                return
            for child, line in self._family.hear(HEAR_SECONDS):
                if line is None:
                    self._bury(child)
                elif child in self._trainers:
                    self._take(self._trainers.index(child), line)
            self._kill_half_way()

    def _take(self, trainer: int, line: str) -> None:
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:
            # A library that prints is no reason to give up.
            self._display.note(f"trainer {trainer + 1}: {line}")
            return
        is_first = self._ledger.add(trainer, report)
        if is_first and isinstance(report, Stepped):
            self._display.show(report)
        elif isinstance(report, Failed):
            self._display.note(f"trainer {trainer + 1}, update {report.update}: {report.reason}")

    def _kill_half_way(self) -> None:
        """SIGKILL the first daemons, through which the others joined, and their trainers: the rest needs nobody."""
        if self._killed or not self._options.kill:
            return
        made = min(self._ledger.updates(index) for index in range(self._options.peers))
        if made < max(1, self._options.rounds // 2):
            return
        kill = self._options.kill
        # A trainer alone could only wait for its daemon to come back.
        self._killed = {*self._daemons[:kill], *self._trainers[:kill]}
        for child in self._killed:
            child.kill()
        names = ", ".join(str(index + 1) for index in range(kill))
        self._display.note(f"killed daemon {names} after update {made}")

    def _bury(self, child: Child) -> None:
        """A child has ended: a problem, unless it was killed, or is a trainer that has finished."""
        self._ended.add(child)
        failed = child.reap(DEATH_SECONDS) != 0
        finished = child in self._trainers and self._trainers.index(child) in self._ledger.finished
        if child not in self._killed and (failed or not finished):
            self._problems.append(child.ending)
            self._display.note(child.ending)

    def _stop_daemons(self) -> None:
        """Stop the daemons that are still there; all of them must end well."""
        left = [daemon for daemon in self._daemons if daemon not in self._ended | self._killed]
        for daemon in left:
            daemon.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        self._problems += [one.ending for one in left if one.reap(deadline - time.monotonic()) != 0]

    def _home(self, index: int) -> Path:
        return self._folder / f"peer{index + 1}"

    @property
    def _late(self) -> bool:
        return time.monotonic() - self._start > self._options.limit


def run_demo(options: DemoOptions, json: bool = False) -> Summary:
    """Run the demo and print its result to standard output; notes go to standard error where `json`.

    Raises:
        FlagError: An option is out of its range.
        EquipoiseError: scikit-learn is missing, or a daemon did not come up.
    """
    options = options.check()
    console = Console(stderr=json)
    with (
        tempfile.TemporaryDirectory(prefix="equipoise-demo-", ignore_cleanup_errors=True) as folder,
        Family(Path(folder)) as family,
        LiveTable(console, options)
        if console.is_terminal and not json
        else nullcontext(PlainLines(console, options, rounds=not json)) as display,
    ):
        summary = DemoSwarm(options, family, Path(folder), display).run()
    if json:
        sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    else:
        console.print(render_summary(summary, options))
    if options.federated:
        PlainLines(console, options).note(write_plot(summary, options))
    return summary
