"""Getting into the swarm and staying in it: every address to join through, and every peer met before while alone.

Not being in the swarm is a state with a reason, never an error. An address is tried again also by a peer that has
company, so that islands that started apart merge as soon as an address that they share comes alive. Connected peers
that have fallen silent are asked, and given up if they do not answer: a machine that loses its power or its cable
closes no connection, and libp2p notices after half a minute at best.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from humanfriendly.text import pluralize

from equipoise.dht.address import Address
from equipoise.dht.admission import Refused
from equipoise.dht.dialer import Unreached
from equipoise.dht.messages import VersionError
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.peer_cache import PeerCache
from equipoise.dht.protocol import CallError, RecordProtocol
from equipoise.dht.state import AddressState, BootstrapStatus
from equipoise.limits import backoff
from equipoise.tasks import TaskSet, sleep_until

FIRST_RETRY_SECONDS = 0.3
RETRY_GROWTH = 1.5
MAX_RETRY_SECONDS = 60.0
"""Longest pause between two attempts: a way that opens is found within that and one attempt."""
JITTER = 0.25
"""The part of each pause that is drawn, so that daemons that lost one entry peer do not all come back at one moment."""
LOOK_SECONDS = 1.0
"""Longest time until a lost way into the swarm is noticed, and until a peer that has fallen silent is asked."""
QUIET_SECONDS = 2.0
"""Longest silence of a peer before it is asked, in a small swarm."""
ASKED_A_SECOND = 2
"""Most peers that are asked in a second, on average: of more of them each may be silent for longer. An answer costs
four processes 4 ms in all. Peers of one run renew their records more often (`directory.TOLD_A_SECOND`), and need no
question."""
MAX_MISSED = 2
"""Most questions in a row that go unanswered before a peer is given up: a busy one may miss the first."""
MAX_ASKED = 32
"""Most peers that are asked at once: the next ones wait, so that a large swarm costs no more than a small one."""
ANSWER_SECONDS = 2.0
"""Longest wait for an answer; a later one counts as missed. Across the world an answer takes 0.3 s."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """A way to `peer`: an address given to `--join`, or none for a peer met before: the dialer knows its addresses."""

    peer: str
    address: str = ""


@dataclass
class _Standing:
    """The standing of one way; `due` is None while nothing is to be tried."""

    state: AddressState = "trying"
    reason: str = "not tried yet"
    attempts: int = 0
    pause: float = 0.0
    due: float | None = None
    trying: bool = False

    def restart(self, now: float) -> None:
        self.pause, self.due = 0.0, now

    def connected(self) -> None:
        self.state, self.reason, self.attempts, self.due = "connected", "connected", 0, None

    def status(self, way: Way, now: float) -> BootstrapStatus:
        left = None if self.due is None or self.trying else max(0.0, self.due - now)
        return BootstrapStatus(way.address or way.peer, self.state, self.reason, self.attempts, left)


class Joining:
    """Decides which ways are tried now. Sans IO."""

    def __init__(self, given: Sequence[Way], draw: random.Random, now: float) -> None:
        """`given` are the addresses to join through; `draw` spreads the attempts."""
        self.dialable = True  # Whether this peer listens at an address that it could tell.
        self.way_in = "others join through this peer's address"
        self._draw = draw
        self._given = {way: _Standing(due=now) for way in given}
        self._remembered: dict[Way, _Standing] = {}

    @property
    def deadline(self) -> float:
        """When the next attempt is due; infinity if none is."""
        waiting = (one.due for one in self._all().values() if one.due is not None and not one.trying)
        return min(waiting, default=float("inf"))

    def status(self, now: float) -> tuple[BootstrapStatus, ...]:
        """Return how each address to join through fares."""
        return tuple(one.status(way, now) for way, one in self._given.items())

    def returning(self, now: float) -> tuple[BootstrapStatus, ...]:
        """Return how each peer met before fares, under its PeerID, while this peer is alone and tries it."""
        tried = ((way, one) for way, one in self._remembered.items() if one.due is not None)
        return tuple(one.status(way, now) for way, one in tried)

    def why_alone(self) -> tuple[bool, str]:
        """Return whether there is no network, and why this peer has met nobody, in words that outlast attempts."""
        tried = list((self._given or self._remembered).items())
        if not tried:
            way = self.way_in
            if not self.dialable:
                way = "none can, because this peer has no address: join one with --join, or give --listen an address"
            return False, f"no other peer has joined yet; {way}"
        failed = [one for _, one in tried if one.state not in ("trying", "connected")]
        if not failed:
            peers = f"{pluralize(len(tried), 'peer')} met before"
            return False, f"connecting to {tried[0][0].address or peers}"
        reason = f"{failed[0].reason}; trying again"
        if not self._given:
            reason = f"no peer met before is there: {reason}"
        return all(one.state == "no network" for one in failed), reason

    def look(self, alive: frozenset[str], remembered: Sequence[str], now: float) -> list[Way]:
        """Look around at `now`; return the ways to try, each of which ends in `ended`.

        The peers `alive` are in contact with this one; those `remembered` were met before, the latest first.
        """
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
            if alive:
                one.connected()
            elif one.due is None and not one.trying:
                one.state = "trying" if one.state == "connected" else one.state
                one.restart(now)
        tries = []
        for way, one in self._all().items():
            if one.due is not None and one.due <= now and not one.trying:
                one.trying = True
                tries.append(way)
        return tries

    def ended(self, way: Way, state: AddressState, reason: str, now: float) -> None:
        """An attempt has ended: `state` is `connected`, or the cause, with `reason` in words."""
        one = self._all().get(way)
        if one is None:
            return  # Forgotten meanwhile.
        one.trying = False
        if state == "connected":
            one.connected()
        else:
            one.state, one.reason, one.attempts = state, reason, one.attempts + 1
            one.pause = backoff(one.pause, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, RETRY_GROWTH)
            one.due = now + one.pause * (1 - JITTER * self._draw.random())

    def network_changed(self, now: float) -> None:
        """This machine's network, or its p2pd, is another one now: past failures say nothing."""
        for one in self._all().values():
            if one.due is not None:
                one.restart(now)

    def _all(self) -> dict[Way, _Standing]:
        return self._given | self._remembered


