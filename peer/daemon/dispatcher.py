"""The requests of one client to the daemon: each is done in the run that it names, and its answer returned."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from equipoise.peer.control import messages
from equipoise.peer.control.messages import Request, RunRequest
from equipoise.peer.daemon.run_view import peer_rows
from equipoise.peer.daemon.service import Service
from equipoise.peer.daemon.session import Session
from equipoise.peer.errors import Refused
from equipoise.peer.shared_memory import SharedMemory

if TYPE_CHECKING:
    from equipoise.peer.daemon.history import RoundHistory
    from equipoise.peer.status import Status

MAX_ROUNDS_LISTED = 64
"""An outcome of a group of 64 takes about 8 KB; so many fit one frame."""


class Host(Protocol):
    """The daemon that the clients reach."""

    service: Service
    history: RoundHistory

    def request_stop(self, reason: str) -> None:
        """Begin to stop."""

    def welcome(self) -> messages.Welcome:
        """Return the answer to a greeting."""

    def status(self, clients: int) -> Status:
        """Return a snapshot of everything that can be asked about the daemon, which has so many clients."""


class Dispatcher:
    """Does the requests of one client, whatever brings them.

    Args:
        daemon: Serves the client.
        take_descriptor: Returns the next descriptor that the client has sent, which is taken over.
        say: Has the client's script log a line.
        status: Returns the daemon's status, as this client is to see it.

    Attributes:
        client: The client, as messages name it.
    """

    def __init__(
        self,
        daemon: Host,
        client: str,
        take_descriptor: Callable[[], int],
        say: Callable[[str], Awaitable[None]],
        status: Callable[[], Status],
    ) -> None:
        self.client = client
        self._daemon = daemon
        self._take_descriptor = take_descriptor
        self._say = say
        self._status = status
        self._sessions: dict[str, Session] = {}

    @property
    def takes_part(self) -> bool:
        """True while the client is in a run."""
        return bool(self._sessions)

    async def do(self, request: Request[Any]) -> object:
        """Do what is asked; returns the answer, of the type that the request names.

        Raises:
            EquipoiseError: It is refused; says why.
            ValueError: It has a value that is out of range.
        """
        service = self._daemon.service
        match request:
            case messages.JoinRun():
                fd = self._take_descriptor()
                self._sessions[request.run] = await service.join(request, fd, self.client, self._say)
                return None
            case messages.Ping():
                return None
            case messages.AskStatus():
                return self._status()
            case messages.AskPeers():
                return [
                    row for session in service.sessions for row in await peer_rows(session, service.swarm)
                ]
            case messages.AskRounds(limit):
                return self._daemon.history.last(min(max(limit, 1), MAX_ROUNDS_LISTED))[-MAX_ROUNDS_LISTED:]
            case messages.Revoke(target):
                return service.swarm.revoke(target)
            case messages.Ban(peer, reason):
                service.swarm.ban(peer, reason)
                return None
            case messages.StopDaemon():
                self._daemon.request_stop(f"asked by {self.client}")
                return None
            case messages.OfferState() | messages.Fetch():
                return await self._transfer(request)
            case RunRequest():
                return await self._do_in(self._session(request.run), request)
        raise Refused(f"expected a request, got {type(request).__name__}")

    async def leave_all(self, reason: str) -> None:
        """Leave all runs of this client."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        await asyncio.gather(*(self._daemon.service.leave(session, reason) for session in sessions))

    async def _do_in(self, session: Session, request: RunRequest[Any]) -> object:
        match request:
            case messages.AgreeRun():
                return await session.agree(request, self._daemon.history.company(session.name))
            case messages.StartRound():
                outcome = await session.start_round(request)
                self._daemon.history.add(outcome)
                return outcome
            case messages.StopRound(_, why):
                session.stop_round(why)
            case messages.StopFetch():
                (await session.transfer()).withdraw("cancelled")
            case messages.ReportAccumulated(_, weight):
                await session.report_accumulated(weight)
            case messages.TellStatus(_, topic, line):
                session.tell(topic, line)
            case messages.AskState():
                return await session.state()
            case messages.AskMembers(_, data):
                return await session.members(data)
            case messages.SendMessage():
                session.send(request)
            case messages.AskNotices():
                return await session.messages.messenger.notices()
            case messages.ReceiveMessage():
                return await session.messages.receive(request)
            case messages.AskProgress(_, target, held):
                return await session.progress(target, held)
            case messages.LeaveRun(run):
                await self._daemon.service.leave(session, "its client has left the run")
                self._sessions.pop(run, None)
        return None

    async def _transfer(self, request: messages.OfferState | messages.Fetch) -> object:
        # Taken first: it must not be left to the next request where this one is refused.
        with contextlib.closing(SharedMemory.attach(self._take_descriptor(), request.size)) as memory:
            session = self._session(request.run)
            if isinstance(request, messages.Fetch):
                return await session.fetch(request, memory)
            await (await session.transfer()).donor.offer(
                request.state, memory.view(request.size, writable=False)
            )
        return None

    def _session(self, run: str) -> Session:
        if run not in self._sessions:
            raise Refused(f"this client does not take part in run {run[:64]!r}", "join it first")
        return self._sessions[run]
