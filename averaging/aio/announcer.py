"""What the directory says of this peer in one run, and so what other peers know of it before they meet it."""

from __future__ import annotations

import asyncio

from equipoise.averaging.aio.round_driver import Shared
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.spec import RunSpec
from equipoise.limits import Stand
from equipoise.tasks import TaskSet

REPORT_SECONDS = 0.02
"""Least time between two reports of the accumulated weight, each a signed record to other peers: a script may
accumulate 1,000 times a second."""


class Announcer:
    """Publishes this peer's record of a run.

    Attributes:
        accumulated: Weight accumulated here towards the next contribution.
        data: The mark of the data set that this peer shares; empty if it shares none.
        ready: Whether this peer looks for a group.
        trained: Whether this peer holds a trained state.
        has_left: Whether it takes part no longer: stragglers may still ask it, and no peer waits for it.
    """

    def __init__(self, spec: RunSpec, shared: Shared, machine: Matchmaker, tasks: TaskSet) -> None:
        self.accumulated = 0.0
        self.data = ""
        self.ready = self.trained = self.has_left = False
        self._spec = spec
        self._shared = shared
        self._machine = machine
        self._tasks = tasks
        self._reported = 0.0
        self._reporting: asyncio.TimerHandle | None = None

    def report_accumulated(self, weight: float) -> None:
        """Publish the weight accumulated towards the next contribution, at most once in `REPORT_SECONDS`."""
        self.accumulated = weight
        if self._reporting is None:
            self._report()

    def count(self) -> None:
        """Note that what was accumulated counts: from now on the same weight again is news."""
        self.accumulated = self._reported = 0.0

    def note_epoch(self, epoch: int) -> None:
        """Note the epoch of this peer's state: newcomers that were told to join by a trained peer wait for it."""
        if epoch > 0 and not self.trained:
            self.trained = True
            self.publish()

    def publish(self) -> None:
        """Have the record say how this peer stands now."""
        if not self.has_left:
            self._tasks.spawn(self.announce())

    async def announce(self) -> None:
        """See `publish`; returns once the directory has it."""
        self._reported = self.accumulated
        stand = Stand(
            state="left" if self.has_left else "ready" if self.ready else "joined",
            spec=self._spec.hash,
            round=self._machine.round,
            accumulated=0.0 if self.has_left else self._reported,
            bandwidth=0.0 if self.has_left else self._shared.sessions.meter.upload.told,
            observes=self._machine.context.membership.observes,
            trained=self.trained,
            data=self.data,
        )
        await self._shared.directory.announce(self._spec.name, stand)

    def _report(self) -> None:
        self._reporting = None
        if self.accumulated != self._reported and self._spec.strategy.batches and not self.has_left:
            self.publish()
            self._reporting = asyncio.get_running_loop().call_later(REPORT_SECONDS, self._report)
