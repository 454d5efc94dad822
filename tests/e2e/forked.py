"""Daemons and scripts that are forked from a process that has imported their libraries, not executed.

Importing torch, hivemind and numba takes a daemon 3 s of processor time, and tests start some hundred daemons. All else
is as in a process that is executed: environment, folder, umask, arguments, output, signals and exit status. The daemons
that `equipoise launch` and `equipoise demo` start are executed.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from unittest import mock

PROGRAM = (sys.executable, "-c", "from equipoise.peer.cli import main; main()")
"""Begins each command that is forked. A command that begins in another way is executed."""

TESTS = Path(__file__).resolve().parents[1]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["e2e.preloaded"])


def environment() -> dict[str, str]:
    """What all processes of tests have in their environment."""
    own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    own["EQUIPOISE_UPNP"] = "0"  # No router of the machine that runs the tests is asked for anything.
    return {**{k: v for k, v in os.environ.items() if not k.startswith("EQUIPOISE_")}, **own}


class Forked:
    """A started `python WORDS`, with a file or `-c CODE`; has what the tests use of `subprocess.Popen`."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], out: Path, err: Path, folder: Path
    ) -> None:
        """Its output is appended to `out` and `err`."""
        _preload()
        umask = os.umask(0)
        os.umask(umask)
        given = (list(words), dict(env), (os.devnull, str(out), str(err)), str(folder), umask)
        self._process = _context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None, "started"
        self.pid: int = self._process.pid
        self._words = words

    def poll(self) -> int | None:
        """Its exit status; negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(list(self._words), timeout)
        return status


@functools.cache
def _preload() -> None:
    """Start, once, the process that is forked; it must be able to import the tests."""
    wanted = environment() | {"PYTHONPATH": str(TESTS)}
    with mock.patch.dict(os.environ, wanted, clear=True):
        ensure_running()


def _run(words: list[str], env: dict[str, str], files: tuple[str, str, str], folder: str, umask: int) -> None:
    """Become, in a forked process, what an executed one would be, and run the file or the code."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, path in enumerate(files):
        opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.umask(umask)
    try:
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
