"""How others reach this peer: it has itself dialled, finds relays if that fails, and relays for others if asked to."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path

from equipoise.dht import messages
from equipoise.dht.dialback import DIALBACK, DialBack, direct_hosts
from equipoise.dht.dialer import Dialer
from equipoise.dht.inbound import Inbound
from equipoise.dht.link import CallHandler, Link
from equipoise.dht.reachability import Reachability
from equipoise.dht.records import MAX_ADDRESSES, Readiness
from equipoise.dht.relay.keeper import MAX_CANDIDATES, RelayKeeper
from equipoise.dht.relay.messages import HOP_PROTOCOL
from equipoise.dht.relay.service import RelayRules, RelayService
from equipoise.dht.relay.standin import stands_in
from equipoise.dht.relay.trial import TRIAL_PROTOCOL, Trials
from equipoise.dht.state import ReachStatus

SUSPECT_SECONDS = 0.5
"""Where a dial-back leads anywhere, its answer comes sooner."""
SURVEY_SECONDS = 2.0
"""How often it is looked whether somebody should be asked."""
MAX_HOPS = 256
"""Requests and circuits through this peer at once; the service has its own bounds on circuits."""
MAX_TRIALS = 4
"""Streams of the trial under way; others are closed at once."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReachOptions:
    """What `Reach` is told.

    Attributes:
        hidden: Why this peer cannot be dialled, if that is known beforehand.
        relay: What to relay for others; None: nothing.
        guard: How the p2pd of a trial is kept from outliving this process; see `guardian`.
    """

    hidden: str = ""
    relay: RelayRules | None = None
    guard: str = "auto"


class Reach:
    """Finds out, and keeps what it found.

    Attributes:
        on_change: Called when it is another than before.
        candidates: Tells the PeerIDs of peers that can be asked.
        listening: Tells where this peer listens itself, in the form that `--join` takes.
        mates: Tells the records of all others in this peer's runs.
        direct: Tells the TCP port of this peer's direct listener; 0 if it has none.
        keeper: The relays in use.
    """

    def __init__(self, link: Link, dialer: Dialer, own: str, folder: Path, options: ReachOptions) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.candidates: Callable[[], Iterable[str]] = tuple
        self.listening: Callable[[], Iterable[str]] = tuple
        self.mates: Callable[[], Iterable[Readiness]] = tuple
        self.direct: Callable[[], int] = lambda: 0
        self._link = link
        self._dialer = dialer
        self._verdict = Reachability(options.hidden)
        self._dialback = DialBack(link)
        self._dialback.direct = lambda: self.direct()
        self._service = RelayService(link, dialer.refresh, options.relay)
        trials = Trials(folder, options.guard)
        self._offers: dict[str, None] = {}
        self.keeper = RelayKeeper(link, dialer, own, trials, lambda: tuple(self._offers))
        self.keeper.on_change = lambda: self.on_change()
        self._inbound = (
            Inbound(HOP_PROTOCOL, folder / "hop.sock", MAX_HOPS, self._service.handle),
            Inbound(TRIAL_PROTOCOL, folder / "trial.sock", MAX_TRIALS, trials.receive),
        )
        self._met = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
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
        paths = self._dialer.paths
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
            if len(self._offers) > MAX_CANDIDATES:
                del self._offers[next(iter(self._offers))]
            if not known:
                self.keeper.look()
        self._met.set()

    def doubt(self) -> None:
        """Ask everybody again: this machine's addresses are others now."""
        self._verdict.doubt()
        self._met.set()

    def listen(self) -> None:
        """Start to take streams from p2pd, and to ask."""
        for inbound in self._inbound:
            inbound.listen()
        self._spawn(self._survey())
        if self.hidden:
            self._follow()

    async def attach(self) -> None:
        """Have a (new) p2pd send streams here.

        Raises:
            LinkError: p2pd does not answer.
        """
        for inbound in self._inbound:
            await inbound.attach(self._link)
        self.doubt()
        self.keeper.lose_all()

    async def stop(self) -> None:
        """End everything; idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for inbound in self._inbound:
            await inbound.stop()

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
                for peer in self._verdict.whom(self.candidates(), loop.time()):
                    self._spawn(self._ask(peer))
            try:
                async with asyncio.timeout(SURVEY_SECONDS):
                    await self._met.wait()
            except TimeoutError:
                continue

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
        if not direct and self._keeping is None:
            self._keeping = self._spawn(self.keeper.run())
        elif direct and self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
            self.keeper.held.clear()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Only a bug of ours ends a task by an exception; it must not be what nobody looks for relays for.
            _log.error("a task of the reach failed", exc_info=task.exception())
            if task is self._keeping:
                self._keeping = None
