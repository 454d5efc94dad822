"""One line on the terminal, renewed while a script trains."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from equipoise.averaging.outcome import Outcome

PAUSE_SECONDS = 0.3
"""Least time between two lines: people read no faster, and a terminal takes microseconds for each."""

ERASE = "\r\x1b[K"
"""Has a terminal begin its line again, with nothing on it."""

_latest: list[ProgressLine] = []
"""The one that has shown its line last."""


class ProgressLine:
    """Shows where a training is, on standard error where that is a terminal; a notebook or a file shows nothing."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._next = -math.inf
        self._shown = False

    def show(self, epoch: int, part: str, last: Outcome | None) -> None:
        """Renew the line, unless that was done a moment ago.

        Args:
            epoch: The number of updates, or of rounds.
            part: How far the next one is.
            last: The outcome of the last round.
        """
        if self._clock() < self._next:
            return
        self._next = self._clock() + PAUSE_SECONDS
        with contextlib.suppress(OSError, ValueError, AttributeError):  # The stream is closed or missing.
            if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
                return
            _clear_before_logging()
            _latest[:] = [self]
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            line = f"run {self._run}: epoch {epoch}, {part}{_told(last)}"
            # The next print of the script begins at the left, on top of it.
            sys.stderr.write(f"{ERASE}{line[: max(width - 1, 0)]}\r")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        """Remove the line, if there is one; the next call of `show` writes it again."""
        if self._shown:
            self._shown, self._next = False, -math.inf
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(ERASE)
                sys.stderr.flush()


def _told(last: Outcome | None) -> str:
    if last is None:
        return ""
    if not last.ok:
        return f", last round: {last.reason}"
    return f", {len(last.group)} peers, last round ok in {last.seconds.get('total', 0.0):.2f} s"


@functools.cache
def _clear_before_logging() -> None:
    """Clear the line before anything is logged. A handler would hide what is logged where there is no other."""
    make = logging.getLogRecordFactory()

    def cleared(*args: Any, **options: Any) -> logging.LogRecord:
        for progress in _latest:
            progress.clear()
        return make(*args, **options)

    logging.setLogRecordFactory(cleared)
