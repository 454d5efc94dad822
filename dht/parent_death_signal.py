"""Run a program that must not outlive the process that started it, by `mortal`. Stand-alone (`python -I -S`).

The kernel kills the program when the thread that started this script ends (PR_SET_PDEATHSIG survives
exec), at no cost: this interpreter becomes the program. A function to run before exec in the daemon itself would do
that more simply, but is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def mortal(*program: str) -> tuple[str, ...]:
    """Return the command that runs `program`, of which the first word is a path, until the calling thread ends."""
    return sys.executable, "-I", "-S", __file__, str(os.getpid()), *program


def main(parent: str, *program: str) -> None:
    """Become `program`, unless the process `parent` has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(parent):
        os.execv(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
