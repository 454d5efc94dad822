"""Runs that their trainers have left, of which a daemon keeps the last updates and the last snapshot.

A straggler may find that the others have finished and gone. Their daemons are still there, say in the directory that
they have left the run, and serve what they kept of it for a while. A daemon that stops keeps nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import NamedTuple

from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.ports import Directory
from equipoise.tasks import TaskSet

LEFTOVER_SECONDS = 300.0
"""Longest time that a run is kept after its trainer has left. A straggler that is not back by then takes a snapshot of
a peer that trains."""

MAX_LEFTOVERS = 4
"""Most runs of one daemon that are kept so; each has a record in the directory. The run left first goes first."""

LEFTOVER_BYTES = 1024 * 1024 * 1024
"""Most bytes of all runs that are kept so: eight updates in int8 of 100 million values take 0.8 GB. The run left first
goes first, and a run that is larger by itself is not kept."""

log = logging.getLogger(__name__)


class _Leftover(NamedTuple):
    transfer: Transfer
    timer: asyncio.TimerHandle


class Leftovers:
    """The runs that were left, by name, in the order in which they were left."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._kept: OrderedDict[str, _Leftover] = OrderedDict()
        self._tasks = TaskSet()

    def add(self, run: str, transfer: Transfer) -> bool:
        """Keep what there is of a run that was left just now; returns whether it is kept, else it was stopped."""
        if not transfer.retire() or transfer.kept_bytes > LEFTOVER_BYTES:
            transfer.stop("the run was left")
            return False
        timer = asyncio.get_running_loop().call_later(LEFTOVER_SECONDS, self._discard, run)
        self._kept[run] = _Leftover(transfer, timer)
        while len(self._kept) > MAX_LEFTOVERS or self._bytes > LEFTOVER_BYTES:
            self._discard(next(iter(self._kept)))
        return True

    def get(self, run: str) -> Transfer | None:
        """Return the transfer of a run that was left; None if nothing is kept of it."""
        kept = self._kept.get(run)
        return None if kept is None else kept.transfer

    @property
    def transfers(self) -> list[Transfer]:
        """The transfers of all runs that were left."""
        return [kept.transfer for kept in self._kept.values()]

    def drop(self, run: str) -> None:
        """Keep a run no longer, for it is taken up again or the daemon stops; its record is the caller's to change."""
        if kept := self._kept.pop(run, None):
            kept.timer.cancel()
            kept.transfer.stop("the run was left")

    async def stop(self) -> None:
        """Keep nothing."""
        for run in list(self._kept):
            self.drop(run)
        await self._tasks.stop()

    @property
    def _bytes(self) -> int:
        return sum(transfer.kept_bytes for transfer in self.transfers)

    def _discard(self, run: str) -> None:
        log.info("run %s: what was kept of it for stragglers is dropped", run)
        self.drop(run)
        self._tasks.spawn(self._directory.withdraw(run))
