"""Finds relays for a peer that cannot be dialled, and keeps its places there.

Only Equipoise's daemons offer to relay (`--relay`); their circuits have no end and no limit. Rounds go on where a relay
cuts a circuit all the same: the frames that are not acknowledged go again. A place outlives the p2pds at both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from equipoise.dht.address import Address, is_relayed, well_formed
from equipoise.dht.dialer import Dialer
from equipoise.dht.limits import Failure
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.relay.service import HOP_PROTOCOL, Hop, Kind, Status, describe, receive, send
from equipoise.dht.sanitize import Malformed
from equipoise.limits import LruDict, backoff
from equipoise.tasks import sleep_until

WANTED = 2
"""Most relays in use: one relay may die during a round, and three would only make addresses longer."""
RESERVE_SECONDS = 3.0
"""Longest wait for the answer to a reservation."""
RENEW_SECONDS = 300.0
"""Time after which this peer asks for its place again; a place lasts an hour."""
CHECK_SECONDS = 1.0
"""Longest time until this peer notices that a relay is not connected any more."""
FIRST_RETRY_SECONDS = 15.0
MAX_RETRY_SECONDS = 600.0
"""First and longest pause before an unfit relay is asked again; the pause doubles each time."""
MAX_CANDIDATES = 64
"""Most relays that are known, and most whose failures are remembered."""

_log = logging.getLogger(__name__)


class RelayError(Exception):
    """A relay gives no place, or is of no use; the message says why."""


REFUSALS = RelayError, ConnectionError, Malformed
"""Errors that make a relay unfit."""


@dataclass(frozen=True)
class Held:
    """A place at a relay; this peer last asked for it at `since`, a monotonic time.

    Others reach this peer there at `address`, in the form that `--join` takes.
    """

    address: str
    since: float


class RelayClient:
    """Keeps this peer reachable through relays while it runs.

    Attributes:
        held: Places at relays, by the relay's PeerID.
        refused: Unfit relays, by PeerID.
        on_change: Called when the places have changed.
        offers: Peers that relay for others, by PeerID; those that are long unheard are forgotten first.
        look: Set this event to look for relays now.
    """

    def __init__(self, link: P2pdClient, dialer: Dialer, own: str) -> None:
        self.held: dict[str, Held] = {}
        self.refused: LruDict[str, Failure] = LruDict(MAX_CANDIDATES)
        self.on_change: Callable[[], None] = lambda: None
        self._link = link
        self._dialer = dialer
        self._own = own
        self.offers: LruDict[str, None] = LruDict(MAX_CANDIDATES)
        self.look = asyncio.Event()

    @property
    def reason(self) -> str:
        """The relays in use, or why no relay is in use, in one line."""
        refused = {relay: unfit.reason for relay, unfit in self.refused.items()}
        found = dict.fromkeys(self.held, "gives a place") or refused
        # Only the ends: PeerIDs begin alike.
        told = ", ".join(f"relay ..{relay[-8:]}: {how}" for relay, how in found.items())
        return told or "no peer that it has met relays for others (--relay)"

    async def run(self) -> None:
        """Find relays and keep them, until cancelled."""
        while True:
            self.look.clear()
            if self._link.attached:
                await self._tend()
            await sleep_until(self.look, CHECK_SECONDS)

    async def _tend(self) -> None:
        now = time.monotonic()
        for relay, held in list(self.held.items()):
            if not self._direct(relay):
                self._refuse(relay, "it is not connected any more", 0.0)
            elif held.since + RENEW_SECONDS < now:
                await self._take(relay)
        for relay in tuple(self.offers):
            refused = self.refused.get(relay)
            waits = refused is not None and refused.retry > now
            if len(self.held) < WANTED and relay not in (self._own, *self.held) and not waits:
                await self._take(relay)
                if relay not in self.held:
                    return  # An offer costs nothing: the next one has its turn later.

    async def _take(self, relay: str) -> None:
        """Take a place at `relay`, or keep it."""
        held, refused = self.held.get(relay), self.refused.get(relay)
        try:
            address = await self._place(relay)
        except REFUSALS as error:
            pause = refused.pause if refused else 0.0
            self._refuse(relay, str(error), backoff(pause, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS))
            return
        self.refused.pop(relay, None)
        self.held[relay] = Held(address.text, time.monotonic())
        if held is None:
            _log.info("relay %s is used", relay)
            self.on_change()

    def _refuse(self, relay: str, reason: str, pause: float) -> None:
        self.held.pop(relay, None)
        self.refused[relay] = Failure(reason, time.monotonic() + pause, pause)
        _log.info("relay %s is not used: %s", relay, reason)
        self.on_change()

    async def _place(self, relay: str) -> Address:
        """Take a place at `relay`; return this peer's address there."""
        await self._dialer.reach(relay)
        await self._dialer.refresh()
        if not self._direct(relay):
            # The relay reached this peer through another relay. Relays give no place over such a connection, and p2pd
            # dials nobody to whom it is connected.
            await self._link.disconnect(relay)
            await self._dialer.refresh()
            await self._dialer.reach(relay)
            await self._dialer.refresh()
        await self._reserve(relay)
        known = [text for text in self._dialer.addresses_of(relay) if not is_relayed(text)]
        # Others are told where the relay listens. A dialled connection's other end is such an address too.
        there = (*known, *(f"{path}/p2p/{relay}" for path in self._direct(relay)))
        for address in well_formed(f"{text}/p2p-circuit/p2p/{self._own}" for text in there):
            return address
        raise RelayError("no address of it is known at which others can reach it")

    def _direct(self, relay: str) -> list[str]:
        """Multiaddrs at the other ends of the connections to `relay` that no other relay carries."""
        return [path for path in self._dialer.paths.get(relay, ()) if not is_relayed(path)]

    async def _reserve(self, relay: str) -> None:
        """Ask `relay` for a place; raises RelayError without one."""
        try:
            async with asyncio.timeout(RESERVE_SECONDS):
                stream = await self._link.open_stream(relay, HOP_PROTOCOL, RESERVE_SECONDS)
                with contextlib.closing(stream):
                    await send(stream, Hop(kind=Kind.RESERVE))
                    answer = await receive(stream, Hop)
        except TimeoutError:
            raise RelayError(f"no answer within {RESERVE_SECONDS:.0f} s") from None
        if answer.kind != Kind.STATUS or answer.status != Status.OK:
            raise RelayError(f"it gives no place: {describe(answer.status)}")
