"""Getting into the swarm and staying in it: every address to join through, and every peer met before while alone.

Not being in the swarm is a state with a reason, never an error. An address is tried again also by a peer that has
company, so that islands that started apart merge as soon as an address that they share comes alive.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equipoise.dht.address import Address
from equipoise.dht.dialer import Unreached
from equipoise.dht.p2pd_client import P2pdClientError
from equipoise.dht.protocol import CallError, OtherVersion, RecordProtocol
from equipoise.dht.state import AddressState, BootstrapStatus
from equipoise.dht.tasks import TaskSet, sleep_until

FIRST_RETRY_SECONDS = 0.3
RETRY_GROWTH = 1.5
MAX_RETRY_SECONDS = 60.0
"""The longest pause between two attempts: a way that opens is found within that and one attempt."""
JITTER = 0.25
"""The part of each pause that is drawn, so that daemons that lost one entry peer do not all come back at one moment."""
LOOK_SECONDS = 1.0
"""The longest time until a lost way into the swarm is noticed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """One way into the swarm.

    Attributes:
        peer: PeerID that must be at its end.
        address: Where, as given to `--join`; empty for a peer met before, whose addresses the dialer knows.
    """

    peer: str
    address: str = ""


@dataclass(frozen=True)
class Looked:
    """The driver has looked around.

    Attributes:
        alive: PeerIDs in contact with this peer now.
        remembered: PeerIDs met before, the latest first.
    """

    alive: frozenset[str]
    remembered: Sequence[str] = ()


@dataclass(frozen=True)
class Attempted:
    """An attempt has ended: `state` is `connected`, or the cause, with `reason` in words."""

    way: Way
    state: AddressState
    reason: str


@dataclass(frozen=True)
class NetworkChanged:
    """This machine's network, or its p2pd, is another one now: past failures say nothing."""


Event = Looked | Attempted | NetworkChanged


@dataclass
class _Standing:
    """How one way fares; `due` is None while nothing is to be tried."""

    state: AddressState = "trying"
    reason: str = "not tried yet"
    attempts: int = 0
    pause: float = FIRST_RETRY_SECONDS
    due: float | None = None
    trying: bool = False

    def restart(self, now: float) -> None:
        self.pause, self.due = FIRST_RETRY_SECONDS, now

    def failed(self, now: float, state: AddressState, reason: str, drawn: float) -> None:
        self.state, self.reason, self.attempts = state, reason, self.attempts + 1
        self.due = now + self.pause * (1 - JITTER * drawn)
        self.pause = min(self.pause * RETRY_GROWTH, MAX_RETRY_SECONDS)

    def connected(self) -> None:
        self.state, self.reason, self.attempts, self.due = "connected", "connected", 0, None


class Joining:
    """Decides which ways are tried now. Sans IO."""

    def __init__(self, given: Sequence[Way], draw: random.Random, now: float) -> None:
        """`given` are the addresses to join through; `draw` spreads the attempts."""
        self._draw = draw
        self._given = {way: _Standing(due=now) for way in given}
        self._remembered: dict[Way, _Standing] = {}
        self._alone = False

    @property
    def deadline(self) -> float:
        """When the next attempt is due; infinity if none is."""
        waiting = (one.due for one in self._all().values() if one.due is not None and not one.trying)
        return min(waiting, default=float("inf"))

    def handle(self, event: Event, now: float) -> list[Way]:
        """Take an event at time `now` in seconds; return the ways to try, each of which ends in `Attempted`."""
        match event:
            case Looked(alive, remembered):
                self._look(alive, remembered, now)
                return self._tries(now)
            case Attempted(way, state, reason):
                self._end(way, state, reason, now)
            case NetworkChanged():
                for one in self._all().values():
                    if one.due is not None:
                        one.restart(now)
        return []

    def status(self, now: float) -> tuple[BootstrapStatus, ...]:
        """Return how each address to join through fares."""
        return tuple(
            BootstrapStatus(
                way.address,
                one.state,
                one.reason,
                one.attempts,
                None if one.due is None or one.trying else max(0.0, one.due - now),
            )
            for way, one in self._given.items()
        )

    def why_alone(self) -> tuple[bool, str]:
        """Return whether there is no network, and why this peer has met nobody, in words that outlast attempts."""
        tried = list((self._given or self._remembered).items())
        if not tried:
            return False, "no other peer has joined yet; others join through this peer's address"
        failed = [one for _, one in tried if one.state not in ("trying", "connected")]
        if not failed:
            count = len(tried)
            peers = f"{count} peer{'s' if count > 1 else ''} met before"
            return False, f"connecting to {tried[0][0].address or peers}"
        reason = f"{failed[0].reason}; trying again"
        if not self._given:
            reason = f"no peer met before is there: {reason}"
        return all(one.state == "no network" for one in failed), reason

    def _all(self) -> dict[Way, _Standing]:
        return self._given | self._remembered

    def _look(self, alive: frozenset[str], remembered: Sequence[str], now: float) -> None:
        alone, self._alone = self._alone, not alive
        for way, one in self._given.items():
            if way.peer in alive:
                one.connected()
            elif one.state == "connected":
                one.state, one.reason = "trying", "the connection is lost"
                one.restart(now)
        given = {way.peer for way in self._given}
        ways = [Way(peer) for peer in remembered if peer not in given]
        self._remembered = {way: self._remembered.get(way, _Standing()) for way in ways}
        for one in self._remembered.values():
            if not self._alone:
                one.connected()
            elif not alone or (one.due is None and not one.trying):
                one.state = "trying" if one.state == "connected" else one.state
                one.restart(now)

    def _tries(self, now: float) -> list[Way]:
        due = [
            (way, one)
            for way, one in self._all().items()
            if one.due is not None and one.due <= now and not one.trying
        ]
        for _, one in due:
            one.trying = True
        return [way for way, _ in due]

    def _end(self, way: Way, state: AddressState, reason: str, now: float) -> None:
        one = self._all().get(way)
        if one is None:
            return  # Forgotten meanwhile.
        one.trying = False
        if state == "connected":
            one.connected()
        else:
            one.failed(now, state, reason, self._draw.random())


