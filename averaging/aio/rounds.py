"""The rounds of one daemon, by id, and the frames of rounds that it does not know yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from equipoise.averaging.aio.round_driver import RoundDriver, Task
from equipoise.averaging.aio.sessions import Sessions
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.statesync.quorum_proof import Prove
from equipoise.averaging.statesync.update import EncodedMean

MAX_EARLY_ROUNDS = 8
"""Most unknown rounds of which the frames of one peer are kept; one per run that both wait in is usual."""

MAX_EARLY_FRAMES = 16
"""Most control frames that are kept of one peer for an unknown round: a hello or two are usual."""

MAX_EARLY_BYTES = 512
"""Most bytes of such a frame: a hello takes 40, and no peer says much to a member that has not spoken yet."""

MAX_EARLY_PEERS = 256
"""Most peers of which such frames are kept: as many as may have channels. The longest silent one goes first."""

MAX_LINGERING = 2
"""Most rounds of one run that are over here and still answer others. A peer that needs an older one asks others."""

MAX_CLOSED_ROUNDS = 1024
"""Most ids of closed rounds that are known, whose late frames are dropped."""


class Rounds:
    """The rounds of one daemon.

    Args:
        sessions: Sends their frames.

    Attributes:
        open: The rounds that take frames, by id. Some of them are over, and answer other members.
    """

    def __init__(self, sessions: Sessions) -> None:
        self.open: dict[bytes, RoundDriver] = {}
        self._sessions = sessions
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._early: OrderedDict[str, OrderedDict[bytes, list[bytes]]] = OrderedDict()

    @property
    def busy(self) -> bool:
        """True if a round exchanges values now."""
        return any(not round.outcome.done() for round in self.open.values())

    def begin(self, task: Task, keep: Callable[[EncodedMean, Prove], None]) -> RoundDriver:
        """Start a round, which gets the frames that came before it; `keep` is called with its mean."""
        name = task.spec.name
        over = [one for one in self.open.values() if one.task.spec.name == name and one.outcome.done()]
        for one in over[:-MAX_LINGERING]:
            one.close()
        round = RoundDriver(task, self._sessions, self._forget, keep)
        self.open[round.id] = round
        round.start()
        for peer in task.manifest.peers:
            early = self._early.get(peer)
            for header in early.pop(round.id, []) if early else ():
                try:
                    round.frame(peer, header, memoryview(b""))
                except FrameRefused as error:
                    round.lost(peer, str(error))
        return round

    def keep_early(self, round_id: bytes, peer: str, header: bytes) -> bool:
        """Keep a control frame of a round that is not open; return whether the round may yet begin."""
        if round_id in self._closed:
            return False
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
        return True

    def _forget(self, round_id: bytes) -> None:
        self.open.pop(round_id, None)
        self._closed[round_id] = None
        if len(self._closed) > MAX_CLOSED_ROUNDS:
            self._closed.popitem(last=False)
