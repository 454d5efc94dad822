"""The demo from beginning to end: peers are started, heard, killed half-way where asked, and ended."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import msgspec

from equipoise.dht.parent_death_signal import mortal
from equipoise.peer.demo.options import DemoOptions
from equipoise.peer.demo.summary import BARS, Report, Summary, summarize, summary_lines, write_plot

STOP_SECONDS = 15.0
"""A daemon that stops gracefully needs 2 s, more where all stop at once on two busy cores; then it is killed."""


class Child(subprocess.Popen[str]):
    """One child process, which dies with this one; its standard output is heard, its standard error goes to a file."""

    def __init__(self, name: str, command: Sequence[str], errors: Path) -> None:
        self.name, self._errors = name, errors
        # A user's own configuration is not part of the demo, and with a process per core more threads only wait.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EQUIPOISE_")}
        with errors.open("wb") as log:
            super().__init__(
                mortal(*command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                errors="replace",
                env={**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                # The terminal's Ctrl-C is for this process, which ends the children in order.
                start_new_session=True,
            )

    @property
    def ending(self) -> str:
        """The exit status, with the last line that it wrote to standard error."""
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f"{self.name} ended with status {self.poll()}{f': {lines[-1][:500]}' if lines else ''}"

    def reap(self, seconds: float) -> int:
        """Wait for its end, kill it where it takes longer than `seconds`, and return its exit status."""
        try:
            return self.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


class Family(AbstractContextManager["Family"]):
    """All children of the demo; leaving the context ends every one of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: list[Child] = []
        self._heard = queue.SimpleQueue[tuple[Child, str | None]]()

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start `command` as a child."""
        child = Child(name, command, self._folder / f"{name}.log")
        self._children.append(child)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        return child

    def hear(self, seconds: float) -> Iterator[tuple[Child, str | None]]:
        """The next line within `seconds`, if any: (child, line), and (child, None) once where one says no more."""
        try:
            yield self._heard.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return

    def _listen(self, child: Child) -> None:
        for line in child.stdout or ():
            self._heard.put((child, line.rstrip("\n")))
        self._heard.put((child, None))

    def __exit__(self, *_: object) -> None:
        """End all children, the last started first: scripts before the daemons that they use."""
        for child in reversed(self._children):
            child.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            child.reap(deadline - time.monotonic())


NOTICE_SECONDS = 10.0
"""Silence after which the demo says what it waits for, again and again."""

PATIENCE_SECONDS = 300.0
"""Time without progress after which the demo gives up. A busy machine has needed 170 s to import torch in all peers."""

DEATH_SECONDS = 1.0
"""A child that has closed its standard output ends at once, or is made to."""


class DemoSwarm:
    """One run of the demo; all its processes belong to `family`, all its files to `folder`."""

    def __init__(
        self,
        options: DemoOptions,
        family: Family,
        folder: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._family, self._folder = options, family, folder
        self._say, self._clock = say, clock
        self._reports: dict[Child, list[Report]] = {}  # In the order of their starts.
        self._killed: list[Child] = []
        self._problems: list[str] = []
        self._start = self._progress = clock()

    def run(self) -> Summary:
        """Start everything, train, kill half-way where asked, and return the result.

        It ends when all peers have finished, or at the first problem: a peer has ended, or nothing goes on.
        """
        self._start_peer()
        while not self._problems and (awaited := self._awaited()):
            silence = self._clock() - self._progress
            heard = list(self._family.hear(NOTICE_SECONDS))
            for child, line in heard:
                self._hear(child, line)
            self._kill_half_way()
            if silence > PATIENCE_SECONDS:
                hint = "if the machine is busy, try again later, or with --peers 2"
                self._problems.append(f"nothing happened for {silence:.0f} s: {awaited}; {hint}")
            elif not heard:
                self._say(f"waits, no news for {silence:.0f} s: {awaited}")
        reports, seconds = list(self._reports.values()), self._clock() - self._start
        return summarize(self._options, reports, len(self._killed), self._problems, seconds)

    def _start_peer(self, *join: str) -> None:
        index = len(self._reports)
        options = msgspec.json.encode(self._options).decode()
        words = [str(self._folder / f"peer{index + 1}"), str(index), options, *join]
        command = [sys.executable, "-m", "equipoise.peer.demo.trainer", *words]
        child = self._family.start(f"peer {index + 1}", command)
        self._take(child, Report(doing="imports torch"))

    def _awaited(self) -> str:
        """What the peers do that have not finished, for people."""
        latest = [
            (child, reports[-1]) for child, reports in self._reports.items() if child not in self._killed
        ]
        return ", ".join(f"{child.name} {last.doing}" for child, last in latest if not last.digest)

    def _hear(self, child: Child, line: str | None) -> None:
        if line is None:
            if child not in self._killed:
                child.reap(DEATH_SECONDS)
                self._problems.append(child.ending)
            return
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:  # A library that prints is no reason to give up.
            self._say(f"{child.name}: {line}")
            return
        self._take(child, report)
        while report.address and len(self._reports) < self._options.peers:
            self._start_peer(report.address)

    def _take(self, child: Child, report: Report) -> None:
        most = max((reports[-1].updates for reports in self._reports.values()), default=0)
        self._reports.setdefault(child, []).append(report)
        # Of all peers that make an update, the first is shown.
        if not report.accuracy or report.updates > most:
            self._say(f"{child.name} {report.doing}")
        if not report.failed:  # Attempts that fail for ever are no progress.
            self._progress = self._clock()

    def _kill_half_way(self) -> None:
        """SIGKILL the first peers, through which the others joined: the rest needs nobody."""
        kill, made = self._options.kill, min(reports[-1].updates for reports in self._reports.values())
        if not self._killed and kill and made >= max(1, self._options.rounds // 2):
            self._killed = list(self._reports)[:kill]
            for child in self._killed:
                child.kill()
            peers = self._options.peers
            self._say(f"killed {kill} of {peers} peers after round {made}, the first among them")


def run_demo(options: DemoOptions, json: bool = False) -> Summary:
    """Run the demo and print its result to standard output; notes go to standard error where `json`.

    Raises:
        FlagError: An option is out of its range.
        EquipoiseError: scikit-learn is missing.
    """
    out = sys.stderr if json else sys.stdout
    say = partial(print, file=out, flush=True)
    say(f"{options.peers} peers, each with its own images: how well do they read digits, together and alone?")
    say("imports torch to check the options: seconds, or a minute where the machine is busy")
    options.check()
    temporary = tempfile.TemporaryDirectory(prefix="equipoise-demo-", ignore_cleanup_errors=True)
    with temporary as folder, Family(Path(folder)) as family:
        summary = DemoSwarm(options, family, Path(folder), say).run()
    if json:
        print(msgspec.json.encode(summary).decode())
    else:
        bars = BARS if out.encoding.lower().startswith("utf") else "12345678"
        say("\n" + "\n".join(summary_lines(summary, bars)))
    if options.plot:
        say(write_plot(summary, options.plot, f"{options.peers} peers, {options.strategy}, {options.split}"))
    return summary
