"""The peers in contact with this one, now: the driver of `pulse`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from equipoise.dht.dialer import Dialer
from equipoise.dht.link import Link, LinkError
from equipoise.dht.protocol import CallError, RecordProtocol
from equipoise.dht.pulse import Pulse

LOOK_SECONDS = 1.0
"""The longest time until a peer that has fallen silent is asked."""
ANSWER_SECONDS = 2.0
"""A ping that is not answered within that counts as missed; across the world an answer takes 0.3 s."""

_log = logging.getLogger(__name__)


class Contacts:
    """Asks connected peers that have fallen silent, and hangs up on those that do not answer.

    Attributes:
        on_lost: Called with the PeerID of a peer that was given up.
    """

    def __init__(self, link: Link, dialer: Dialer, protocol: RecordProtocol) -> None:
        self.on_lost: Callable[[str], None] = lambda peer: None
        self._link = link
        self._dialer = dialer
        self._protocol = protocol
        self._pulse = Pulse()
        self._questions: set[asyncio.Task[None]] = set()
        protocol.on_heard = lambda peer: self._pulse.heard(peer, time.monotonic())

    @property
    def alive(self) -> frozenset[str]:
        """PeerIDs of the peers that have answered, or called, and to which a connection is open."""
        if not self._link.attached:
            return frozenset()
        return frozenset(self._protocol.acquainted & self._dialer.connected)

    def greet(self) -> None:
        """Ask all of them next: a question tells where this peer is."""
        self._pulse.doubt()

    async def run(self) -> None:
        """Look and ask, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if self._link.attached:
                    for peer in self._pulse.whom(self._dialer.connected, time.monotonic()):
                        task = asyncio.create_task(self._ask(peer))
                        self._questions.add(task)
                        task.add_done_callback(self._questions.discard)
        finally:
            for task in self._questions:
                task.cancel()
            if self._questions:
                await asyncio.wait(self._questions)

    async def _ask(self, peer: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._protocol.ping(peer)
        except TimeoutError:
            if self._link.attached and self._pulse.missed(peer):
                await self._give_up(peer)
            return
        except CallError as error:
            # It was told at once that there is no way: the list of connections will say so too.
            _log.debug("%s", error)
        self._pulse.answered(peer, time.monotonic())

    async def _give_up(self, peer: str) -> None:
        _log.info("%s does not answer any more: its connection is closed", peer)
        self._protocol.lose(peer)
        self.on_lost(peer)
        try:
            await self._link.disconnect(peer)
            await self._dialer.refresh()
        except LinkError as error:
            _log.debug("%s", error)
