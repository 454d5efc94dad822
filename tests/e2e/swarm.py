"""Real daemons as real processes, for end-to-end tests: start, wait on conditions, break, and clean up.

Every process of a swarm inherits a mark in its environment, so that whatever it starts (p2pd, trainers) is
found and ended after the test, also after its parent was killed. Processes are ended by pid, never by name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil

from e2e.forked import PROGRAM, Forked, environment

START_SECONDS = 60.0
"""Far more than a daemon takes, also where sixteen of them share two cores and import torch and hivemind."""

STOP_SECONDS = 60.0
"""A graceful stop may first finish an open round."""

LEFTOVER_SECONDS = 30.0
"""A p2pd must be gone 2 s after its daemon; the rest is room for a busy machine."""

MARK = "SWARM_UNDER_TEST"
"""Not EQUIPOISE_..., which the daemon and the demo take for their own."""

CLI = PROGRAM
"""Starts `equipoise`; tests that bend the program put their own in its place, and that is executed."""

STATES = ("offline:", "searching:", "joined:", "ready:")

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """Poll `condition` until it is true and return its value; the one place in the tests that sleeps.

    Raises:
        TimeoutError: It stayed false for `seconds`; names `what` was waited for.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}; last value: {value!r}")
        time.sleep(0.02)


class ChildProcess:
    """A process of the test's own whose output goes to files, and which may be stopped, killed or paused.

    Attributes:
        forks: Whether `equipoise` and scripts are forked from a process that has imported their libraries. Tests
            set it; what benchmarks measure is executed.
    """

    forks: ClassVar[bool] = False

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str], script: bool = False
    ) -> None:
        """`script` says that the command is `python FILE` or `python -c CODE`, which may be forked."""
        self.command, self._script = list(command), script
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def spawn(self, folder: Path | None = None) -> None:
        """Start the process in `folder`; its earlier output, if any, is kept."""
        if self.forks and (self._script or tuple(self.command[: len(PROGRAM)]) == PROGRAM):
            words = self.command[1:]
            self._process = Forked(words, self._env, self.out, self.err, folder or Path.cwd())
            return
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self._env, cwd=folder
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status; negative for a signal; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def output(self) -> str:
        """All that it wrote to standard output so far."""
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    @property
    def errors(self) -> str:
        """All that it wrote to standard error so far."""
        return self.err.read_text(errors="replace") if self.err.exists() else ""

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end and return the exit status."""
        assert self._process is not None, "not started"
        return self._process.wait(seconds)

    def descendants(self) -> list[psutil.Process]:
        """The processes that it has started, and theirs."""
        try:
            return list(psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    def signal(self, number: int) -> None:
        """Send a signal to it alone."""
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.signal(signal.SIGKILL)
        self.wait()

    def pause(self) -> None:
        """SIGSTOP: alive, silent."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """SIGTERM, then wait for the exit status."""
        self.resume()
        self.signal(signal.SIGTERM)
        return self.wait(seconds)


class DaemonProcess(ChildProcess):
    """`equipoise daemon` with a home of its own."""

    def __init__(
        self,
        home: Path,
        env: Mapping[str, str],
        join: Sequence[str] = (),
        args: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        joins = [word for address in join for word in ("--join", address)]
        command = [*prefix, *CLI, "daemon", "--home", str(home), *joins, *args]
        super().__init__(command, home.with_name(home.name + "-daemon"), env)
        self.home = home
        self._before = 0

    def start(self) -> DaemonProcess:
        """Start it and wait until it is up."""
        self._before = len(self.output)
        self.spawn()
        return self.up()

    def up(self) -> DaemonProcess:
        """Wait until it has printed its addresses, if others can dial it, and its first state."""
        eventually(lambda: self.states or not self.running, f"{self.home.name}'s first state", START_SECONDS)
        assert self.running, f"{self.home.name} ended with status {self.returncode}: {self.errors[-2000:]}"
        return self

    @property
    def addresses(self) -> list[str]:
        """The addresses it printed last, in the form that `--join` takes."""
        lines = self.output[self._before :].splitlines()
        return [line.strip() for line in lines if line.startswith("/") and "/p2p/" in line]

    @property
    def states(self) -> list[str]:
        """The states it printed since its start, each with its reason."""
        lines = self.output[self._before :].splitlines(keepends=True)
        return [line.strip() for line in lines if line.endswith("\n") and line.startswith(STATES)]

    @property
    def address(self) -> str:
        """One address that others on this machine can join."""
        loopback = [address for address in self.addresses if "/127.0.0.1/" in address]
        return (loopback or self.addresses)[0]

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `equipoise ARGS --home HOME`."""
        words = [*args, "--home", str(self.home)]
        with tempfile.TemporaryDirectory() as folder:
            process = ChildProcess([*CLI, *words], Path(folder) / "cli", self._env)
            process.spawn()
            status = process.wait()
            return subprocess.CompletedProcess(words, status, process.output, process.errors)

    def json(self, *args: str) -> Any:
        """Run `equipoise ARGS --json --home HOME`, which must succeed, and parse what it prints."""
        done = self.cli(*args, "--json")
        assert done.returncode == 0, f"{args}: {done.returncode}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout)


