"""Finds relays for a peer that cannot be dialled, tries them, and keeps the places it has there.

A relay that fails its trial is not used, and not announced: others would find this peer there, begin a round with it,
and lose it after 128 KiB.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from equipoise.dht.address import Address, AddressError, is_relayed, parse_address
from equipoise.dht.dialer import Dialer, Unreached
from equipoise.dht.limits import LruDict
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.relay.messages import HOP_PROTOCOL, Hop, Kind, Status, describe, receive, send
from equipoise.dht.relay.probe import TRIAL_BYTES, RelayError, Trials
from equipoise.dht.sanitize import Malformed
from equipoise.dht.tasks import sleep_until

WANTED = 2
"""Relays in use: one may die while a round goes on, and three would only make addresses longer."""
RESERVE_SECONDS = 3.0
"""For the answer to a reservation."""
RENEW_SECONDS = 300.0
"""A place is asked for again; it lasts an hour."""
CHECK_SECONDS = 1.0
"""How often it is looked whether relays are still connected."""
FIRST_RETRY_SECONDS = 15.0
MAX_RETRY_SECONDS = 600.0
"""A relay that did not do is tried again after so long, each time twice as long."""
MIN_CIRCUIT_SECONDS = 600
"""A relay that cuts connections sooner, by its own word, cuts rounds; p2pd's own does after two minutes."""
GAP_SECONDS = 3.0
"""After a failure the next relay is tried so much later: a trial costs a process, an offer costs nothing."""
MAX_CANDIDATES = 64
"""Relays whose failures are remembered, and that are known at all."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A place at a relay that has passed its trial.

    Attributes:
        address: Where others reach this peer through it, in the form that `--join` takes.
        since: When it was last asked for, on the loop's clock.
        trial: How the trial went, in words.
    """

    address: str
    since: float
    trial: str


@dataclass(frozen=True)
class Refused:
    """A relay that did not do.

    Attributes:
        reason: Why, one line.
        retry: When to try it again, on the loop's clock.
        delay: How long that was from the failure.
    """

    reason: str
    retry: float
    delay: float


