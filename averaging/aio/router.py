"""All runs of a daemon: joins them, and hands every frame to the run or round that it is for."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict

from equipoise.averaging.aio.leftovers import Leftovers
from equipoise.averaging.aio.round_driver import HEADER_PREFIX_BYTES, ROUND_FRAME, RoundDriver, Task
from equipoise.averaging.aio.run_driver import MATCHMAKING_FRAME, Identity, RunDriver, Surroundings
from equipoise.averaging.aio.sessions import Sessions
from equipoise.averaging.aio.transfer import TRANSFER_FRAME, Transfer
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.matchmaking import messages as matchmaking_messages
from equipoise.averaging.matchmaking.messages import JoinRequest, refuse_unknown_run
from equipoise.averaging.ports import Directory, DirectTransport, FrameRefused, Transport
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.statesync import messages as transfer_messages

MAX_EARLY_ROUNDS = 8
"""Rounds of which one peer may speak before this peer's manifest has come; one per run that both wait in is usual."""

MAX_EARLY_FRAMES = 16
"""Control frames kept of one peer for each of those: a hello or two."""

MAX_EARLY_BYTES = 512
"""Of each: a hello takes 40, and nobody says much to a member that has not spoken yet."""

MAX_EARLY_PEERS = 256
"""Peers of which any are kept: as many as may have channels. Those who spoke last come first."""

MAX_LINGERING = 2
"""Rounds of one run that are over here and still answer others. Whoever needs an older one has others to ask."""

MAX_COMING = 32
"""Headers of bodies under way that are kept decoded, of all routers; from each channel one comes at a time. A hostile
one takes 128 KiB and as much decoded."""

MAX_CLOSED_ROUNDS = 1024
"""Ids of rounds that are over, whose late frames are dropped."""

log = logging.getLogger(__name__)


