"""The demo's child processes: started together, heard line by line, and all ended in any case."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from equipoise.dht.parent_death_signal import mortal

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
