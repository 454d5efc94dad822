"""The demo's child processes: started together, heard line by line, and all ended in any case."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

STOP_SECONDS = 15.0
"""A daemon that stops gracefully needs 2 s, more where all stop at once on two busy cores; then it is killed."""

MAX_LINE_BYTES = 64 * 1024
"""A report is under 1 KB, an address under 200 bytes."""

READ_BYTES = 64 * 1024

_PR_SET_PDEATHSIG = 1


class Child(subprocess.Popen[bytes]):
    """One child process, which dies with this one; its standard output is heard, its standard error goes to a file."""

    def __init__(self, name: str, command: Sequence[str], errors: Path) -> None:
        self.name = name
        self.said = errors
        self._unfinished = b""
        # A user's own configuration is not part of the demo, and with a process per core more threads only wait.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EQUIPOISE_")}
        prctl = ctypes.CDLL(None).prctl  # Looked up before the fork: after it only system calls are safe.
        with errors.open("wb") as log:
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                # The terminal's Ctrl-C is for this process, which ends the children in order.
                start_new_session=True,
                # The kernel ends a child when this process is killed and cannot end it itself.
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    @property
    def ending(self) -> str:
        """The exit status, with the last line that it wrote to standard error."""
        return f"{self.name} ended with status {self.poll()}{self.last_words and ': '}{self.last_words}"

    @property
    def last_words(self) -> str:
        """The last line that it wrote to standard error, or nothing."""
        lines = self.said.read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    def read(self) -> list[str] | None:
        """The whole lines that have come, or None where no more will come."""
        assert self.stdout is not None, "a pipe"
        chunk = os.read(self.stdout.fileno(), READ_BYTES)
        if not chunk or len(self._unfinished) > MAX_LINE_BYTES:
            return None
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

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
        self._selector = selectors.DefaultSelector()

    def start(self, name: str, command: Sequence[str]) -> Child:
        """Start `command` as a child."""
        child = Child(name, command, self._folder / f"{name}.log")
        self._children.append(child)
        assert child.stdout is not None, "a pipe"
        self._selector.register(child.stdout, selectors.EVENT_READ, child)
        return child

    def hear(self, seconds: float) -> Iterator[tuple[Child, str | None]]:
        """Lines of the children within `seconds`: (child, line), and (child, None) once where one says no more."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            child: Child = key.data
            lines = child.read()
            if lines is None:
                self._selector.unregister(key.fd)
            yield from ((child, line) for line in ([None] if lines is None else lines))

    def __exit__(self, *_: object) -> None:
        """End all children, the last started first: trainers before the daemons that they use."""
        for child in reversed(self._children):
            child.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self._children:
            child.reap(deadline - time.monotonic())
        self._selector.close()


def daemon_command(home: Path, join: Sequence[str]) -> list[str]:
    """The command of a daemon that only this machine can reach."""
    joins = [word for address in join for word in ("--join", address)]
    equipoise = [sys.executable, "-c", "from equipoise.peer.cli import main; main()"]
    return [*equipoise, "daemon", "--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", *joins]
