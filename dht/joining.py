"""When which way into the swarm is tried: every address to join through, and every peer met before while alone.

Not being in the swarm is a state with a reason, never an error. An address is tried again also by a peer that has
company, so that islands that started apart merge as soon as an address that they share comes alive. This machine reads
no clock and opens no connection: `bootstrap` drives it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.dht.state import AddressState, BootstrapStatus

FIRST_RETRY_SECONDS = 0.3
RETRY_GROWTH = 1.5
MAX_RETRY_SECONDS = 60.0
"""The longest pause between two attempts: a way that opens is found within that and one attempt."""
JITTER = 0.25
"""The part of each pause that is drawn, so that daemons that lost one entry peer do not all come back at one moment."""


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


@dataclass(frozen=True)
class Try:
    """Try this way, and report `Attempted`."""

    way: Way


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
    """Decides which ways are tried now."""

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

    def handle(self, event: Event, now: float) -> list[Try]:
        """Take an event at time `now` in seconds; return what to try."""
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

    def _tries(self, now: float) -> list[Try]:
        due = [
            (way, one)
            for way, one in self._all().items()
            if one.due is not None and one.due <= now and not one.trying
        ]
        for _, one in due:
            one.trying = True
        return [Try(way) for way, _ in due]

    def _end(self, way: Way, state: AddressState, reason: str, now: float) -> None:
        one = self._all().get(way)
        if one is None:
            return  # Forgotten meanwhile.
        one.trying = False
        if state == "connected":
            one.connected()
        else:
            one.failed(now, state, reason, self._draw.random())
