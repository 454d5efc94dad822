"""How others reach this peer: it has itself dialled, finds relays if that fails, and relays for others if asked to."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from equipoise.dht import messages
from equipoise.dht.autonat import DIALBACK, DialBack, Reachability, direct_hosts
from equipoise.dht.limits import LruDict
from equipoise.dht.p2pd_client import CallHandler, Inbound, P2pdClient
from equipoise.dht.protocol import RecordProtocol
from equipoise.dht.records import MAX_ADDRESSES, Readiness
from equipoise.dht.relay.client import MAX_CANDIDATES, RelayKeeper
from equipoise.dht.relay.messages import HOP_PROTOCOL
from equipoise.dht.relay.probe import TRIAL_PROTOCOL, Trials
from equipoise.dht.relay.service import RelayRules, RelayService
from equipoise.dht.state import ReachStatus
from equipoise.dht.tasks import TaskSet, sleep_until

SUSPECT_SECONDS = 0.5
"""Where a dial-back leads anywhere, its answer comes sooner."""
SURVEY_SECONDS = 2.0
"""How often it is looked whether somebody should be asked."""
MAX_HOPS = 256
"""Requests and circuits through this peer at once; the service has its own bounds on circuits."""
MAX_TRIALS = 4
"""Streams of the trial under way; others are closed at once."""

_log = logging.getLogger(__name__)


class Reach:
    """Finds out, and keeps what it found.

    Attributes:
        on_change: Called when it is another than before.
        listening: Tells where this peer listens itself, in the form that `--join` takes.
        mates: Tells the records of all others in this peer's runs.
        direct: Tells the TCP port of this peer's direct listener; 0 if it has none.
        keeper: The relays in use.
        inbounds: Where p2pd is to send streams for this.
    """

    def __init__(
        self,
        link: P2pdClient,
        protocol: RecordProtocol,
        folder: Path,
        hidden: str = "",
        relay: RelayRules | None = None,
    ) -> None:
        """`hidden` says why this peer cannot be dialled, if that is known; `relay` what to relay for others."""
        self.on_change: Callable[[], None] = lambda: None
        self.listening: Callable[[], Iterable[str]] = tuple
        self.mates: Callable[[], Iterable[Readiness]] = tuple
        self.direct: Callable[[], int] = lambda: 0
        protocol.on_hello = self.meet
        self._link = link
        self._protocol = protocol
        self._verdict = Reachability(hidden)
        self._dialback = DialBack(link)
        self._dialback.direct = lambda: self.direct()
        self._service = RelayService(link, protocol.dialer.refresh, relay)
        trials = Trials(folder)
        self._offers: LruDict[str, None] = LruDict(MAX_CANDIDATES)
        self.keeper = RelayKeeper(link, protocol.dialer, protocol.peer, trials, lambda: tuple(self._offers))
        self.keeper.on_change = lambda: self.on_change()
        self.inbounds = (
            Inbound(HOP_PROTOCOL, folder / "hop.sock", MAX_HOPS, self._service.handle),
            Inbound(TRIAL_PROTOCOL, folder / "trial.sock", MAX_TRIALS, trials.receive),
        )
        self._met = asyncio.Event()
        self._tasks = TaskSet()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def hidden(self) -> bool:
        """Whether others cannot dial this peer, as far as is known."""
        return self._verdict.verdict == "private"

    @property
    def reached_at(self) -> tuple[str, ...]:
        """Where others have dialled this peer, in the form that `--listen` takes; a router may forward a port to it."""
        return () if self.hidden else self._verdict.addresses

    @property
    def dialable(self) -> bool:
        """Whether others can open channels to this peer, and it may own shares."""
        return not self.hidden or (bool(self.keeper.held) and stands_in(self.mates()))

    @property
    def mirrors(self) -> list[tuple[str, int]]:
        """The direct listeners of public peers that have dialled back, which tell whoever asks where it comes from."""
        paths = self._protocol.dialer.paths
        found = [
            (host, port)
            for peer, port in self._verdict.direct_ports.items()
            for host in direct_hosts(paths.get(peer, ()))
        ]
        # Neighbours see what is on this side of the router only; NATs are of IPv4.
        return sorted(
            found, key=lambda place: (not ipaddress.ip_address(place[0]).is_global, ":" in place[0])
        )

    def handlers(self) -> dict[str, CallHandler]:
        """Return the unary handlers to register with p2pd."""
        return {DIALBACK: self._dialback.answer}

    def meet(self, peer: str, relays: bool) -> None:
        """Take note of a peer that can be asked, and of whether it relays for others."""
        known = peer in self._offers
        self._offers.pop(peer, None)
        if relays:
            self._offers[peer] = None  # Heard of last: whoever is gone for good is forgotten first.
            if not known:
                self.keeper.look()
        self._met.set()

    def doubt(self) -> None:
        """Ask everybody again: this machine's addresses are others now."""
        self._verdict.doubt()
        self._met.set()

    def start(self) -> None:
        """Start to ask."""
        self._tasks.spawn(self._survey())
        if self.hidden:
            self._follow()

    def renew(self) -> None:
        """Begin anew: p2pd is another one now."""
        self.doubt()
        self.keeper.lose_all()

    async def stop(self) -> None:
        """End everything; idempotent."""
        await self._tasks.stop()

    def status(self) -> ReachStatus:
        """Return how others reach this peer, without waiting."""
        relay = self._service.status()
        if not self.hidden:
            state = self._verdict.verdict
            return ReachStatus("unknown" if state == "unknown" else "direct", self._verdict.reason, (), relay)
        relays = tuple(self.keeper.held)
        reason = f"{self.keeper.reason}; not dialled: {self._verdict.reason}"
        return ReachStatus("relayed" if relays else "unreachable", reason, relays, relay)

    async def _survey(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._met.clear()
            if self._link.attached:
                for peer in self._verdict.whom(self._protocol.peers, loop.time()):
                    self._tasks.spawn(self._ask(peer))
            await sleep_until(self._met, SURVEY_SECONDS)

    async def _ask(self, peer: str) -> None:
        # A dial that somebody drops takes 2 s to fail: relays are looked for meanwhile.
        suspicion = asyncio.get_running_loop().call_later(SUSPECT_SECONDS, self._follow)
        try:
            finding = await self._dialback.ask(peer, tuple(self.listening())[:MAX_ADDRESSES])
        except (ConnectionError, messages.MessageError) as error:
            _log.debug("%s did not dial back: %s", peer, error)
            return
        finally:
            suspicion.cancel()
        if finding is not None and self._verdict.hear(peer, finding, asyncio.get_running_loop().time()):
            _log.info("reachability: %s (%s)", self._verdict.verdict, self._verdict.reason)
            self._follow()
            self.on_change()

    def _follow(self) -> None:
        """Look for relays unless this peer is known to be dialled."""
        direct = self._verdict.verdict == "direct"
        if not direct and (self._keeping is None or self._keeping.done()):
            self._keeping = self._tasks.spawn(self.keeper.run())
        elif direct and self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
            self.keeper.held.clear()


def stands_in(mates: Iterable[Readiness]) -> bool:
    """Whether a relayed peer should say that it can be dialled, given the records of all others in its runs.

    A group needs a member that the others can open channels to: it owns shares. A relayed peer can, slowly and at a
    third party's expense, so it offers itself only where it knows others and none of them can be dialled. The
    members need not see that alike: each member signs what it says of itself, and the round loses a member that cannot
    be reached after all, like any other.
    """
    mates = list(mates)
    return bool(mates) and not any(mate.dialable and mate.reach != "relayed" for mate in mates)
