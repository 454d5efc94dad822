"""A world in virtual time for the matchmaking machines: links, a directory that lags, and faults, from one seed."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.messages import MatchmakingMessage, decode, encode
from equipoise.averaging.options import Needs
from equipoise.averaging.state import StateId
from simulator import network
from simulator.core import NEVER, Driver
from simulator.network import Network

RUN = "simulated"
SPEC = hashlib.sha256(b"simulated").hexdigest()

RECORD_SECONDS = 60.0
"""Records of dead peers are seen this long."""

LOOK_SECONDS = 0.25
"""Between two looks at the directory, as the daemon's."""

PART_SECONDS = (0.001, 0.001)
"""Seconds that a part of a round takes, the least and the most of any link."""

MAX_REPEATED = 16
"""Messages that come again at once. Channels break seldom: if each message brought more back, talk would not end."""


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
    tags: tuple[str, ...] = ()
    observes: bool = False


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


class Peer(Driver):
    """One daemon of the world.

    Attributes:
        blind_to: Whose records it does not see.
        holds: The state that it held before the first round; None if its joins claim none.
        became_ready: How often.
        formed: The groups that it was told of, and when.
        on_idle: Called when a round has ended.
    """

    machine: Matchmaking

    def __init__(self, world: World, context: Context) -> None:
        super().__init__(world, Matchmaking(context), events.Woke())
        self.name = context.peer
        self.dialable = context.membership.dialable
        self.blind_to: set[str] = set()
        self.holds: StateId | None = None
        self.became_ready = 0
        self.formed: list[tuple[float, Manifest]] = []
        self.on_idle: Callable[[], None] = lambda: None
        self._world = world

    def tell(self, event: events.Event) -> None:
        """Hand an event to the machine, and do what it asks for."""
        super().tell(event)
        assert not self.machine.ready or self.deadline < NEVER, "it awaits something, and sets no deadline"

    def lose(self, other: str, reason: str) -> None:
        """It cannot reach another peer."""
        self.tell(events.PeerLost(other))

    def become_ready(self, weight: float, patience: float) -> None:
        """It has something to average, if it is not ready already."""
        if not self.machine.ready:
            self.became_ready += 1
            self._state_join(weight, patience)

    def restate(self, weight: float, patience: float) -> None:
        """It states its join anew, if it still seeks a group."""
        if self.machine.ready:
            self._state_join(weight, patience)

    def _state_join(self, weight: float, patience: float) -> None:
        nonce = self._world.random.randbytes(NONCE_BYTES)
        join = stated(weight=weight, nonce=nonce, dialable=self.dialable, state=self.claim)
        self.tell(events.BecameReady(join, patience))

    @property
    def claim(self) -> StateId | None:
        """The state that it claims: every round leads to the next."""
        return self.holds and StateId(self.holds.epoch + self.machine.round, self.holds.lineage)

    def receive(self, sender: str, *messages: bytes) -> None:
        """Messages have come, all at once."""
        for message in messages:
            self.tell(events.MessageReceived(sender, decode(message)))

    def perform(self, action: events.Action) -> None:
        """Do what the machine asks for."""
        world, weather = self._world, self._world.weather
        match action:
            case events.Send(peer, message):
                world.say(self, peer, message)
            case events.Form(manifest):
                self.formed.append((world.now, manifest))
                self.form(manifest)
            case events.Late():
                self.on_idle()
            case events.Announce(ready, round):
                record = Record(self.name, ready=ready, round=round, dialable=self.dialable)
                world.publish(record, world.draw(weather.directory))

    def form(self, manifest: Manifest) -> None:
        """Begin a round, of which only its first word and its end matter here."""
        world, weather = self._world, self._world.weather
        for member in map(world.peers.__getitem__, manifest.peers):
            member.after(world.draw(weather.latency), member.greet, self, manifest)
        self.after(world.draw(weather.exchange), self.end_round, manifest.round)

    def greet(self, sender: Peer, manifest: Manifest) -> None:
        """The first word of a round, from a member of it."""
        if not sender.dead and all(known != manifest for _, known in self.formed):
            self.tell(events.RoundHeard(sender.name))

    def end_round(self, round: int) -> None:
        """A round is over."""
        self.tell(events.RoundEnded(round, ok=True))
        self.on_idle()

    def look(self) -> None:
        """Look at the directory, again and again."""
        self.tell(events.CandidatesSeen(self._world.seen_by(self)))
        self.after(LOOK_SECONDS, self.look)


