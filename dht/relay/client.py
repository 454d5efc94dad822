"""Finds relays for a peer that cannot be dialled, and keeps its places there.

Only Equipoise's daemons offer to relay (`--relay`), and they say in each reservation how much a circuit may carry. A
relay that says too little, as p2pd's own would, is not used, and not announced. Rounds go on where a relay cuts a
circuit against its word: the frames that are not acknowledged go again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
MIN_CIRCUIT_SECONDS = 600
"""Shortest life of a circuit, by a relay's own word: a shorter life cuts rounds. p2pd's own relay allows 2 minutes."""
GAP_SECONDS = 3.0
"""Time from a failure to the next relay's turn: an offer costs nothing."""
MAX_CANDIDATES = 64
"""Most relays that are known, and most whose failures are remembered."""
MIN_CIRCUIT_BYTES = 1024 * 1024
"""Fewest bytes of a circuit, by a relay's own word: eight times the limit of p2pd's own relay."""

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
        self._era = 0
        self._pause_until = float("-inf")

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

    def lose_all(self) -> None:
        """Forget all places, because p2pd was restarted: its reservations are gone, also those under way."""
        self._era += 1
        if self.held:
            self.held.clear()
            self.on_change()
        self.look.set()

    async def _tend(self) -> None:
        now = time.monotonic()
        for relay, held in list(self.held.items()):
            if self.held.get(relay) is not held:
                continue  # Lost while another was renewed.
            if not self._direct(relay):
                self._drop(relay, "it is not connected any more", 0.0)
            elif held.since + RENEW_SECONDS < now:
                await self._renew(relay, held)
        for relay in tuple(self.offers):
            if len(self.held) >= WANTED or time.monotonic() < self._pause_until:
                return
            refused = self.refused.get(relay)
            if relay != self._own and relay not in self.held and (refused is None or refused.retry <= now):
                await self._attempt(relay, refused)

    async def _renew(self, relay: str, held: Held) -> None:
        failure = ""
        try:
            await self._reserve(relay)
        except REFUSALS as error:
            failure = str(error)
        if self.held.get(relay) is held:
            self.held[relay] = replace(held, since=time.monotonic())
            if failure:
                self._drop(relay, failure, FIRST_RETRY_SECONDS)

    async def _attempt(self, relay: str, before: Failure | None) -> None:
        era = self._era
        try:
            address = await self._place(relay)
            if era != self._era:
                raise RelayError("p2pd was started again meanwhile")
        except REFUSALS as error:
            delay = backoff(before.pause if before else 0.0, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS)
            self.refused[relay] = Failure(str(error), time.monotonic() + delay, delay)
            self._pause_until = time.monotonic() + GAP_SECONDS
            _log.info("relay %s is not used: %s", relay, error)
        else:
            self.refused.pop(relay, None)
            self.held[relay] = Held(address.text, time.monotonic())
            _log.info("relay %s is used", relay)
        self.on_change()

    def _drop(self, relay: str, reason: str, delay: float) -> None:
        del self.held[relay]
        self.refused[relay] = Failure(reason, time.monotonic() + delay, delay or FIRST_RETRY_SECONDS)
        _log.info("relay %s is not used any more: %s", relay, reason)
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
        limit = await self._reserve(relay)
        if 0 < limit.bytes < MIN_CIRCUIT_BYTES:
            raise RelayError(f"it says that it cuts connections after {limit.bytes} bytes")
        if 0 < limit.seconds < MIN_CIRCUIT_SECONDS:
            raise RelayError(f"it says that it cuts connections after {limit.seconds} s")
        known = [text for text in self._dialer.addresses_of(relay) if not is_relayed(text)]
        # Others are told where the relay listens. A dialled connection's other end is such an address too.
        there = (*known, *(f"{path}/p2p/{relay}" for path in self._direct(relay)))
        for address in well_formed(f"{text}/p2p-circuit/p2p/{self._own}" for text in there):
            return address
        raise RelayError("no address of it is known at which others can reach it")

    def _direct(self, relay: str) -> list[str]:
        """Multiaddrs at the other ends of the connections to `relay` that no other relay carries."""
        return [path for path in self._dialer.paths.get(relay, ()) if not is_relayed(path)]

    async def _reserve(self, relay: str) -> Any:
        """Ask `relay` for a place; return its limit for one circuit."""
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
        return answer.limit
