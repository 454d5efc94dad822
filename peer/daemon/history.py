"""Outcomes of past rounds, kept in the home so that they outlive the script and the daemon."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from equipoise.averaging.outcome import Outcome
from equipoise.dht.sanitize import read_regular
from equipoise.peer.daemon.logs import PrivateFileHandler

ROUNDS_FILE = "rounds.jsonl"

MAX_FILE_BYTES = 1024 * 1024
"""Size at which the file becomes the older one of two, and a new one is begun."""

MAX_KEPT = 512
"""Outcomes of all runs that are remembered: one of a group of 64 takes 8 KB."""

_outcomes = msgspec.json.Decoder(Outcome)


class RoundHistory:
    """The last outcomes of a daemon, in memory and as lines of JSON in its home.

    Attributes:
        file: The lines; its `trouble` says why the last outcome could not be written.
    """

    def __init__(self, home: Path) -> None:
        """Read what earlier daemons have left.

        Raises:
            HomeError: The file cannot be written.
        """
        self._kept = deque(read_history(home), MAX_KEPT)
        self.file = PrivateFileHandler(home / ROUNDS_FILE, MAX_FILE_BYTES, 1)
        self._write("")  # A daemon that was killed, or a full disk, may have left half a line.

    def add(self, outcome: Outcome) -> None:
        """Remember how a round ended; a file that cannot be written is reported, and costs nothing else."""
        self._kept.append(outcome)
        self._write(msgspec.json.encode(outcome).decode())

    def _write(self, line: str) -> None:
        self.file.emit(logging.makeLogRecord({"msg": line}))

    def last(self, limit: int) -> list[Outcome]:
        """The last `limit` outcomes of each run, oldest first."""
        return last_of_each_run(self._kept, limit)

    def company(self, run: str) -> frozenset[str]:
        """PeerIDs of the contributors to the last mean of a run."""
        means = (frozenset(one.contributors) for one in reversed(self._kept) if one.run == run and one.ok)
        return next(means, frozenset())


def read_history(home: Path, most: int = MAX_KEPT) -> list[Outcome]:
    """Outcomes that daemons on `home` have left, oldest first, at most so many; torn lines are left out."""
    found: list[Outcome] = []
    for name in (f"{ROUNDS_FILE}.1", ROUNDS_FILE):
        content = b""
        with contextlib.suppress(OSError):  # Nothing is known where it is missing or unreadable.
            content = read_regular(home / name, 2 * MAX_FILE_BYTES)
        for line in content.splitlines():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found.append(_outcomes.decode(line))
    return found[-most:]


def last_of_each_run(outcomes: Iterable[Outcome], limit: int) -> list[Outcome]:
    """The last `limit` outcomes of each run, in the order given."""
    by_run: dict[str, deque[Outcome]] = {}
    for outcome in outcomes:
        by_run.setdefault(outcome.run, deque(maxlen=limit)).append(outcome)
    wanted = {id(outcome) for kept in by_run.values() for outcome in kept}
    return [outcome for outcome in outcomes if id(outcome) in wanted]