class World(Network[str, Peer]):
    """Daemons of one run. Everything happens in `run`; between its steps faults may be made.

    Attributes:
        peers: The daemons, by name.
        messages: When who sent whom a message of which kind.
    """

    def __init__(
        self, names: Sequence[str], group_size: int, *, seed: int = 0, weather: Weather | None = None
    ):
        self.weather = weather or Weather()
        least, most = self.weather.latency
        super().__init__(network.Weather((least, least), PART_SECONDS, most - least), Random(seed))
        self.breaks = lambda _: self.random.random() < self.weather.loss
        self.peers = self.processes
        self.messages: list[tuple[float, str, str, str]] = []
        self._group_size = group_size
        self._records: dict[str, list[tuple[float, Record]]] = {}
        self._said: dict[tuple[str, str], deque[bytes]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str, *, dialable: bool = True, round: int = 0) -> Peer:
        """Start a daemon, also in place of one that was killed."""
        context = Context(RUN, SPEC, name, Needs(self._group_size), signer(name), verify)
        context.next_round.number = round
        context.membership.dialable = dialable
        self.forget(name)
        peer = self.peers[name] = Peer(self, context)
        peer.after(0.0, peer.tell, events.Woke())
        peer.after(self.draw(self.weather.directory), peer.look)
        return peer

    def ready(self, name: str, *, after: float = 0.0, weight: float = 1.0, patience: float = 3600.0) -> None:
        """Have a peer become ready, if it is alive and not ready."""
        self.peers[name].after(after, self.peers[name].become_ready, weight, patience)

    def withdraw(self, name: str) -> None:
        """Have a peer give up."""
        self.peers[name].happen(False, self.peers[name].tell, events.Withdrew())

    def kill(self, name: str, noticed: float | None = 0.0) -> None:
        """End a daemon at once; its record stays until it expires."""
        super().kill(name, noticed)
        self._records[name] = [(self.now, one) for _, one in self._records.get(name, [])[-1:]]
        self.at(self.now + RECORD_SECONDS, self._expire, name)

    def each_round(self, name: str, compute: Callable[[], float]) -> None:
        """Have a peer become ready again and again, `compute()` seconds after the last round ended."""
        self.peers[name].on_idle = lambda: self.ready(name, after=compute())
        self.ready(name, after=compute())

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let virtual time pass; returns whether `until` came true."""
        return self.run_until(until, self.now + seconds)

    def publish(self, record: Record, seconds: float) -> None:
        """Have others see a record in some seconds, in place of the peer's last."""
        last = self._records.get(record.peer, [])[-4:]
        self._records[record.peer] = [*last, (self.now + seconds, record)]

    def seen_by(self, viewer: Peer) -> list[Record]:
        """What the directory tells a peer."""
        seen = []
        for name in sorted(self._records.keys() - viewer.blind_to):
            seen += [record for at, record in self._records[name] if at <= self.now][-1:]
        return seen

    def say(self, sender: Peer, to: str, message: MatchmakingMessage) -> None:
        """Have a message be sent, after which the last ones may come again."""
        self.messages.append((self.now, sender.name, to, type(message).__name__))
        said = self._said.setdefault((sender.name, to), deque(maxlen=MAX_REPEATED))
        said.append(encode(message))
        repeats = self.weather.repeats > 0 and self.random.random() < self.weather.repeats
        messages = said if repeats else [said[-1]]
        self.send(sender.name, to, lambda: self.peers[to].receive(sender.name, *messages))

    def coordinator_of(self, name: str) -> str:
        """The peer that coordinates another's next round, as that one sees it."""
        context = self.peers[name].machine.context
        coordinator = context.membership.coordinator(name, context.round, self.now)
        assert coordinator is not None, "no peer can be dialled"
        return coordinator

    def draw(self, bounds: tuple[float, float]) -> float:
        """Seconds between the least and the most."""
        return self.random.uniform(*bounds)

    def _expire(self, name: str) -> None:
        if self.peers[name].dead:
            self._records.pop(name, None)


def stated(peer: str = "", **fields: Any) -> Join:
    """Return what a peer states of itself, not signed; a machine fills in its own name."""
    join = Join(peer, SPEC, 0, 1.0, 0.0, True, b"n" * NONCE_BYTES, b"", None, b"")
    return msgspec.structs.replace(join, **fields)


def signer(name: str) -> Callable[[bytes], bytes]:
    """A stand-in for signing with `name`'s identity key."""
    return lambda data: hashlib.sha256(name.encode() + b"\0" + data).digest()


def verify(name: str, data: bytes, signature: bytes) -> bool:
    """Whether `signer(name)` made this."""
    return signer(name)(data) == signature
