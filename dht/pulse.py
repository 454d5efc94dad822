"""Who is still there: a connected peer that has fallen silent is asked, and given up if it does not answer.

A machine that loses its power or its cable closes no connection, and libp2p notices after half a minute at best. This
machine decides, reads no clock and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

QUIET_SECONDS = 2.0
"""A peer that has said nothing for so long is asked."""
MAX_MISSED = 2
"""Questions in a row that go unanswered before a peer is given up: a busy one may miss the first."""
MAX_ASKED = 32
"""Peers that are asked at once: the next ones wait, so that a large swarm costs no more than a small one."""


@dataclass
class _Peer:
    heard: float
    asked: bool = False
    missed: int = 0


class Pulse:
    """Keeps when each connected peer was last heard."""

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
