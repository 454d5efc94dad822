"""The daemon's work for all its clients: it joins and leaves runs, and loads the kernels that they need."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from equipoise.averaging.aio.router import MAX_LEFTOVERS
from equipoise.averaging.ledger import Given, Ledger
from equipoise.averaging.rules import Mean
from equipoise.compression import kernels
from equipoise.compression.choice import WORTH_VALUES, are_worth
from equipoise.dht.records import MAX_RUNS_PER_PEER
from equipoise.limits import LruDict
from equipoise.peer.control.messages import JoinRun
from equipoise.peer.daemon.session import Session
from equipoise.peer.errors import Refused
from equipoise.peer.purposes import PURPOSES, run_specs
from equipoise.peer.shared_memory import Region
from equipoise.peer.status import Kernels

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router
    from equipoise.compression.device_reduce import DeviceReducer
    from equipoise.dht.swarm import Swarm

MAX_RUNS = (MAX_RUNS_PER_PEER - MAX_LEFTOVERS) // len(PURPOSES)
"""Most runs of one daemon. Others keep `MAX_RUNS_PER_PEER` records of it: each purpose of a run has its own, and so has
each run that was left and is still served."""

NUMPY = Kernels("numpy", f"others are loaded for the first run of {WORTH_VALUES:,} values or more")

LOADS = "the daemon loads its kernels, once"

log = logging.getLogger(__name__)


class Service:
    """Joins, serves and leaves runs on behalf of clients.

    Attributes:
        kernels: What encodes and decodes.
        swarm: The daemon's swarm.
    """

    def __init__(self, router: Router, swarm: Swarm, reducer: DeviceReducer | None = None) -> None:
        self.kernels = NUMPY
        self._router = router
        self.swarm = swarm
        self._reducer = reducer
        self.ledgers: LruDict[str, Ledger] = LruDict(MAX_RUNS)
        self._sessions: dict[str, Session] = {}
        self._loading = asyncio.Lock()

    @property
    def sessions(self) -> Sequence[Session]:
        """Open sessions, by the runs' names."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    @property
    def trouble(self) -> str:
        """Why the GPU does not reduce, one line; empty if it does, or none is used."""
        return "" if self._reducer is None else self._reducer.trouble

    @property
    def given(self) -> dict[str, Given]:
        """What this daemon has given to the runs of its scripts, by their names, also after they have left."""
        return {name: ledger.of(self.swarm.peer) for name, ledger in sorted(self.ledgers.items())}

    async def join(
        self, request: JoinRun, fd: int, client: str, say: Callable[[str], Awaitable[None]]
    ) -> Session:
        """Take part in a run for a client whose vectors lie in the memory behind `fd`; takes over `fd`.

        What takes long is told the client by `say`, before it begins.

        Raises:
            ValueError: An option, the schema or the memory is not valid, or the run has a client already.
        """
        region = Region.attach(fd, request.size)
        await self._load_kernels(request, say)
        await self._make_room(request.run)
        ledger = self.ledgers.get(request.run) or Ledger(self.swarm.peer)
        session = Session(self._router, self.swarm, request, region, client, ledger)
        self._sessions[request.run], self.ledgers[request.run] = session, ledger
        ledger.begin()
        return session

    async def leave(self, session: Session, reason: str) -> None:
        """Leave a run; idempotent."""
        await session.leave(reason)
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    async def _load_kernels(self, request: JoinRun, say: Callable[[str], Awaitable[None]]) -> None:
        """Load what the run computes with, in threads: a daemon without a run does not need these libraries.

        Kernels are chosen when the first run is joined that is worth it, or at the first join if a GPU reduces.

        Raises:
            ValueError: An option or the schema is not valid.
        """
        needs_torch, size = await asyncio.to_thread(_needs, request)
        worth = self.kernels is NUMPY and (are_worth(size) or self._reducer is not None)
        if worth or (needs_torch and "torch" not in sys.modules):
            await say(LOADS)
        if worth or needs_torch:
            # A client that goes meanwhile does not end it: the next one needs the same.
            await asyncio.shield(asyncio.create_task(self._load(needs_torch, worth)))

    async def _load(self, needs_torch: bool, worth: bool) -> None:
        async with self._loading:
            if needs_torch:
                await asyncio.to_thread(importlib.import_module, "torch")
            if not worth or self.kernels is not NUMPY:
                return
            chosen = await asyncio.to_thread(kernels)
            # The daemon holds numpy arrays. Without compiled kernels, numpy computes.
            name, reason = chosen.name if chosen.arrays else "numpy", chosen.reason
            if self._reducer is not None:
                device = str(self._reducer.device)
                there = await asyncio.to_thread(kernels, device)
                name, reason = f"{name}; {there.name} on {device}", f"{reason}; {there.reason}"
            self.kernels = Kernels(name, reason)
            log.info("kernels: %s (%s)", name, reason)

    async def _make_room(self, name: str) -> None:
        other = self._sessions.get(name)
        if other is not None and other.leaving:
            await self.leave(other, "its client has gone")  # The new client need not notice.
            other = self._sessions.get(name)
        if other is not None:
            hint = "end that with run.leave() there, use another name, or start another daemon with another --home"
            raise Refused(f"this daemon takes part in run {name!r} already, for {other.client}", hint)
        if len(self._sessions) >= MAX_RUNS:
            told = f"run {name!r} is one too many: this daemon takes part in {MAX_RUNS} runs already, the maximum"
            raise Refused(told, "leave one, or start another daemon with another --home")


def _needs(request: JoinRun) -> tuple[bool, int]:
    """Whether a rule or codec of the run uses torch, whose import would hold a round up for 2 s; and the number of
    values of the run's longest vector."""
    specs = run_specs(request).values()
    needs_torch = any(not isinstance(spec.rule, Mean) or spec.layout.codec.math is None for spec in specs)
    return needs_torch, max((spec.layout.size for spec in specs), default=0)
