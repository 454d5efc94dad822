"""What a daemon does for its clients, whichever way they reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from equipoise.averaging.ports import Candidate
from equipoise.averaging.spec import RunSpec
from equipoise.dht.records import MAX_RUNS_PER_PEER
from equipoise.peer.control.messages import JoinRun
from equipoise.peer.errors import Refused
from equipoise.peer.history import History
from equipoise.peer.purposes import PURPOSES, run_specs
from equipoise.peer.session import Session
from equipoise.peer.shared_memory import Region
from equipoise.peer.status import PeerRow

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router
    from equipoise.averaging.aio.run_driver import RunDriver
    from equipoise.dht.swarm import Swarm

MAX_RUNS = MAX_RUNS_PER_PEER // len(PURPOSES)
"""Runs of one daemon. The others keep so many records of one peer, and each purpose of a run has one of its own."""


class Service:
    """Joins, serves and leaves runs on behalf of clients.

    Attributes:
        history: What their rounds came to.
    """

    def __init__(self, router: Router, swarm: Swarm, history: History) -> None:
        self._router = router
        self._swarm = swarm
        self.history = history
        self._sessions: dict[str, Session] = {}

    @property
    def sessions(self) -> Sequence[Session]:
        """Open sessions, by the runs' names."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    async def join(self, request: JoinRun, fd: int, client: str) -> Session:
        """Take part in a run for a client whose vectors lie in the memory behind `fd`, which is taken over.

        Raises:
            ValueError: An option, the schema or the memory is not valid, or the run has a client already.
        """
        region = Region.attach(fd, request.values)
        specs = run_specs(request)
        if any(spec.layout.size > request.values for spec in specs.values()):
            raise Refused(
                f"the shared memory holds {request.values} values, which is less than the schema has"
            )
        await self._make_room(request.run)
        session = Session(self._router, self._swarm, request.run, specs, region, client)
        self._sessions[request.run] = session
        return session

    async def leave(self, session: Session, reason: str) -> None:
        """Leave a run; idempotent."""
        await session.leave(reason)
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    async def peers(self) -> list[PeerRow]:
        """All known peers of the open runs, in both of their purposes."""
        rows = []
        for session in self.sessions:
            for spec, run_driver in session.in_use:
                rows += await self._peers_of(spec, run_driver)
        return rows

    async def _make_room(self, name: str) -> None:
        other = self._sessions.get(name)
        if other is not None and other.leaving:
            await self.leave(
                other, "its client has gone"
            )  # Its client has gone; a successor should not have to know that.
            other = self._sessions.get(name)
        if other is not None:
            raise Refused(
                f"this daemon takes part in run {name!r} already, for {other.client}",
                "leave it there, use another name, or start another daemon with another --home",
            )
        if len(self._sessions) >= MAX_RUNS:
            raise Refused(
                f"run {name!r} is one too many: this daemon takes part in {MAX_RUNS} runs already, the maximum",
                "leave one, or start another daemon with another --home",
            )

    async def _peers_of(self, spec: RunSpec, run_driver: RunDriver) -> list[PeerRow]:
        known = await self._swarm.directory.peers(spec.name)
        return [self._row(spec, run_driver, found) for found in known if not found.left]

    def _row(self, spec: RunSpec, run_driver: RunDriver, found: Candidate) -> PeerRow:
        reach = self._swarm.reach(found.peer)
        return PeerRow(
            run=spec.name,
            peer=found.peer,
            me=found.peer == self._swarm.peer,
            ready=found.ready,
            round=found.round,
            dialable=found.dialable,
            bandwidth=found.bandwidth,
            accumulated=found.accumulated,
            same_spec=found.spec == spec.hash,
            reach=reach.state,
            why=reach.reason,
            differs=run_driver.difference(found.peer),
            name=self._swarm.name(found.peer),
        )
