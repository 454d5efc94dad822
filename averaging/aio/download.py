"""The asyncio driver of one download: memory, digests and messages around the machine `transfer.fetch.Fetch`."""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from blake3 import blake3

from equipoise.averaging.aio.sessions import Sessions
from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.manifest import TICKET_BYTES
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.statesync.chunks import CHUNK_BYTES, DIGEST_BYTES, ImageId, is_chunk
from equipoise.averaging.statesync.client import Fetch, Request
from equipoise.averaging.statesync.events import (
    Allocate,
    AnswerReceived,
    Check,
    Checked,
    ChunkReceived,
    DigestsReceived,
    Fail,
    FetchEvent,
    Finish,
    MemoryReady,
    MemoryRefused,
    PeerLost,
    PeersSeen,
    ProtocolBroken,
    Send,
    Withdrew,
    Woke,
)
from equipoise.averaging.statesync.messages import (
    AskChunks,
    AskDigests,
    Bulk,
    Chunk,
    Digests,
    ToNewcomer,
    TransferMessage,
    encode,
)
from equipoise.averaging.statesync.outcome import FetchOutcome

TRANSFER_FRAME = b"T"
"""First byte of the header of every frame of a transfer; a message follows."""

MAX_DONORS = 64
"""Peers that are asked, as many as a group has. Of a larger run so many are enough, and each costs a dial and a word a
second; a directory that is flooded with names must not have all of them dialled."""

Room = Callable[[int], Awaitable[memoryview]]
"""Makes room for an image: a writable view of just so many bytes. Raises ValueError where there is none."""

Examine = Callable[[memoryview, Sequence[Commit]], Awaitable[str]]
"""Finds out whether the image of a mean is the group's, given what was given to prove it; returns why not, or nothing.
Raises NoRoomError."""

log = logging.getLogger(__name__)


class NoRoomError(Exception):
    """There is no room for a mean that is the group's; the message says why."""


def flow_of(ticket: bytes, peer: str) -> bytes:
    """The sessions's name for what goes between this peer and another for one download."""
    return TRANSFER_FRAME + ticket + peer.encode()