class RelayKeeper:
    """Keeps this peer reachable through relays while it runs.

    Attributes:
        held: Places at trusted relays, by the relay's PeerID.
        refused: Relays that did not do, by PeerID.
    """

    def __init__(
        self, link: P2pdClient, dialer: Dialer, own: str, trials: Trials, offers: Callable[[], Iterable[str]]
    ) -> None:
        """`offers` tells the PeerIDs of peers that relay for others."""
        self.held: dict[str, Held] = {}
        self.refused: LruDict[str, Refused] = LruDict(MAX_CANDIDATES)
        self.on_change: Callable[[], None] = lambda: None
        self._link = link
        self._dialer = dialer
        self._own = own
        self._trials = trials
        self._offers = offers
        self._look = asyncio.Event()
        self._era = 0
        self._pause_until = float("-inf")

    @property
    def reason(self) -> str:
        """What relays there are, or why there is none, in one line."""
        if self.held:
            return ", ".join(f"relay {_short(relay)}: {held.trial}" for relay, held in self.held.items())
        if self.refused:
            return ", ".join(f"relay {_short(relay)}: {one.reason}" for relay, one in self.refused.items())
        return "no peer that it has met relays for others (--relay)"

    def look(self) -> None:
        """Look for relays now: there are new peers."""
        self._look.set()

    async def run(self) -> None:
        """Find relays and keep them, until cancelled."""
        while True:
            self._look.clear()
            if self._link.attached:
                await self._tend()
            await sleep_until(self._look, CHECK_SECONDS)

    def lose_all(self) -> None:
        """p2pd is another one now: what it had reserved is gone, and what is being reserved."""
        self._era += 1
        if self.held:
            self.held.clear()
            self.on_change()
        self.look()

    async def _tend(self) -> None:
        now = asyncio.get_running_loop().time()
        for relay, held in list(self.held.items()):
            if self.held.get(relay) is not held:
                continue  # Lost while another was renewed.
            if relay not in self._dialer.connected:
                self._drop(relay, "it is not connected any more", 0.0)
            elif held.since + RENEW_SECONDS < now:
                await self._renew(relay, held)
        for relay in self._offers():
            if len(self.held) >= WANTED or asyncio.get_running_loop().time() < self._pause_until:
                return
            refused = self.refused.get(relay)
            if relay != self._own and relay not in self.held and (refused is None or refused.retry <= now):
                await self._attempt(relay, refused)

    async def _renew(self, relay: str, held: Held) -> None:
        try:
            await self._reserve(relay)
        except RelayError as error:
            if self.held.get(relay) is held:
                self._drop(relay, str(error), FIRST_RETRY_SECONDS)
        else:
            if self.held.get(relay) is held:
                self.held[relay] = Held(held.address, asyncio.get_running_loop().time(), held.trial)

    async def _attempt(self, relay: str, before: Refused | None) -> None:
        loop, era = asyncio.get_running_loop(), self._era
        try:
            address = await self._place(relay)
            trial = await self._trials.conduct(address)
            if era != self._era:
                raise RelayError("p2pd was started again meanwhile")
        except RelayError as error:
            delay = min(2 * before.delay, MAX_RETRY_SECONDS) if before else FIRST_RETRY_SECONDS
            self.refused[relay] = Refused(str(error), loop.time() + delay, delay)
            self._pause_until = loop.time() + GAP_SECONDS
            _log.info("relay %s is not used: %s", relay, error)
        else:
            self.refused.pop(relay, None)
            self.held[relay] = Held(address.text, loop.time(), trial)
            _log.info("relay %s is used: %s", relay, trial)
        self.on_change()

    def _drop(self, relay: str, reason: str, delay: float) -> None:
        del self.held[relay]
        self.refused[relay] = Refused(
            reason, asyncio.get_running_loop().time() + delay, delay or FIRST_RETRY_SECONDS
        )
        _log.info("relay %s is not used any more: %s", relay, reason)
        self.on_change()

    async def _place(self, relay: str) -> Address:
        """Take a place at `relay`; return this peer's address there."""
        try:
            await self._dialer.reach(relay)
            await self._dialer.refresh()
        except (Unreached, P2pdClientError) as error:
            raise RelayError(str(error)) from error
        limit = await self._reserve(relay)
        if 0 < limit.bytes < TRIAL_BYTES:
            raise RelayError(f"it says that it cuts connections after {limit.bytes} bytes")
        if 0 < limit.seconds < MIN_CIRCUIT_SECONDS:
            raise RelayError(f"it says that it cuts connections after {limit.seconds} s")
        direct = [path for path in self._dialer.paths.get(relay, ()) if not is_relayed(path)]
        known = [text for text in self._dialer.addresses_of(relay) if not is_relayed(text)]
        # What others are told is where it listens; the connection's other end is that too where it was dialled.
        for text in (*known, *(f"{path}/p2p/{relay}" for path in direct)):
            try:
                return parse_address(f"{text}/p2p-circuit/p2p/{self._own}")
            except AddressError:
                continue
        raise RelayError("no address of it is known at which others can reach it")

    async def _reserve(self, relay: str) -> Any:
        """Ask `relay` for a place; return what it allows one circuit."""
        try:
            async with asyncio.timeout(RESERVE_SECONDS):
                stream = await self._link.open_stream(relay, HOP_PROTOCOL, RESERVE_SECONDS)
                try:
                    await send(stream, Hop(kind=Kind.RESERVE))
                    answer = await receive(stream, Hop)
                finally:
                    stream.close()
        except TimeoutError:
            raise RelayError(f"no answer within {RESERVE_SECONDS:.0f} s") from None
        except (ConnectionError, Malformed) as error:
            raise RelayError(str(error)) from error
        if answer.kind != Kind.STATUS or answer.status != Status.OK:
            raise RelayError(f"it gives no place: {describe(answer.status)}")
        return answer.limit


def _short(peer: str) -> str:
    """The end of a PeerID; the beginnings are alike."""
    return f"..{peer[-8:]}"
