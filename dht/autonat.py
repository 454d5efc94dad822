"""How others reach this peer: it asks peers to dial it, finds relays if they cannot, and relays for others if told to.

Peers dial each other back on request. So a peer behind a NAT learns that it is. libp2p's AutoNAT does the same, but
p2pd takes a quarter of a minute before it asks, and asks for public addresses only. The asker names ports, which a
witness dials at the hosts from which the asker is connected to it. A try is one TCP connection and the greeting that
libp2p's listeners send, or, at the direct port, one question of `direct.listener`. So no peer can make another dial a
third party.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Annotated, Literal

import msgspec
from humanfriendly.text import pluralize

from equipoise.dht.address import AddressError, parse_listen, well_formed
from equipoise.dht.dialer import GREETING, direct_hosts, probe, told
from equipoise.dht.direct.listener import ORIGIN_QUESTION, ask_origin
from equipoise.dht.direct.sockets import connect
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.messages import Versioned, decode, encode
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.protocol import RecordProtocol
from equipoise.dht.records import Readiness
from equipoise.dht.relay.client import RelayClient
from equipoise.dht.relay.service import RelayService
from equipoise.dht.sanitize import Malformed, printable
from equipoise.dht.state import ReachStatus
from equipoise.limits import RateLimit
from equipoise.tasks import TaskSet, sleep_until

WITNESSES = 3
"""Most peers asked: more than one, because a neighbour on the same network reaches more than the rest of the world."""
TRUSTED_SECONDS = 300.0
"""Longest time for which an answer counts; then this peer asks again: routers forget mappings, machines move."""
UNANSWERED_SECONDS = 10.0
"""Seconds after which this peer asks a peer again that gave no answer, or refused to try."""
MAX_ASKED = 1024
DIALBACK = "equipoise.dht.dialback"
DIALBACK_SECONDS = 4.0
"""Longest wait for an answer: a try takes at most 2 s, the rest is for the way there and back."""
MAX_TARGETS = 6
"""Most places that are tried for one asker, and most ports that it names."""
MAX_AT_ONCE = 8
"""Most dial-backs under way for others; further askers are refused."""
CALLS_PER_SECOND = 0.5
BURST = 5.0
"""Most questions of one peer: a daemon asks three peers, and again after its addresses have changed."""
MAX_TEXT = 200
SUSPECT_SECONDS = 0.5
"""Longest wait for an answer before this peer looks for relays: a dial-back that succeeds is answered sooner."""
SURVEY_SECONDS = 2.0
"""Longest time until this peer asks a peer that it should ask."""

_log = logging.getLogger(__name__)

Verdict = Literal["unknown", "direct", "private"]
Probe = Callable[[str, int], Awaitable[None]]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Ask(Versioned, frozen=True, kw_only=True):
    """Ask the receiver to dial `ports`, and the `direct` port if any, on the hosts where it sees the author."""

    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=MAX_TARGETS)]
    direct: Port = 0


class Answer(Versioned, frozen=True, kw_only=True):
    """The outcome of the tries for an `Ask`.

    Attributes:
        reached: Addresses that led to the asker, in the form that `--listen` takes.
        failed: Why no address did, if no address did.
        direct: TCP port of the author's direct listener, which tells askers where they come from; 0: none.
        blocked: Why the asker's direct port could not be opened; empty if it was, or not tried.
    """

    reached: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_TARGETS)] = ()
    failed: Text = ""
    direct: Port = 0
    blocked: Text = ""


_asks, _answers = msgspec.msgpack.Decoder(Ask), msgspec.msgpack.Decoder(Answer)


class Reachability:
    """Judges whether others can dial this peer, and why, by the answers of the peers that tried. Sans IO.

    `addresses` are those that led here by the latest answers; they are a router's if it forwards a port.
    """

    def __init__(self, hidden: str = "") -> None:
        """`hidden` says why no peer could dial this one in any case; then this peer asks no other."""
        self._hidden = hidden
        self._asked: dict[str, float] = {}
        self._heard: dict[str, tuple[float, Answer]] = {}
        self.verdict: Verdict = "private" if hidden else "unknown"
        self.reason = hidden or "no peer has tried to dial it yet"
        self.addresses: tuple[str, ...] = ()

    def whom(self, candidates: Iterable[str], now: float) -> list[str]:
        """Choose the peers to ask now, and count them as asked."""
        if self._hidden:
            return []
        self._heard = {peer: one for peer, one in self._heard.items() if one[0] + TRUSTED_SECONDS > now}
        self._asked = {peer: at for peer, at in self._asked.items() if at + UNANSWERED_SECONDS > now}
        room = min(WITNESSES - len(self._heard), MAX_ASKED - len(self._asked))
        free = (peer for peer in candidates if peer not in self._heard and peer not in self._asked)
        chosen = list(itertools.islice(free, max(0, room)))
        self._asked |= dict.fromkeys(chosen, now)
        return chosen

    def hear(self, peer: str, finding: Answer, now: float) -> bool:
        """Weigh the finding of `peer`; return whether the verdict or the addresses have changed.

        The majority of the peers that tried decides. A tie counts as `private`: a peer that owns no part loses nothing,
        but an owner that half the group cannot reach fails the round for all members.
        """
        self._heard[peer] = now, finding
        said = [one for _, one in self._heard.values()]
        reached = [one for one in said if one.reached]
        before, asked = (self.verdict, self.addresses), pluralize(len(said), "peer")
        self.addresses = tuple(dict.fromkeys(address for one in reached for address in one.reached))
        self.verdict = "direct" if 2 * len(reached) > len(said) else "private"
        if self.verdict == "direct":
            self.reason = f"{len(reached)} of {asked} reached it at {reached[-1].reached[0]}"
            blocked = [one.blocked for one in reached if one.blocked]
            if blocked:
                # The verdict is still `direct`: libp2p carries the frames if the direct port is blocked.
                self.reason += f"; {len(blocked)} cannot open a direct channel to it: {blocked[-1]}"
        else:
            failed = next(one for one in reversed(said) if not one.reached)
            self.reason = f"{len(said) - len(reached)} of {asked} failed, {failed.failed}"
        return (self.verdict, self.addresses) != before

    @property
    def direct_ports(self) -> dict[str, int]:
        """The ports of the witnesses' direct listeners, by PeerID."""
        return {peer: said.direct for peer, (_, said) in self._heard.items() if said.direct}

    def doubt(self) -> None:
        """Ask all witnesses again: this peer's addresses or its network have changed."""
        self._heard.clear()
        self._asked.clear()
        self.addresses = ()


