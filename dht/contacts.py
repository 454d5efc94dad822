"""Connected peers that have fallen silent: this peer asks each of them, and gives it up if it does not answer.

A machine that loses its power or its cable closes no connection, and libp2p notices after half a minute at best.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.protocol import CallError, RecordProtocol
from equipoise.dht.tasks import TaskSet

QUIET_SECONDS = 2.0
"""A peer that has said nothing for so long is asked."""
MAX_MISSED = 2
"""Questions in a row that go unanswered before a peer is given up: a busy one may miss the first."""
MAX_ASKED = 32
"""Peers that are asked at once: the next ones wait, so that a large swarm costs no more than a small one."""
LOOK_SECONDS = 1.0
"""The longest time until a peer that has fallen silent is asked."""
ANSWER_SECONDS = 2.0
"""A ping that is not answered within that counts as missed; across the world an answer takes 0.3 s."""

_log = logging.getLogger(__name__)


@dataclass
class _Peer:
    heard: float
    asked: bool = False
    missed: int = 0


class Pulse:
    """Keeps when each connected peer was last heard. Sans IO."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def heard(self, peer: str, now: float) -> None:
        """`peer` has said something."""
        self._peers[peer] = _Peer(now, self._peers[peer].asked if peer in self._peers else False)

    def doubt(self) -> None:
        """Take every peer for silent: each is asked next."""
        for one in self._peers.values():
            one.heard = float("-inf")

    def whom(self, connected: Iterable[str], now: float) -> list[str]:
        """Choose the peers to ask, the longest silent first; those that are not connected are forgotten."""
        connected = set(connected)
        self._peers = {peer: one for peer, one in self._peers.items() if peer in connected or one.asked}
        room = MAX_ASKED - sum(one.asked for one in self._peers.values())
        silent = [
            peer
            for peer, one in self._peers.items()
            if not one.asked and (one.missed or one.heard + QUIET_SECONDS <= now)
        ]
        silent.sort(key=lambda peer: self._peers[peer].heard)
        for peer in silent[: max(0, room)]:
            self._peers[peer].asked = True
        return silent[: max(0, room)]

    def answered(self, peer: str, now: float) -> None:
        """`peer` has answered."""
        self._peers[peer] = _Peer(now)

    def missed(self, peer: str) -> bool:
        """`peer` has not answered; return whether it is given up now."""
        one = self._peers.get(peer)
        if one is None:
            return False
        one.asked, one.missed = False, one.missed + 1
        if one.missed < MAX_MISSED:
            return False
        del self._peers[peer]
        return True


class Contacts:
    """Asks connected peers that have fallen silent, hangs up on those that do not answer, and tells `on_lost`.

    Attributes:
        on_lost: Called with the PeerID of a peer that does not answer.
        pulse: When each was last heard. A question also tells where this peer is.
    """

    def __init__(self, link: P2pdClient, protocol: RecordProtocol) -> None:
        self.on_lost: Callable[[str], None] = lambda peer: None
        self._link = link
        self._dialer = protocol.dialer
        self._protocol = protocol
        self.pulse = Pulse()
        self._questions = TaskSet()
        protocol.on_heard = lambda peer: self.pulse.heard(peer, time.monotonic())

    @property
    def alive(self) -> frozenset[str]:
        """PeerIDs of the peers that have answered, or called, and to which a connection is open."""
        if not self._link.attached:
            return frozenset()
        return frozenset(self._protocol.acquainted & self._dialer.connected)

    async def run(self) -> None:
        """Look and ask, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if self._link.attached:
                    for peer in self.pulse.whom(self._dialer.connected, time.monotonic()):
                        self._questions.spawn(self._ask(peer))
        finally:
            await self._questions.stop()

    async def _ask(self, peer: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._protocol.ping(peer)
        except TimeoutError:
            if self._link.attached and self.pulse.missed(peer):
                _log.info("%s does not answer any more: its connection is closed", peer)
                self._protocol.lose(peer)
                self.on_lost(peer)
                with contextlib.suppress(P2pdClientError):
                    await self._link.disconnect(peer)
                    await self._dialer.refresh()
            return
        except CallError as error:
            # It was told at once that there is no way: the list of connections will say so too.
            _log.debug("%s", error)
        self.pulse.answered(peer, time.monotonic())
