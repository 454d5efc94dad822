"""The run drivers of one run that a client has joined: one for each purpose that is in use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from equipoise.averaging.spec import RunSpec
from equipoise.peer.errors import Refused
from equipoise.peer.purposes import AVERAGE, STEP

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router
    from equipoise.averaging.aio.run_driver import RunDriver

ANNOUNCE_SECONDS = 0.5
"""Longest time for a script to agree on terms; after that, its run is announced to the peers that average."""


class RunDrivers:
    """Joins the swarm's run of a purpose when that is first used.

    Attributes:
        specs: By purpose, the run that this peer is in, or would be.
        in_use: By purpose, the drivers of the runs that it is in.
        purpose: The purpose used last.
        closed: Whether the client leaves, so that nothing more is joined.
    """

    def __init__(self, router: Router, name: str, specs: dict[str, RunSpec], observes: bool) -> None:
        """Begin to announce the run `name`, as the client calls it, to the peers that average."""
        self.specs = dict(specs)
        self.in_use: dict[str, RunDriver] = {}
        self.purpose = AVERAGE
        self.closed = False
        self._router = router
        self._name = name
        self._first = specs
        self._observes = observes
        self._joining = asyncio.Lock()
        self._announcing = asyncio.create_task(self._announce())

    def joined(self, purpose: str) -> RunSpec:
        """The spec of a purpose as the client joined it, before it agreed on anything; raises Refused without one."""
        if purpose not in self._first:
            raise _nothing_to(purpose, self._name)
        return self._first[purpose]

    async def agree(self, agreed: RunSpec, observes: bool) -> None:
        """Step on these terms from now on; raises Refused if the run has stepped on others."""
        async with self._joining:
            if STEP in self.in_use and agreed != self.specs[STEP]:
                hint = "agree before the first accumulate and step, or leave the run and join it again"
                raise Refused(f"run {self._name!r} has stepped on other terms", hint)
            self.specs[STEP], self._observes = agreed, observes
            self._announcing.cancel()

    async def disagree(self, run_driver: RunDriver) -> None:
        """Undo the agreement that this driver has joined on: the client may try again."""
        async with self._joining:
            await self._router.leave(run_driver, "others have agreed on something else")
            if self.in_use.get(STEP) is not run_driver:
                return
            del self.in_use[STEP]
            self.specs[STEP], self.purpose = self._first[STEP], AVERAGE
            if not self.closed:
                self._announcing = asyncio.create_task(self._announce())

    async def use(self, purpose: str) -> RunDriver:
        """Return the driver of a purpose, which is now the one used last; raises Refused as `get`."""
        run_driver = await self.get(purpose)
        self.purpose = purpose
        return run_driver

    async def get(self, purpose: str) -> RunDriver:
        """Return the driver of a purpose; raises Refused if the run has no such purpose, or is being left."""
        if purpose not in self.specs:
            raise _nothing_to(purpose, self._name)
        async with self._joining:
            if purpose not in self.in_use:
                if self.closed:
                    raise Refused(f"run {self._name!r} is being left", "join it again")
                self.in_use[purpose] = await self._router.join(self.specs[purpose], self._observes)
            return self.in_use[purpose]

    def close(self) -> None:
        """Join nothing more: the client leaves."""
        self.closed = True
        self._announcing.cancel()

    async def leave(self, reason: str) -> None:
        """Leave all runs; their drivers go on showing what they were."""
        async with self._joining:
            drivers = self.in_use.values()
            leaving = [asyncio.create_task(self._router.leave(run_driver, reason)) for run_driver in drivers]
        if leaving:
            await asyncio.wait(leaving)

    async def _announce(self) -> None:
        await asyncio.sleep(ANNOUNCE_SECONDS)
        await self.get(AVERAGE)


def _nothing_to(purpose: str, run: str) -> Refused:
    return Refused(f"run {run!r} has no gradients to {purpose}", "join it with parameters that need them")