class Download:
    """One download of a run's state.

    Args:
        request: What it is after, without a ticket.
        sessions: Sends frames.
        timeout: Seconds for everything.
        room: Makes memory for the image.
        examine: Looks at the image of a mean; of a snapshot nothing is asked.

    Attributes:
        outcome: What it came to.
        voters: Who had a say in which snapshot has come.
    """

    def __init__(
        self, request: Request, sessions: Sessions, timeout: float, room: Room, examine: Examine | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[FetchOutcome] = self._loop.create_future()
        self._sessions = sessions
        self._room = room
        self._examine = examine
        self.voters: frozenset[str] = frozenset()
        self._began = self._loop.time()
        self._ticket = request.ticket
        self._machine = Fetch(request, self._began, timeout)
        self._image: ImageId | None = None
        self._digests = b""
        self._memory = memoryview(b"")
        self._credentials: Mapping[str, bytes] = {}
        self._entered: set[str] = set()
        self._due: Counter[str] = Counter()
        self._making: asyncio.Task[None] | None = None
        self._examining: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @staticmethod
    def ticket() -> bytes:
        """A ticket for a new request."""
        return os.urandom(TICKET_BYTES)

    @property
    def standing(self) -> str:
        """What it is doing, in one line."""
        return self._machine.standing

    def see(self, credentials: Mapping[str, bytes]) -> None:
        """These are the peers of the run, and what they say of their direct channels."""
        before = self._credentials
        chosen = heapq.nsmallest(
            MAX_DONORS, credentials, key=lambda peer: (peer not in before, self._lot(peer))
        )
        self._credentials = {peer: credentials[peer] for peer in chosen}
        for peer, credential in self._credentials.items():
            if credential != before.get(peer):
                self._sessions.admit(
                    peer, credential
                )  # A donor that is asked opens a channel before it answers.
        self._tell(PeersSeen(tuple(self._credentials)))

    def withdraw(self, reason: str) -> None:
        """End it."""
        self._tell(Withdrew(reason))

    def lost(self, peer: str, reason: str) -> None:
        """Frames to or from a peer may have been lost."""
        self._tell(PeerLost(peer, reason))

    def place(self, peer: str, message: Bulk, size: int) -> memoryview:
        """Where a body goes: a buffer of its own if it is wanted, else scratch.

        Not into the image: a donor that stalled in the middle of a chunk could write over what another has delivered
        and was verified.

        Raises:
            FrameRefused: It has another size than it should have, or more comes than was asked for.
        """
        if message.ticket != self._ticket:
            return self._sessions.scratch(size)  # Of an earlier download, which was over before it came.
        self._due[peer] -= 1
        if self._due[peer] < 0:
            raise self._broken(peer, "it sends more than it was asked for")
        if self._image is None or not self._machine.expects(peer, message):
            return self._sessions.scratch(size)
        expected = self._image.chunks * DIGEST_BYTES
        if isinstance(message, Chunk):
            expected = self._image.length(message.chunk)
        if size != expected:
            raise self._broken(peer, f"expected {expected} bytes of a {type(message).__name__}, got {size}")
        return self._sessions.pool.take(size)

    def _lot(self, peer: str) -> bytes:
        """A peer's place in an order that differs from download to download, so that no name is sure of a place."""
        return blake3(self._ticket + peer.encode()).digest()

    def _broken(self, peer: str, reason: str) -> FrameRefused:
        self._tell(ProtocolBroken(peer, reason))
        return FrameRefused(reason)

    def frame(self, peer: str, message: ToNewcomer, body: memoryview) -> None:
        """A frame has come from a donor."""
        if not isinstance(message, Bulk):
            self._tell(AnswerReceived(peer, message))
        elif self._image is not None and body and not self._sessions.is_scratch(body):
            self._take(peer, message, body, self._image)

    def _take(self, peer: str, message: Bulk, body: memoryview, image: ImageId) -> None:
        if not self._machine.expects(peer, message):
            return  # It was wanted when it began to come in, and has come from another since.
        if isinstance(message, Digests):
            genuine = image.genuine(body)
            if genuine:
                self._digests = bytes(body)
            self._tell(DigestsReceived(peer, image, genuine))
            return
        genuine = is_chunk(body, self._digests, message.chunk)
        if genuine:
            self._memory[image.span(message.chunk)] = body
        self._tell(ChunkReceived(peer, image, message.chunk, genuine))

    def _tell(self, event: FetchEvent) -> None:
        for action in self._machine.handle(event, self._loop.time()):
            match action:
                case Send(peer, message):
                    self._send(peer, message)
                case Allocate(image):
                    self._allocate(image)
                case Check(proofs):
                    self._examining = asyncio.create_task(self._look_at(proofs))
                case Finish() | Fail():
                    self._end(action)
        self._schedule()

    def _send(self, peer: str, message: TransferMessage) -> None:
        self._sessions.post(peer, TRANSFER_FRAME + encode(message))
        if isinstance(message, AskDigests | AskChunks):
            self._due[peer] += len(message.chunks) if isinstance(message, AskChunks) else 1
            if peer not in self._entered:
                # By now it has admitted this peer: it has answered.
                self._entered.add(peer)
                self._sessions.enter(flow_of(self._ticket, peer), {peer: self._credentials.get(peer, b"")})

    def _allocate(self, image: ImageId) -> None:
        if self._making is not None:
            self._making.cancel()
        self._image, self._digests = image, b""
        self._making = asyncio.create_task(self._make_room(image))

    async def _make_room(self, image: ImageId) -> None:
        try:
            self._memory = await self._room(image.size)
        except ValueError as error:
            self._tell(MemoryRefused(str(error)))
        except Exception:
            log.exception("no memory for an image of %d bytes", image.size)
            self._tell(MemoryRefused("making room for the image failed here; the daemon's log says more"))
        else:
            self._tell(MemoryReady(image.size))

    async def _look_at(self, proofs: Sequence[Commit]) -> None:
        assert self._examine is not None, "who is after a mean can tell whether it is one"
        try:
            event: FetchEvent = Checked(await self._examine(self._memory, proofs))
        except NoRoomError as error:
            event = MemoryRefused(str(error))
        except Exception:  # Whatever is in it that nobody thought of: another donor may have a better one.
            log.exception("an image of %d bytes could not be looked at", len(self._memory))
            event = Checked("looking at the mean from it failed here; the daemon's log says more")
        self._tell(event)

    def _end(self, action: Finish | Fail) -> None:
        seconds = self._loop.time() - self._began
        if isinstance(action, Finish):
            self.voters = action.voters
            outcome = FetchOutcome(
                ok=True,
                reason=action.reason,
                state=action.state,
                size=action.image.size,
                sources={peer: min(n * CHUNK_BYTES, action.image.size) for peer, n in action.sources.items()},
                seconds=seconds,
            )
        else:
            outcome = FetchOutcome(
                ok=False, reason=action.reason, seconds=seconds, behind=action.behind, unheard=action.unheard
            )
        for peer in self._entered:
            self._sessions.leave(flow_of(self._ticket, peer))
        self._memory = memoryview(b"")
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._machine.deadline != float("inf"):
            self._timer = self._loop.call_at(self._machine.deadline, self._tell, Woke())