class Bootstrap:
    """Tries every address to join through, for ever, and the peers met before while no peer is there.

    Attributes:
        alive: Tells the PeerIDs in contact with this peer now; None while p2pd does not run.
        remembered: Tells the PeerIDs met before, the latest first.
    """

    def __init__(self, given: Sequence[Address], protocol: RecordProtocol) -> None:
        self.alive: Callable[[], frozenset[str] | None] = lambda: None
        self.remembered: Callable[[], Sequence[str]] = tuple
        self._protocol = protocol
        self._dialer = protocol.dialer
        self._addresses = {Way(address.peer, address.text): address for address in given}
        self._machine = Joining(list(self._addresses), random.Random(), 0.0)
        self._changed = asyncio.Event()
        self._attempts = TaskSet()

    def status(self) -> tuple[BootstrapStatus, ...]:
        """Return how each address to join through fares."""
        return self._machine.status(asyncio.get_running_loop().time())

    def why_alone(self) -> tuple[bool, str]:
        """Return whether there is no network, and why this peer has met nobody."""
        return self._machine.why_alone()

    def network_changed(self) -> None:
        """Try every way again now: this machine's network, or its p2pd, is another one."""
        self._machine.handle(NetworkChanged(), asyncio.get_running_loop().time())
        self._changed.set()

    async def run(self) -> None:
        """Try and look, until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                alive = self.alive()
                if alive is not None:
                    for way in self._machine.handle(Looked(alive, self.remembered()), loop.time()):
                        self._attempts.spawn(self._attempt(way))
                pause = min(LOOK_SECONDS, max(0.0, self._machine.deadline - loop.time()))
                await sleep_until(self._changed, pause if alive is not None else LOOK_SECONDS)
        finally:
            await self._attempts.stop()

    async def _attempt(self, way: Way) -> None:
        state: AddressState
        try:
            state, reason = await self._outcome(way)
        except Exception as error:
            # A bug of ours, which must not be why this way is never tried again.
            _log.exception("an attempt at %s failed", way.address or way.peer)
            state, reason = "failed", f"internal error: {error!r}"
        before = self._machine.why_alone()
        self._machine.handle(Attempted(way, state, reason), asyncio.get_running_loop().time())
        self._changed.set()
        if self._machine.why_alone() != before:
            _log.info("way into the swarm %s: %s", way.address or way.peer, reason)

    async def _outcome(self, way: Way) -> tuple[AddressState, str]:
        try:
            if way.address and way.peer not in self._dialer.connected:
                await self._dialer.connect(self._addresses[way])
            await self._protocol.meet(way.peer)
        except Unreached as error:
            return error.state, str(error)
        except OtherVersion as error:
            return "other version", str(error)
        except (P2pdClientError, CallError) as error:
            cause = error.__cause__
            return (cause.state, str(cause)) if isinstance(cause, Unreached) else ("failed", str(error))
        return "connected", "connected"
