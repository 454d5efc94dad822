"""The demo from beginning to end: daemons and trainers are started, heard, killed half-way where asked, and ended."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from equipoise.peer.demo import summary as told
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.processes import Child, Family, daemon_command
from equipoise.peer.errors import EquipoiseError

HEAR_SECONDS = 0.5
"""Time to listen before the next look at the clock."""

NOTICE_SECONDS = 10.0
"""Silence after which the demo says what it waits for, again and again."""

PATIENCE_SECONDS = 300.0
"""Silence after which the demo gives up. A busy machine has needed 170 s to import torch in all trainers."""

DEATH_SECONDS = 1.0
"""A child that has closed its standard output ends at once, or is made to."""

Say = Callable[[str], None]


class DemoSwarm:
    """One run of the demo; all its processes belong to `family`, all its files to `folder`.

    It ends when nothing has happened for `PATIENCE_SECONDS`, however long the whole takes.
    """

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
        self._ledger = told.Ledger(options)
        self._daemons: list[Child] = []
        self._trainers: list[Child] = []
        self._doing: dict[Child, str] = {}  # What each child does that the demo waits for.
        self._killed: set[Child] = set()
        self._address = ""
        self._problems: list[str] = []
        self._start = self._progress = self._noticed = clock()

    def run(self) -> told.Summary:
        """Start everything, train, kill half-way where asked, and return the result.

        Raises:
            EquipoiseError: A daemon did not come up.
        """
        peers = self._options.peers
        self._say(f"starts {peers} daemons")
        for some in ([0], range(1, peers)):
            for index in some:
                command = daemon_command(self._home(index), [self._address] if self._address else [])
                self._daemons.append(self._begin(f"daemon {index + 1}", command, "starts"))
            self._wait()
        self._say(f"starts {peers} trainers, each with its own share of the images")
        options = msgspec.json.encode(self._options).decode()
        for index in range(peers):
            words = ("-m", "equipoise.peer.demo.trainer", str(self._home(index)), str(index), options)
            trainer = self._begin(f"trainer {index + 1}", [sys.executable, *words], "imports torch")
            self._trainers.append(trainer)
        try:
            self._wait()
        except EquipoiseError as error:
            self._problems.append(str(error))
        killed = frozenset(index for index, daemon in enumerate(self._daemons) if daemon in self._killed)
        return self._ledger.summarize(killed, self._problems, self._clock() - self._start)

    def _begin(self, name: str, command: list[str], doing: str) -> Child:
        child = self._family.start(name, command)
        self._doing[child] = doing
        return child

    def _home(self, index: int) -> Path:
        return self._folder / f"peer{index + 1}"

    def _wait(self) -> None:
        """Hear the children until none is left to wait for.

        Raises:
            EquipoiseError: A daemon has ended that was to come up, or nothing has happened for too long.
        """
        while self._doing:
            for child, line in self._family.hear(HEAR_SECONDS):
                if line is None:
                    self._bury(child)
                elif child in self._trainers:
                    self._take(child, line)
                elif line.startswith("/") and self._doing.pop(child, ""):
                    self._address = self._address or line.strip()
                    self._progressed()
            self._kill_half_way()
            self._look_at_clock()

    def _progressed(self) -> None:
        self._progress = self._noticed = self._clock()

    def _look_at_clock(self) -> None:
        now, awaited = (
            self._clock(),
            ", ".join(f"{child.name} {doing}" for child, doing in self._doing.items()),
        )
        silence = now - self._progress
        if self._doing and silence > PATIENCE_SECONDS:
            words = "".join(
                f"; {child.name}: {child.last_words}" for child in self._doing if child.last_words
            )
            hint = "if the machine is busy, try again later, or with --peers 2"
            raise EquipoiseError(f"nothing happened for {silence:.0f} s: {awaited}{words}", hint)
        if self._doing and now - self._noticed > NOTICE_SECONDS:
            self._noticed = now
            self._say(f"waits, no news for {silence:.0f} s: {awaited}")

    def _take(self, child: Child, line: str) -> None:
        try:
            report = msgspec.json.decode(line, type=told.Report)
        except msgspec.DecodeError:  # A library that prints is no reason to give up.
            self._say(f"{child.name}: {line}")
            return
        is_first = self._ledger.add(self._trainers.index(child), report)
        match report:
            case told.Failed(update=update, reason=reason):
                self._say(f"{child.name}, round {update}: {reason}")
                return  # Attempts that fail for ever are no progress.
            case told.Doing(what=what):
                self._doing[child] = what
                self._say(f"{child.name} {what}")
            case told.Stepped(update=update):
                self._doing[child] = f"has made round {update} of {self._options.rounds}"
                if is_first:
                    self._say(told.line(report, self._options))
        self._progressed()

    def _kill_half_way(self) -> None:
        """SIGKILL the first daemons, through which the others joined, and their trainers: the rest needs nobody."""
        kill = self._options.kill
        made = min(self._ledger.updates(index) for index in range(self._options.peers))
        if kill and not self._killed and made >= max(1, self._options.rounds // 2):
            # A trainer alone could only wait for its daemon to come back.
            self._killed = {*self._daemons[:kill], *self._trainers[:kill]}
            for child in self._killed:
                child.kill()
            self._say(
                f"killed {kill} of {self._options.peers} daemons after round {made}, the first among them"
            )

    def _bury(self, child: Child) -> None:
        """A child has ended: a problem, unless it was killed, or is a trainer that has finished."""
        starts = self._doing.pop(child, "") and child in self._daemons
        failed = child.reap(DEATH_SECONDS) != 0
        if starts:
            raise EquipoiseError(child.ending)
        finished = child in self._trainers and self._trainers.index(child) in self._ledger.finished
        if child not in self._killed and (failed or not finished):
            self._problems.append(child.ending)
            self._say(child.ending)
        self._progressed()


def run_demo(options: DemoOptions, json: bool = False) -> told.Summary:
    """Run the demo and print its result to standard output; notes go to standard error where `json`.

    Raises:
        FlagError: An option is out of its range.
        EquipoiseError: scikit-learn is missing, or a daemon did not come up.
    """
    out = sys.stderr if json else sys.stdout
    say: Say = partial(print, file=out, flush=True)
    say(
        f"{options.peers} peers, each with its own images of digits: how well do they read, together and alone?"
    )
    say("imports torch to check the options: seconds, or a minute where the machine is busy")
    options = options.check()
    with (
        tempfile.TemporaryDirectory(prefix="equipoise-demo-", ignore_cleanup_errors=True) as folder,
        Family(Path(folder)) as family,
    ):
        summary = DemoSwarm(options, family, Path(folder), say).run()
    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        bars = told.BARS if out.encoding.lower().startswith("utf") else "12345678"
        say("\n" + "\n".join(told.summary_lines(summary, bars)))
    if options.plot:
        say(told.write_plot(summary, options))
    return summary
