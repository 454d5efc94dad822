"""Run a program that must not outlive the process that started it. Stand-alone (`python -I -S`).

On Linux the kernel kills the program when the thread that started this script ends (PR_SET_PDEATHSIG survives
exec), at no cost: this interpreter becomes the program. Elsewhere it stays as a watcher that looks four times a
second whether its parent is still there. A function to run before exec in the daemon itself would do the first
more simply, but is not safe in a process with threads. (p2pd also ends when its last client hangs up; but a child
that a training script has forked may hold that socket open.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

WATCH_SECONDS = 0.25
"""Time between two looks of the watcher: the program must be gone within 2 s."""

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """`PARENT_PID PROGRAM ARGUMENT...`; returns the program's exit status if it was watched."""
    parent, program = int(arguments[0]), arguments[1:]
    if _die_with_parent():
        if os.getppid() != parent:
            return 1
        os.execv(program[0], program)
    return _watch(parent, program)


def _die_with_parent() -> bool:
    is_linux = sys.platform.startswith("linux")
    return is_linux and bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)


def _watch(parent: int, program: list[str]) -> int:
    child = subprocess.Popen(program)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    while child.poll() is None:
        if os.getppid() != parent:
            child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(WATCH_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