class Reach:
    """Finds out how others reach this peer, and keeps the result up to date.

    Attributes:
        on_change: Called when the verdict, the addresses or the relays have changed.
        listening: Returns the addresses where this peer itself listens, in the form that `--join` takes.
        relays: The relays in use.
    """

    def __init__(
        self,
        link: P2pdClient,
        protocol: RecordProtocol,
        direct: DirectTransport,
        hidden: str = "",
        relay: float | None = None,
    ) -> None:
        """`hidden` says why this peer cannot be dialled, if that is known; `relay` is the relay's bytes per second."""
        self.on_change: Callable[[], None] = lambda: None
        self.listening: Callable[[], Iterable[str]] = tuple
        self._direct = direct
        protocol.on_hello = self.meet
        self._link = link
        link.answer(DIALBACK, self._answer)
        self._protocol = protocol
        self._verdict = Reachability(hidden)
        self._limit = RateLimit(CALLS_PER_SECOND, BURST)
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._service = None if relay is None else RelayService(link, protocol.dialer, relay)
        self.relays = RelayClient(link, protocol.dialer, protocol.peer)
        self.relays.on_change = lambda: self.on_change()
        self._met = asyncio.Event()
        self._tasks = TaskSet()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def hidden(self) -> bool:
        """True if others cannot dial this peer, as far as is known."""
        return self._verdict.verdict == "private"

    @property
    def reached_at(self) -> tuple[str, ...]:
        """Addresses where others have dialled this peer, as `--listen` takes them; a router may forward a port."""
        return () if self.hidden else self._verdict.addresses

    @property
    def dialable(self) -> bool:
        """True if others can open channels to this peer, and it may own shares."""
        if self._link.gate.admission.role(self._protocol.peer) != "trainer":
            return False
        if not self.hidden or not self.relays.held:
            return not self.hidden
        return stands_in(self._protocol.intake.store.mates(self._protocol.peer, time.monotonic()))

    @property
    def mirrors(self) -> dict[tuple[str, int], bytes]:
        """The direct listeners of public peers that have dialled back, each with the question that it answers."""
        paths = self._protocol.dialer.paths
        found = [
            ((host, port), self._direct.question(peer))
            for peer, port in self._verdict.direct_ports.items()
            for host in direct_hosts(paths.get(peer, ()))
        ]
        # Public hosts first, because neighbours see only this side of the router; then IPv4, which NATs translate.
        return dict(sorted(found, key=lambda at: _worth(at[0][0])))

    def meet(self, peer: str, relays: bool) -> None:
        """Take note of a peer that can be asked, and of whether it relays for others."""
        if not relays:
            self.relays.offers.pop(peer, None)
        elif peer not in self.relays.offers:
            self.relays.look.set()
        if relays:
            self.relays.offers[peer] = None
        self._met.set()

    def doubt(self) -> None:
        """Ask all witnesses again: this machine's addresses have changed."""
        self._verdict.doubt()
        self._met.set()

    def status(self) -> ReachStatus:
        """Return how others reach this peer, without waiting."""
        state, reason = self._verdict.verdict, self._verdict.reason
        relay = None if self._service is None else self._service.status()
        if state != "private":
            return ReachStatus(state, reason, (), relay)
        relays, why = tuple(self.relays.held), f"{self.relays.reason}; not dialled: {reason}"
        return ReachStatus("relayed" if relays else "unreachable", why, relays, relay)

    async def run(self) -> None:
        """Ask witnesses, and look for relays if this peer may need them, until cancelled."""
        if self.hidden:
            self._follow()
        try:
            while True:
                self._met.clear()
                if self._link.attached:
                    for peer in self._verdict.whom(self._protocol.peers, time.monotonic()):
                        self._tasks.spawn(self._ask(peer))
                await sleep_until(self._met, SURVEY_SECONDS)
        finally:
            await self._tasks.stop()

    async def _ask(self, peer: str) -> None:
        # A dial whose packets are dropped takes 2 s to fail: meanwhile this peer looks for relays.
        suspicion = asyncio.get_running_loop().call_later(SUSPECT_SECONDS, self._follow)
        try:
            finding = await self.ask(peer)
        except (ConnectionError, Malformed) as error:
            _log.debug("%s did not dial back: %s", peer, error)
            return
        finally:
            suspicion.cancel()
        if self._verdict.hear(peer, finding, time.monotonic()):
            _log.info("reachability: %s (%s)", self._verdict.verdict, self._verdict.reason)
            self._follow()
            self.on_change()

    async def ask(self, peer: str) -> Answer:
        """Ask `peer` to dial back; raises ConnectionError or Malformed if it did not try."""
        ports = dict.fromkeys(one.port for one in well_formed(self.listening()) if not one.relayed)
        question = Ask(ports=tuple(ports)[:MAX_TARGETS], direct=self._direct.port)
        data = await self._link.call(peer, DIALBACK, encode(question), DIALBACK_SECONDS)
        answer = decode(data, _answers)
        reached = []
        for text in answer.reached:
            with contextlib.suppress(AddressError):
                reached.append(parse_listen(text).text)
        failed, blocked = printable(answer.failed, MAX_TEXT), printable(answer.blocked, MAX_TEXT)
        return Answer(reached=tuple(reached), failed=failed, direct=answer.direct, blocked=blocked)

    async def _answer(self, peer: str, data: bytes) -> bytes:
        """Dial `peer` back at its request."""
        if self._room.locked() or not self._limit.allow(peer, time.monotonic()):
            raise Malformed("too many questions")
        ask = decode(data, _asks)
        async with self._room:
            await self._link.gate.present(peer)
            question = self._direct.question(peer)
            seen = direct_hosts((await self._link.connections()).get(peer, ()))
            where = [(host, port) for host in seen for port in ask.ports][:MAX_TARGETS]
            hosts = seen[:MAX_TARGETS] if where and ask.direct else []
            answer, other = await asyncio.gather(
                _try_all(where, partial(probe, greeting=GREETING)),
                _try_all([(host, ask.direct) for host in hosts], partial(answered, question=question)),
            )
            blocked = other.failed if hosts and not other.reached else ""
            return encode(msgspec.structs.replace(answer, direct=self._direct.port, blocked=blocked))

    def _follow(self) -> None:
        """Look for relays unless other peers are known to dial this one."""
        direct = self._verdict.verdict == "direct"
        if not direct and (self._keeping is None or self._keeping.done()):
            self._keeping = self._tasks.keep(self.relays.run)
        elif direct and self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
            self.relays.held.clear()