class Swarm:
    """The processes of one test; `close` ends them all and reports what should not have been left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.processes: list[ChildProcess] = []

    @property
    def env(self) -> dict[str, str]:
        """The environment of every process of this swarm."""
        return {**environment(), MARK: self.mark}

    def daemon(
        self,
        name: str | None = None,
        join: Sequence[str] = (),
        args: Sequence[str] = (),
        prefix: Sequence[str] = (),
        wait: bool = True,
    ) -> DaemonProcess:
        """A started daemon, which is up unless nobody waits for it, in a new home unless one of this name exists;
        `prefix` comes before its command."""
        home = self.folder / (name or f"daemon{len(self.processes)}")
        daemon = DaemonProcess(home, self.env, join, args, prefix)
        self.processes.append(daemon)
        if wait:
            daemon.start()
        else:
            daemon.spawn()
        return daemon

    def daemons(self, count: int, args: Sequence[str] = ()) -> list[DaemonProcess]:
        """`count` started daemons, the others joined through the first one's address."""
        first = self.daemon(args=args)
        others = [self.daemon(join=[first.address], args=args, wait=False) for _ in range(count - 1)]
        return [first, *(daemon.up() for daemon in others)]

    def script(self, code: str | Path, *args: str, env: Mapping[str, str] | None = None) -> ChildProcess:
        """A started Python process that runs `code`, or the file of that path, with `args`."""
        log = self.folder / f"script{len(self.processes)}"
        words = [str(code)] if isinstance(code, Path) else ["-c", code]
        process = ChildProcess([sys.executable, *words, *args], log, {**self.env, **(env or {})}, True)
        self.processes.append(process)
        process.spawn()
        return process

    def command(self, *args: str) -> ChildProcess:
        """A started `equipoise ARGS`."""
        process = ChildProcess([*CLI, *args], self.folder / f"command{len(self.processes)}", self.env)
        self.processes.append(process)
        process.spawn()
        return process

    def logs(self, tail: int = 4000) -> str:
        """The end of what every process has written."""
        return "\n".join(
            f"--- {p.out.stem} (pid {p.pid}, status {p.returncode})\n{p.output[-tail:]}\n{p.errors[-tail:]}"
            for p in self.processes
        )

    def close(self) -> list[str]:
        """End every process; return the command lines of those that outlived their daemon."""
        for process in self.processes:
            process.resume()
            process.signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        try:
            eventually(lambda: not self._marked(), "the end of all processes", LEFTOVER_SECONDS)
        except TimeoutError:
            return [_end(process) for process in self._marked()]
        return []

    def _marked(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _mark(process) == self.mark]


def _mark(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None  # Ended meanwhile, or another user's.


def _end(process: psutil.Process) -> str:
    try:
        line = " ".join(process.cmdline())
        process.kill()
    except psutil.NoSuchProcess:
        return f"pid {process.pid}, which ended meanwhile"
    return line
