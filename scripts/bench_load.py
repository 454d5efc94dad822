"""What benchmarks need of the machine: how busy others kept it, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterable

import psutil


def end_cleanly_when_terminated() -> None:
    """Let SIGTERM end this process as an exception does, so that daemons and networks go with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def cpu_seconds(family: Iterable[psutil.Process]) -> float:
    """User and system time of all these processes so far."""
    total = 0.0
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            total += used.user + used.system
    return total


class Bystanders:
    """Counts the cores that were busy, or stolen by the hypervisor, and not for this process or its children.

    Where it is not near 0, times are those of a shared machine; ratios of systems that took turns still tell.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy(), cpu_seconds(_family())

    def cores(self) -> float:
        """How many, on average since this was made; the same processes must still run."""
        busy, own = _busy() - self._busy, cpu_seconds(_family()) - self._own
        return max(0.0, (busy - own) / (time.monotonic() - self._began))


def _family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _busy() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq + times.steal)