def _worth(host: str) -> tuple[bool, bool]:
    return not ipaddress.ip_address(host).is_global, ":" in host


def stands_in(mates: Iterable[Readiness]) -> bool:
    """Tell whether a relayed peer should say that it can be dialled, given the records of all others in its runs.

    A group needs a member that the others can open channels to: that member owns parts. A relayed peer can own parts,
    but slowly and at a third party's expense. So it offers itself only if it knows others and none of them can be
    dialled. The members need not agree on that: each signs its own claim, and the round drops a member that cannot be
    reached after all, like any other.
    """
    mates = list(mates)
    return bool(mates) and not any(mate.dialable and mate.reach != "relayed" for mate in mates)


async def answered(host: str, port: int, question: bytes = ORIGIN_QUESTION) -> None:
    """Open a connection on which a direct listener must answer a question; raises Unreached without an answer."""
    async with told(host, port):
        with await connect(host, port) as connection:
            await ask_origin(connection, question)


async def _try_all(where: list[tuple[str, int]], attempt: Probe) -> Answer:
    failures = await asyncio.gather(*(attempt(*place) for place in where), return_exceptions=True)
    reached = [place for place, failure in zip(where, failures, strict=True) if failure is None]
    return Answer(
        reached=tuple(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}" for host, port in reached),
        failed=str(next(filter(None, failures), "it listens nowhere that could be tried"))[:MAX_TEXT],
    )