class Contacts:
    """Asks connected peers that have fallen silent; hangs up on those that do not answer, and buries their records.

    A question also tells where this peer is.
    """

    def __init__(self, link: P2pdClient, protocol: RecordProtocol) -> None:
        self._link = link
        self._dialer = protocol.dialer
        self._protocol = protocol
        self._heard: dict[str, float] = {}
        self._asked: set[str] = set()
        self._questions = TaskSet()
        protocol.on_heard = self.hear

    @property
    def alive(self) -> frozenset[str]:
        """PeerIDs of the peers that have answered, or called, and to which a connection is open."""
        if not self._link.attached:
            return frozenset()
        return self._dialer.connected.intersection(self._protocol.heard)

    def hear(self, peer: str) -> None:
        """Note that `peer` has said something."""
        self._heard[peer] = time.monotonic()

    def doubt(self) -> None:
        """Take every peer for silent: each is asked next."""
        self._heard = dict.fromkeys(self._heard, float("-inf"))

    async def run(self) -> None:
        """Look and ask, until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                if self._link.attached:
                    self._look(time.monotonic())
        finally:
            await self._questions.stop()

    def _look(self, now: float) -> None:
        """Ask silent peers, the longest silent first; forget those that are not connected."""
        connected = self._dialer.connected
        self._heard = {peer: at for peer, at in self._heard.items() if peer in connected}
        quiet = max(QUIET_SECONDS, len(self._heard) / ASKED_A_SECOND)
        silent = [peer for peer, at in self._heard.items() if peer not in self._asked and at + quiet <= now]
        for peer in sorted(silent, key=self._heard.__getitem__)[: MAX_ASKED - len(self._asked)]:
            self._asked.add(peer)
            self._questions.spawn(self._ask(peer))

    async def _ask(self, peer: str) -> None:
        began = time.monotonic()
        try:
            for _ in range(MAX_MISSED):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        return await self._protocol.ping(peer)
        except CallError as error:
            # It was told at once that there is no way: the list of connections will say so too.
            _log.debug("%s", error)
            return self.hear(peer)
        finally:
            self._asked.discard(peer)
        if self._link.attached and self._heard.get(peer, began) <= began:
            _log.info("%s does not answer any more: its connection is closed", peer)
            self._protocol.lose(peer)
            self._protocol.intake.store.bury(peer, time.monotonic())
            with contextlib.suppress(P2pdClientError):
                await self._link.disconnect(peer)
                await self._dialer.refresh()


class Bootstrap:
    """Tries every address to join through, for ever, and the peers met before while no peer is there.

    Attributes:
        given: The addresses to join through, those of this peer itself too.
        memory: The peers met before.
        contacts: The peers that are there.
        machine: Decides, and tells how the ways fare.
    """

    def __init__(
        self,
        given: Sequence[Address],
        memory: PeerCache,
        link: P2pdClient,
        protocol: RecordProtocol,
    ) -> None:
        self.given, self.memory = given, memory
        self._link = link
        self.contacts = Contacts(link, protocol)
        self._protocol = protocol
        self._dialer = protocol.dialer
        self._addresses = {Way(one.peer, one.text): one for one in given if one.peer != protocol.peer}
        self.machine = Joining(list(self._addresses), random.Random(), 0.0)
        self._changed = asyncio.Event()
        self._attempts = TaskSet()

    def _remembered(self) -> list[str]:
        for peer, addresses in self.memory.peers.items():
            self._dialer.hear(peer, addresses)
        return [peer for peer in reversed(self.memory.peers) if peer != self._protocol.peer]

    def network_changed(self) -> None:
        """Try every way again now: this machine's network, or its p2pd, is another one."""
        self.machine.network_changed(time.monotonic())
        self._changed.set()

    async def run(self) -> None:
        """Try and look, until cancelled."""
        try:
            while True:
                self._changed.clear()
                pause = LOOK_SECONDS
                if self._link.attached:
                    now = time.monotonic()
                    for way in self.machine.look(self.contacts.alive, self._remembered(), now):
                        self._attempts.spawn(self._attempt(way))
                    pause = min(LOOK_SECONDS, max(0.0, self.machine.deadline - time.monotonic()))
                await sleep_until(self._changed, pause)
        finally:
            await self._attempts.stop()

    async def _attempt(self, way: Way) -> None:
        state: AddressState = "failed"
        reason, before = "internal error", self.machine.why_alone()
        try:
            state, reason = await self._outcome(way)
        finally:  # A bug of ours must not be why this way is never tried again.
            self.machine.ended(way, state, reason, time.monotonic())
            self._changed.set()
        if self.machine.why_alone() != before:
            _log.info("way into the swarm %s: %s", way.address or way.peer, reason)

    async def _outcome(self, way: Way) -> tuple[AddressState, str]:
        try:
            if way.address and way.peer not in self._dialer.connected:
                await self._dialer.connect(self._addresses[way])
            await self._protocol.meet(way.peer)
        except Unreached as error:
            return error.state, str(error)
        except (P2pdClientError, CallError) as error:
            match error.__cause__:
                case VersionError() as cause:
                    return "other version", f"connected, but {cause}"
                case Unreached() as cause:
                    return cause.state, str(cause)
                case Refused() as cause:
                    return "not admitted", str(cause)
            return "failed", str(error)
        return "connected", "connected"