class Router:
    """The runs and rounds of one daemon.

    Args:
        transport: Carries frames; this router serves what comes in on it.
        directory: Knows the peers of a run.
        identity: Signs this peer's joins.
        bandwidth: What this peer can send, bytes per second; 0 to measure it.
        direct: Carries frames between members of a group faster than `transport`, where it can.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        identity: Identity,
        bandwidth: float = 0.0,
        direct: DirectTransport | None = None,
    ) -> None:
        self._runs: dict[str, RunDriver] = {}
        self._transfers: dict[str, Transfer] = {}
        self._leftovers = Leftovers(directory)
        self._stopping = False
        self._rounds: dict[bytes, RoundDriver] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._early: OrderedDict[str, OrderedDict[bytes, list[bytes]]] = OrderedDict()
        self._sessions = Sessions(transport, self, direct)
        self._surroundings = Surroundings(
            self._sessions,
            directory,
            identity,
            bandwidth,
            self._begin,
            self._left,
        )

    async def join(self, spec: RunSpec) -> RunDriver:
        """Take part in a run.

        Raises:
            ValueError: This daemon takes part in a run of that name already.
        """
        if spec.name in self._runs:
            raise ValueError(f"this daemon takes part in a run named {spec.name!r} already")
        self._leftovers.drop(spec.name)
        run = RunDriver(spec, self._surroundings)
        self._runs[spec.name] = run
        directory, verify = self._surroundings.directory, self._surroundings.identity.verify
        self._transfers[spec.name] = Transfer(
            spec, self._sessions, directory, verify, self._busy, lambda: len(self._runs), run.is_mute
        )
        run.start()
        return run

    def transfer(self, run: str) -> Transfer:
        """Gives and takes the state of a run that this daemon takes part in.

        Raises:
            KeyError: It takes part in none of that name.
        """
        return self._transfers[run]

    async def stop(self) -> None:
        """Leave all runs; open rounds fail with that reason. Then close every channel."""
        self._stopping = True
        try:
            await self._leftovers.stop()
            await asyncio.gather(*(run.leave("this daemon is stopping") for run in list(self._runs.values())))
        finally:
            for round in list(self._rounds.values()):
                round.withdraw("this daemon is stopping")
            await self._sessions.stop()
            for round in list(self._rounds.values()):
                round.close()

    # ---- what the sessions tell ----

    def place(self, peer: str, header: bytes, size: int) -> memoryview:
        """Return memory for the body of a frame; raises `FrameRefused`."""
        kind = header[:1]
        if kind == ROUND_FRAME:
            round = self._rounds.get(header[1:HEADER_PREFIX_BYTES])
            if round is None or not round.is_member(peer):
                return self._sessions.scratch(size)
            return round.place(peer, _bulk_message(header), size)
        if kind == TRANSFER_FRAME:
            message = transfer_messages.decode(memoryview(header)[1:])
            transfer = self._serving(message.run)
            return self._sessions.scratch(size) if transfer is None else transfer.place(peer, message, size)
        raise FrameRefused(f"expected a body only in frames of a round, got {size} bytes after {kind!r}")

    def frame(self, peer: str, header: bytes, body: memoryview) -> None:
        """Hand a frame to its round, run or transfer; raises `FrameRefused`."""
        kind = header[:1]
        if kind == ROUND_FRAME:
            self._round_frame(peer, header, body)
        elif kind == MATCHMAKING_FRAME:
            self._matchmaking(peer, header[1:])
        elif kind == TRANSFER_FRAME:
            message = transfer_messages.decode(memoryview(header)[1:])
            if transfer := self._serving(message.run):
                transfer.frame(peer, message, body)
        else:
            raise FrameRefused(
                f"expected a frame of a round, of matchmaking or of a transfer, got kind {kind!r}"
            )

    def lost(self, peer: str, reason: str, gone: bool) -> None:
        """Tell rounds, runs and transfers that no channel to a peer can be opened."""
        for round in list(self._rounds.values()):
            if round.is_member(peer):
                round.lost(peer, reason, gone)
        for transfer in [*self._transfers.values(), *self._leftovers.transfers]:
            transfer.lost(peer, reason)
        for run in list(self._runs.values()):
            run.lost(peer)

    def _matchmaking(self, peer: str, data: bytes) -> None:
        message = matchmaking_messages.decode(data)
        run = self._runs.get(message.run)
        if run is not None:
            run.receive(peer, message)
        elif isinstance(message, JoinRequest):
            self._sessions.post(
                peer, MATCHMAKING_FRAME + matchmaking_messages.encode(refuse_unknown_run(message))
            )

    def _round_frame(self, peer: str, header: bytes, body: memoryview) -> None:
        round_id = header[1:HEADER_PREFIX_BYTES]
        round = self._rounds.get(round_id)
        if round is None:
            if not body and round_id not in self._closed:
                self._keep_early(round_id, peer, header)
                for run in list(self._runs.values()):
                    run.speaks_of_a_round(peer)
        elif round.is_member(peer):
            message = _bulk_message(header) if body else _message(header)
            round.frame(peer, message, body, len(header) + len(body))

    def _keep_early(self, round_id: bytes, peer: str, header: bytes) -> None:
        # By peer, so that one that floods us pushes out only what it said itself.
        rounds = self._early.setdefault(peer, OrderedDict())
        self._early.move_to_end(peer)
        frames = rounds.setdefault(round_id, [])
        if len(frames) < MAX_EARLY_FRAMES and len(header) <= MAX_EARLY_BYTES:
            frames.append(header)
        if len(rounds) > MAX_EARLY_ROUNDS:
            rounds.popitem(last=False)
        if len(self._early) > MAX_EARLY_PEERS:
            self._early.popitem(last=False)

    # ---- what its runs ask ----

    def _begin(self, task: Task) -> RoundDriver:
        over = [one for one in self._rounds.values() if one.run == task.spec.name and one.outcome.done()]
        for one in over[:-MAX_LINGERING]:
            one.close()
        transfer = self._transfers[task.spec.name]
        transfer.begin(task.manifest)
        round = RoundDriver(task, self._sessions, self._forget, transfer.keep)
        round.outcome.add_done_callback(transfer.over)
        self._rounds[round.id] = round
        round.start()
        for peer in task.manifest.peers:
            self._hear_early(round, peer)
        return round

    def _hear_early(self, round: RoundDriver, peer: str) -> None:
        early = self._early.get(peer)
        for header in early.pop(round.id, []) if early else ():
            try:
                self._round_frame(peer, header, memoryview(b""))
            except FrameRefused as error:
                round.lost(peer, str(error))

    def _left(self, run: RunDriver) -> bool:
        name = run.spec.name
        self._runs.pop(name, None)
        transfer = self._transfers.pop(name, None)
        if transfer is None:
            return False
        if self._stopping:
            transfer.stop("the run was left")
            return False
        return self._leftovers.add(name, transfer)

    def _serving(self, run: str) -> Transfer | None:
        """Return the transfer of a run that this daemon takes part in, or has left and still serves."""
        return self._transfers.get(run) or self._leftovers.get(run)

    def _busy(self) -> bool:
        return any(not round.outcome.done() for round in self._rounds.values())

    def _forget(self, round: RoundDriver) -> None:
        self._rounds.pop(round.id, None)
        self._closed[round.id] = None
        if len(self._closed) > MAX_CLOSED_ROUNDS:
            self._closed.popitem(last=False)


def _message(header: bytes) -> wire.RoundMessage:
    return wire.decode(memoryview(header)[HEADER_PREFIX_BYTES:])


_bulk_message = functools.lru_cache(MAX_COMING)(_message)
"""Once where a body is to go is asked, and once when it has come."""
