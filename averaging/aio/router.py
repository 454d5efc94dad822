"""All runs of a daemon: joins and leaves them, and hands every frame to the run or round that it is for.

A straggler may find that the others have finished and gone. Their daemons are still there. A daemon says in the
directory that it has left the run, and serves the run's last updates and last snapshot for a while. A daemon that stops
serves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from random import Random

from equipoise.averaging.aio.donor import TRANSFER_FRAME
from equipoise.averaging.aio.messenger import MESSAGE_FRAME, Memory, Messenger
from equipoise.averaging.aio.round_driver import HEADER_PREFIX_BYTES, ROUND_FRAME, Rounds, Shared
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.aio.search_driver import MATCHMAKING_FRAME
from equipoise.averaging.aio.sessions import Placed, Sessions
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.manifest import Identity
from equipoise.averaging.matchmaking import messages as matchmaking_messages
from equipoise.averaging.matchmaking.messages import JoinRefused, JoinRequest
from equipoise.averaging.messaging import messages as run_messages
from equipoise.averaging.messaging.receiver import Mailbox
from equipoise.averaging.ports import Directory, DirectTransport, FrameRefused, Transport
from equipoise.averaging.replication import messages as transfer_messages
from equipoise.averaging.spec import RunSpec
from equipoise.compression.device_reduce import DeviceReducer
from equipoise.tasks import TaskSet

DIRECTORY_FRAME = b"D"
"""First byte of frames of the directory: records of this peer that have changed."""

LEFTOVER_SECONDS = 300.0
"""Longest time that a run is served after its trainer has left. A straggler that is not back by then takes a snapshot
of a peer that trains."""

MAX_LEFTOVERS = 4
"""Most runs of one daemon that are served so; each has a record in the directory. The run left first goes first."""

LEFTOVER_BYTES = 1024 * 1024 * 1024
"""Most bytes of all runs that are served so: eight updates in int8 of 100 million values take 0.8 GB. The run left
first goes first, and a run that is larger by itself is not kept."""

log = logging.getLogger(__name__)


class Router:
    """The runs and rounds of one daemon.

    Args:
        transport: Carries frames; this router serves what comes in on it.
        directory: Knows the peers of a run.
        identity: Signs this peer's joins.
        caps: See `Sessions`.
        direct: Carries frames between members of a group faster than `transport`, where it can.
        reducer: Reduces parts on a device; without one the loop does, on the CPU.
        chance: See `Sessions`; a simulation gives one with a seed.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        identity: Identity,
        caps: tuple[float, float] = (0.0, 0.0),
        direct: DirectTransport | None = None,
        reducer: DeviceReducer | None = None,
        chance: Random | None = None,
    ) -> None:
        self._runs: dict[str, RunDriver] = {}
        self._messengers: dict[str, Messenger] = {}
        self._leftovers: OrderedDict[str, tuple[Transfer, asyncio.TimerHandle]] = OrderedDict()
        self._directory = directory
        directory.carry = self._carry
        self._sessions = Sessions(transport, self, direct, chance, caps)
        self._rounds = Rounds(self._sessions, reducer)
        self._shared = Shared(self._sessions, directory, identity, self._rounds, self._runs)
        self._tasks = TaskSet()

    async def join(self, spec: RunSpec, observes: bool = False) -> RunDriver:
        """Take part in a run; a peer that `observes` is never drawn.

        Raises:
            ValueError: This daemon takes part in a run of that name already.
        """
        if spec.name in self._runs:
            raise ValueError(f"this daemon takes part in a run named {spec.name!r} already")
        self._drop(spec.name)
        run = self._runs[spec.name] = RunDriver(spec, self._shared)
        run.search.start(observes)
        return run

    async def leave(self, run: RunDriver, reason: str) -> None:
        """Stop taking part in a run; an open round fails with `reason`."""
        name = run.spec.name
        if self._runs.get(name) is run:
            del self._runs[name]
            await run.leave(reason, serves=self._serve_on(name, run.transfer))

    def exchange(
        self,
        run: str,
        mailbox: Mailbox,
        mates: Callable[[bool], Awaitable[Mapping[str, bytes]]],
        allocate: Callable[[int], Memory],
    ) -> Messenger:
        """Exchange messages with the other scripts of a run until `hang_up`; see `Messenger`."""
        self._messengers[run] = Messenger(run, mailbox, self._sessions, mates, allocate)
        return self._messengers[run]

    def hang_up(self, messenger: Messenger, reason: str, final: bool) -> None:
        """Exchange messages no longer; see `Messenger.close`."""
        messenger.close(reason, final)
        if self._messengers.get(messenger.run) is messenger:
            del self._messengers[messenger.run]

    async def stop(self) -> None:
        """Leave all runs; open rounds fail with that reason. Then close every channel."""
        reason, runs = "this daemon is stopping", list(self._runs.values())
        self._runs.clear()
        for name in list(self._leftovers):
            self._drop(name)
        for run in runs:
            run.transfer.stop("the run was left")
        try:
            await asyncio.gather(self._tasks.stop(), *(run.leave(reason, serves=False) for run in runs))
        finally:
            for round in list(self._rounds.open.values()):
                round.withdraw(reason)
            await self._sessions.stop()
            for round in list(self._rounds.open.values()):
                round.close()

    # ---- what the sessions tell ----

    def place(self, peer: str, header: bytes, size: int) -> Placed:
        """Place the body of a frame of a round or a transfer; raises `FrameRefused`."""
        kind = header[:1]
        if kind == ROUND_FRAME:
            round = self._rounds.open.get(round_id := header[1:HEADER_PREFIX_BYTES])
            if round is None:
                return self._sessions.scratch(size)
            memory, take = round.place(peer, header, size)
            return memory, lambda body: take(body) if round_id in self._rounds.open else None
        if kind == TRANSFER_FRAME:
            message = transfer_messages.decode(memoryview(header)[1:])
            transfer = self._serving(message.run)
            return self._sessions.scratch(size) if transfer is None else transfer.place(peer, message, size)
        if kind == MESSAGE_FRAME:
            sent = run_messages.decode(memoryview(header)[1:])
            messenger = self._messengers.get(sent.run)
            return self._sessions.scratch(size) if messenger is None else messenger.place(peer, sent, size)
        raise FrameRefused(f"expected a body only in frames of a round, got {size} bytes after {kind!r}")

    def frame(self, peer: str, header: bytes) -> None:
        """Hand a frame without a body to its round, run or transfer; raises `FrameRefused`."""
        kind = header[:1]
        if kind == ROUND_FRAME:
            round_id = header[1:HEADER_PREFIX_BYTES]
            if round := self._rounds.open.get(round_id):
                round.frame(peer, header)
            elif self._rounds.keep_early(round_id, peer, header):
                for run in list(self._runs.values()):
                    run.search.heard_a_round(peer)
        elif kind == MATCHMAKING_FRAME:
            self._matchmaking(peer, header[1:])
        elif kind == TRANSFER_FRAME:
            message = transfer_messages.decode(memoryview(header)[1:])
            if transfer := self._serving(message.run):
                transfer.frame(peer, message)
        elif kind == MESSAGE_FRAME:
            self._message(peer, run_messages.decode(memoryview(header)[1:]))
        elif kind == DIRECTORY_FRAME:
            self._directory.receive(peer, header[1:])
        else:
            raise FrameRefused(
                "expected a frame of a round, of matchmaking, of a transfer, of a script or of the directory, "
                f"got kind {kind!r}"
            )

    def lost(self, peer: str, reason: str, gone: bool) -> None:
        """Tell rounds, runs and transfers that no channel to a peer can be opened."""
        for round in list(self._rounds.open.values()):
            round.lost(peer, reason, gone)
        for transfer, _ in self._leftovers.values():
            transfer.lost(peer, reason)
        for messenger in self._messengers.values():
            messenger.lost(peer, reason)
        for run in list(self._runs.values()):
            run.transfer.lost(peer, reason)
            run.search.lost(peer)

    def _carry(self, peer: str, data: bytes) -> bool:
        if is_open := self._sessions.reaches(peer):
            self._sessions.post(peer, DIRECTORY_FRAME + data)
        return is_open

    def _matchmaking(self, peer: str, data: bytes) -> None:
        message = matchmaking_messages.decode(data)
        run = self._runs.get(message.run)
        if run is not None:
            run.search.receive(peer, message)
        elif isinstance(message, JoinRequest):
            why = f"no run named {message.run!a} here"[: matchmaking_messages.MAX_DETAIL_CHARS]
            refusal = JoinRefused(message.run, message.join.ticket, why)
            self._sessions.post(peer, MATCHMAKING_FRAME + matchmaking_messages.encode(refusal))

    def _message(self, peer: str, message: run_messages.RunMessage) -> None:
        if messenger := self._messengers.get(message.run):
            messenger.frame(peer, message)
        elif isinstance(message, run_messages.ToReceiver):
            refusal = run_messages.Refusal(
                message.run, message.sender, "its daemon has no script in this run"
            )
            self._sessions.post(peer, MESSAGE_FRAME + run_messages.encode(refusal))

    def _serving(self, name: str) -> Transfer | None:
        """Return the transfer of a run that this daemon takes part in, or has left and still serves."""
        if run := self._runs.get(name):
            return run.transfer
        left = self._leftovers.get(name)
        return None if left is None else left[0]

    # ---- runs that were left ----

    def _serve_on(self, name: str, transfer: Transfer) -> bool:
        """Serve what is kept of a run that was left just now; return whether anything is served."""
        if not transfer.retire() or transfer.donor.kept_bytes > LEFTOVER_BYTES:
            transfer.stop("the run was left")
            return False
        timer = asyncio.get_running_loop().call_later(LEFTOVER_SECONDS, self._expire, name)
        self._leftovers[name] = transfer, timer
        while (
            len(self._leftovers) > MAX_LEFTOVERS
            or sum(transfer.donor.kept_bytes for transfer, _ in self._leftovers.values()) > LEFTOVER_BYTES
        ):
            self._expire(next(iter(self._leftovers)))
        return True

    def _expire(self, name: str) -> None:
        log.info("run %s: what was kept of it for stragglers is dropped", name)
        self._drop(name)
        self._tasks.spawn(self._directory.withdraw(name))

    def _drop(self, name: str) -> None:
        """Serve a run no longer. The caller changes its record, for the run is joined again or the daemon stops."""
        if left := self._leftovers.pop(name, None):
            transfer, timer = left
            timer.cancel()
            transfer.stop("the run was left")
