"""Asks the peers of a run that have another spec how theirs differs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.spec_diff import SpecDiff
from equipoise.averaging.spec import RunSpec
from equipoise.tasks import Driver

log = logging.getLogger(__name__)


class Comparison:
    """Drives the `SpecDiff` of one run; `send` performs its actions."""

    def __init__(self, spec: RunSpec, peer: str, send: Callable[[events.Send], None]) -> None:
        self._run = spec.name
        self._loop = asyncio.get_running_loop()
        self._machine = SpecDiff(spec, peer, self._loop.time())
        self._driver = Driver(self._machine, send)
        self._heard = asyncio.Event()

    @property
    def reason(self) -> str:
        """How the specs of all others differ, one line; empty if a peer has this one, or no difference is known."""
        return self._machine.reason

    def difference(self, peer: str) -> str:
        """Return how another peer's spec differs, one line; empty if it does not, or the difference is not known."""
        return self._machine.difference(peer)

    async def objection(self, timeout: float) -> str:
        """Return why this peer should not take part with its spec, one line; empty if it may.

        Waits up to `timeout` seconds until the known peers with another spec have described theirs.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._machine.settled(self._loop.time()):
                    self._heard.clear()
                    await self._heard.wait()
        return self._machine.objection()

    def tell(self, event: events.Event) -> None:
        """Take in an event, and log a difference that is news."""
        before = self.reason
        self._driver.tell(event)
        if self.reason != before and self.reason:
            log.warning("run %s: %s", self._run, self.reason)
        self._heard.set()

    def stop(self) -> None:
        """Ask and answer nothing any more."""
        self._driver.stop()
