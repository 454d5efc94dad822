"""A world in virtual time for the matchmaking machines: links, a directory that lags, and faults, from one seed."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from equipoise.averaging.manifest import NONCE_BYTES, Manifest
from equipoise.averaging.matchmaking.events import (
    Action,
    Announce,
    BecameReady,
    CandidatesSeen,
    Event,
    Form,
    LookUp,
    MessageReceived,
    PeerLost,
    RoundEnded,
    RoundHeard,
    Send,
    Withdrew,
    Woke,
)
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.messages import decode, encode
from equipoise.averaging.matchmaking.standing import Standing

RUN = "simulated"
SPEC = hashlib.sha256(b"simulated").hexdigest()

RECORD_SECONDS = 60.0
"""Records of dead peers are seen this long."""

MAX_REPEATED = 16
"""Messages that come again at once. Channels break seldom: if each message brought more back, talk would not end."""

MAX_STEPS = 2_000_000
"""More events than any sound scenario takes: machines that talk in circles are found by it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the directory tells of one peer; a `ports.Candidate`."""

    peer: str
    spec: str = SPEC
    ready: bool = False
    round: int = 0
    dialable: bool = True
    bandwidth: float = 0.0
    accumulated: float = 0.0
    credential: bytes = b""
    left: bool = False


@dataclass(frozen=True, slots=True)
class Weather:
    """How the world behaves apart from faults.

    Attributes:
        latency: Seconds, the least and the most; so `directory` and `exchange`.
        loss: Chance that a message breaks its channel.
        repeats: Chance that what was said last comes again with a message, as when one of two channels breaks.
    """

    latency: tuple[float, float] = (0.001, 0.002)
    directory: tuple[float, float] = (0.02, 0.05)
    exchange: tuple[float, float] = (0.05, 0.1)
    loss: float = 0.0
    repeats: float = 0.0


@dataclass
class Peer:
    """One daemon of the world."""

    machine: Matchmaking
    dialable: bool = True
    alive: bool = True
    stalled: bool = False
    blind_to: set[str] = field(default_factory=set)
    held: list[Event] = field(default_factory=list)
    became_ready: int = 0
    formed: list[tuple[float, Manifest]] = field(default_factory=list)
    rounds: set[bytes] = field(default_factory=set)
    on_idle: Callable[[float], None] | None = None
    woken_at: float = float("inf")


class World:
    """Daemons of one run. Everything happens in `run`; between its steps faults may be made."""

    def __init__(
        self, names: Sequence[str], group_size: int, *, seed: int = 0, weather: Weather | None = None
    ):
        self.now = 0.0
        self.random = Random(seed)
        self.weather = weather or Weather()
        self.peers: dict[str, Peer] = {}
        self.messages: list[tuple[float, str, str, str]] = []
        self._group_size = group_size
        self._records: dict[str, list[tuple[float, Record]]] = {}
        self._channels: set[frozenset[str]] = set()
        self._arrivals: dict[tuple[str, str], float] = {}
        self._said: dict[tuple[str, str], deque[bytes]] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for name in names:
            self.add(name)

    def add(self, name: str, *, dialable: bool = True, round: int = 0) -> Peer:
        """Start a daemon, also in place of one that was killed."""
        standing = Standing(RUN, SPEC, name, self._group_size, signer(name), verify, round=round)
        standing.roster.dialable = dialable
        self.peers[name] = Peer(Matchmaking(standing), dialable)
        self._later(0.0, lambda: self.tell(name, Woke()))
        return self.peers[name]

    def ready(self, name: str, *, after: float = 0.0, weight: float = 1.0, patience: float = 3600.0) -> None:
        """Have a peer become ready, if it is alive and not ready."""
        self._later(after, lambda: self._become_ready(name, weight, patience))

    def withdraw(self, name: str) -> None:
        """Have a peer give up."""
        self.tell(name, Withdrew())

    def kill(self, name: str) -> None:
        """End a daemon at once; its record stays until it expires, and its channels break."""
        self.peers[name].alive = False
        for channel in [one for one in self._channels if name in one]:
            self.sever(*channel)
        last = self._records.get(name, [])
        self._records[name] = [(self.now, one) for _, one in last[-1:]]
        self._later(RECORD_SECONDS, lambda: self._expire(name))

    def stall(self, name: str) -> None:
        """Stop a daemon: it keeps its channels and does nothing."""
        self.peers[name].stalled = True

    def resume(self, name: str) -> None:
        """Let a stopped daemon go on with what has come meanwhile."""
        peer = self.peers[name]
        peer.stalled = False
        held, peer.held = peer.held, []
        for event in held:
            self.tell(name, event)

    def sever(self, one: str, other: str) -> None:
        """Break the channel between two peers; both are told."""
        self._channels.discard(frozenset((one, other)))
        for name, lost in ((one, other), (other, one)):
            self._tell_later(name, PeerLost(lost))

    def each_round(self, name: str, compute: Callable[[], float]) -> None:
        """Have a peer become ready again and again, `compute()` seconds after the last round ended."""
        self.peers[name].on_idle = lambda _: self.ready(name, after=compute())
        self.ready(name, after=compute())

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let virtual time pass; returns whether `until` came true."""
        end = self.now + seconds
        for _ in range(MAX_STEPS):
            if until():
                return True
            if not self._queue or self._queue[0][0] > end:
                self.now = end
                return until()
            self.now, _order, step = heapq.heappop(self._queue)
            step()
        raise AssertionError(f"expected an end within {MAX_STEPS} events, the machines talk in circles")

    def tell(self, name: str, event: Event) -> None:
        """Give a peer's machine an event, and do what it asks for."""
        peer = self.peers[name]
        if not peer.alive:
            return
        if peer.stalled:
            peer.held.append(event)
            return
        machine = peer.machine
        for action in machine.handle(event, self.now):
            self._do(name, action)
        if machine.ready:
            assert machine.deadline < float("inf"), "something is awaited, and no deadline is set"
        self._wake(name, machine.deadline)

    def _become_ready(self, name: str, weight: float, patience: float) -> None:
        peer = self.peers[name]
        if peer.stalled:
            self.ready(name, after=0.01, weight=weight, patience=patience)
        if peer.stalled or not peer.alive or peer.machine.ready:
            return
        nonce = self.random.randbytes(NONCE_BYTES)
        peer.became_ready += 1
        self.tell(name, BecameReady(weight, nonce, dialable=peer.dialable, patience=patience))

    def _do(self, name: str, action: Action) -> None:
        match action:
            case Send(peer, message):
                self.messages.append((self.now, name, peer, type(message).__name__))
                self._send(name, peer, encode(message))
            case Form(manifest, _):
                self.peers[name].formed.append((self.now, manifest))
                self.peers[name].rounds.add(manifest.id)
                for member in manifest.peers:
                    self._later(
                        self._draw(self.weather.latency), partial(self._greet, name, member, manifest.id)
                    )
                self._later(self._draw(self.weather.exchange), lambda: self._end_round(name, manifest.round))
            case Announce(ready, round, _):
                record = Record(name, ready=ready, round=round, dialable=self.peers[name].dialable)
                seen = self.now + self._draw(self.weather.directory)
                self._records[name] = [*self._records.get(name, [])[-4:], (seen, record)]
            case LookUp():
                self._later(self._draw(self.weather.directory), lambda: self.tell(name, self._look(name)))

    def _look(self, viewer: str) -> CandidatesSeen:
        blind_to = self.peers[viewer].blind_to
        seen = []
        for name in sorted(self._records.keys() - blind_to):
            past = [record for at, record in self._records[name] if at <= self.now]
            seen.extend(past[-1:])
        return CandidatesSeen(seen)

    def _send(self, sender: str, receiver: str, data: bytes) -> None:
        channel = frozenset((sender, receiver))
        target = self.peers.get(receiver)
        latency = self._draw(self.weather.latency)
        if channel not in self._channels and (target is None or not target.alive or not target.dialable):
            self._tell_later(sender, PeerLost(receiver))
            return
        self._channels.add(channel)
        if self.random.random() < self.weather.loss:
            self.sever(sender, receiver)
            return
        # A channel keeps its order, whatever the latency.
        arrival = max(self.now + latency, self._arrivals.get((sender, receiver), 0.0))
        self._arrivals[sender, receiver] = arrival
        said = self._said.setdefault((sender, receiver), deque(maxlen=MAX_REPEATED))
        said.append(data)
        repeats = self.weather.repeats > 0 and self.random.random() < self.weather.repeats
        repeated = list(said) if repeats else [data]
        for one in repeated:
            self._later(arrival - self.now, partial(self._deliver, sender, receiver, channel, one))

    def _deliver(self, sender: str, receiver: str, channel: frozenset[str], data: bytes) -> None:
        if channel in self._channels:
            self.tell(receiver, MessageReceived(sender, decode(data)))

    def _greet(self, name: str, other: str, round_id: bytes) -> None:
        """The first word of a round, to each member of it."""
        both = all(self.peers[one].alive for one in (name, other))
        if both and round_id not in self.peers[other].rounds:
            self.tell(other, RoundHeard(name))

    def _end_round(self, name: str, round: int) -> None:
        self.tell(name, RoundEnded(round))
        on_idle = self.peers[name].on_idle
        if on_idle is not None:
            on_idle(self.now)

    def _wake(self, name: str, deadline: float) -> None:
        peer = self.peers[name]
        if deadline >= peer.woken_at and peer.woken_at > self.now:
            return
        if deadline == float("inf"):
            return
        peer.woken_at = max(deadline, self.now)
        self._later(peer.woken_at - self.now, lambda: self._woke(name, peer))

    def _woke(self, name: str, peer: Peer) -> None:
        if self.peers[name] is not peer:
            return
        if self.now >= peer.woken_at:
            peer.woken_at = float("inf")
        if peer.machine.deadline <= self.now:
            self.tell(name, Woke())
        else:
            self._wake(name, peer.machine.deadline)

    def _expire(self, name: str) -> None:
        if not self.peers[name].alive:
            self._records.pop(name, None)

    def _later(self, seconds: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), step))

    def _tell_later(self, name: str, event: Event) -> None:
        self._later(self._draw(self.weather.latency), lambda: self.tell(name, event))

    def _draw(self, bounds: tuple[float, float]) -> float:
        return self.random.uniform(*bounds)


def signer(name: str) -> Callable[[bytes], bytes]:
    """A stand-in for signing with `name`'s identity key."""
    return lambda data: hashlib.sha256(name.encode() + b"\0" + data).digest()


def verify(name: str, data: bytes, signature: bytes) -> bool:
    """Whether `signer(name)` made this."""
    return signer(name)(data) == signature
