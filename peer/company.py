"""Where a run stands, as its daemon says: who else is there, and what they are at."""

from __future__ import annotations

import concurrent.futures

from equipoise.averaging.outcome import Exchanging, Idle, NoPeers, RunState
from equipoise.peer.errors import DaemonLost
from equipoise.peer.link import Link
from equipoise.peer.messages import AskState, ReplyBody, StateIs

STATE_SECONDS = 0.25
"""A daemon that is busy encoding may take so long to answer; `state` then says what it said last."""

LOOK_SECONDS = 0.05
"""Between two looks who is there."""


class Company:
    """The other peers of one run."""

    def __init__(self, link: Link, run: str) -> None:
        self._link = link
        self._run = run
        self._state: RunState = NoPeers("the daemon has not said yet")
        self._asked: concurrent.futures.Future[ReplyBody] | None = None

    @property
    def state(self) -> RunState:
        """Where the next round stands; never waits for peers or rounds. `NoPeers` where the daemon has gone."""
        asked = self._asked or self._link.start(AskState(self._run))
        if not concurrent.futures.wait([asked], STATE_SECONDS).done:
            self._asked = asked
            return self._state
        self._asked = None
        try:
            self._state = self._link.wait(asked, StateIs).state
        except DaemonLost as error:
            self._state = NoPeers(str(error))
        return self._state


def others(state: RunState) -> int:
    """How many others are known, at least."""
    match state:
        case Idle(peers):
            return peers
        case Exchanging(members):
            return members - 1
    return 0
