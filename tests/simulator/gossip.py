"""A world of peers that gossip: the machines that form pairs, the rounds of two that they then have, and faults.

The round of a pair is simulated as any other, by `process.Process`. Values are exact in float64: each exchange adds a
bit to what a value needs, so peers with more than some 30 exchanges have to draw new values now and then (`step`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Any

from equipoise.averaging.allreduce import events as round_events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.gossip.machine import Pairing
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.matchmaking.messages import (
    GroupFormed,
    JoinRefused,
    JoinRequest,
    Whereabouts,
    decode,
)
from equipoise.averaging.partition import Part
from simulator import matchmaking
from simulator.arithmetic import decode as values_of
from simulator.arithmetic import draw_values
from simulator.core import Clock, Violation
from simulator.matchmaking import RUN, Record, Weather
from simulator.member import Frame, Output, Values, check_agreement
from simulator.process import Process, Start

PARTS = (Part(0, 1, 0), Part(1, 2, 1))
"""A value for each of the two to reduce."""

EXCHANGE_SECONDS = 10.0
"""What a round of two may take, as its caller's timeout."""

REDUCE_SECONDS = 0.001
"""Most that a reduction takes."""

COMPUTE_SECONDS = 0.5
"""What a peer does between two exchanges takes so long, on average."""

MIX_SECONDS = 1000.0
"""By then exchanges come about, or never."""

TROUBLE_SECONDS = 1.0
"""Between two faults of a storm, on average."""

STOP_SECONDS = (0.1, 1.0, 3.0, 6.0)
"""A stopped peer is stopped for so long: some are taken for dead."""


class Exchange:
    """A round of two in a world of many: what the processes of its members live in.

    Attributes:
        clock: Of the world.
        group: The round.
        id: The round's.
        peers: PeerIDs of the two, in member order.
        processes: Of the members that have begun it.
        judged: Whether its outcome has been counted.
    """

    def __init__(self, world: World, manifest: Manifest) -> None:
        self.clock: Clock = world
        self.id, self.peers = manifest.id, manifest.peers
        self.group = round_events.Group(
            round_id=manifest.id,
            names=manifest.peers,
            weights=tuple(join.weight for join in manifest.members),
            dialable=sum(1 << at for at, join in enumerate(manifest.members) if join.dialable),
            parts=PARTS,
            first_leader=manifest.peers.index(manifest.coordinator),
        )
        self.number = manifest.round
        self.processes: dict[int, Process] = {}
        self.judged = False
        self._world = world

    def enter(self, peer: Peer) -> Process:
        """Have one of the two take part."""
        me = self.peers.index(peer.name)
        start = Start(peer.values, self.clock.now, 0.0, EXCHANGE_SECONDS)
        process = self.processes[me] = Process(self, me, start)
        process.incoming = [(1 - me, self._world.link(self.peers[1 - me], peer.name))]
        return process

    def step(self, process: Process, what: object, outputs: list[Output]) -> None:
        """See `process.Surroundings`."""
        self.act(process, outputs)

    def act(self, process: Process, outputs: list[Output]) -> None:
        """See `process.Surroundings`."""
        process.perform(outputs, self.send, lambda: self._world.random.random() * REDUCE_SECONDS)
        if process.dead:
            return
        self._world.processes[self.peers[process.index]].follow(self, process)

    def send(self, frame: Frame) -> None:
        """Have a frame travel."""
        sender, to = self.peers[frame.sender], self.peers[frame.to]
        beat = self.id + wire.encode(frame.message) if isinstance(frame.message, wire.Heartbeat) else b""
        take = self._world.processes[to].take
        self._world.transmit(sender, to, take, self, frame, bulk=frame.bulk, flow=self.id, beat=beat)

    def tell(self, index: int | None, what: object) -> None:
        """See `process.Surroundings`."""

    def ended(self, index: int) -> bool:
        """Whether a member has ended, is dead, or can never begin."""
        process = self.processes.get(index)
        return self._world.peers[self.peers[index]].dead or (
            process is not None and process.member.ended is not None
        )


class Peer(matchmaking.Peer):
    """One daemon of the world, that gossips.

    Attributes:
        values: Its parameters.
        current: The exchange that it is in.
        exchanged: Exchanges that were ok.
    """

    _world: World

    def __init__(self, world: World, context: Context) -> None:
        super().__init__(world, context)
        self.values: Values = draw_values(world.random, len(PARTS))
        self.current: Exchange | None = None
        self.exchanged = 0
        self._rounds: dict[bytes, tuple[Exchange, Process]] = {}
        self._early: dict[bytes, list[Frame]] = {}
        self._over: set[bytes] = set()
        self._replied: set[str] = set()

    def matchmaker(self, world: matchmaking.World, context: Context) -> Matchmaker:
        """Make the machine that the peer drives."""
        assert isinstance(world, World)
        return Pairing(context, world.topology, Random(world.random.random()))

    def become_ready(self, weight: float, patience: float) -> None:
        """It seeks an exchange, if it is in none and seeks none already."""
        if self.current is None:
            super().become_ready(weight, patience)

    def step(self) -> None:
        """As a training step: its values change, and are short again."""
        before, self.values = self.values, draw_values(self._world.random, len(PARTS))
        self._world.move(before, self.values)

    # ---- pairing ----

    def receive(self, sender: str, *messages: bytes) -> None:
        """Messages have come; a proposal is answered at once."""
        for message in messages:
            self._replied.clear()
            super().receive(sender, message)
            if isinstance(decode(message), JoinRequest) and sender not in self._replied:
                raise Violation(f"{self.name} did not answer the proposal of {sender}")

    def perform(self, action: events.Action) -> None:
        """Do what the machine asks for."""
        match action:
            case events.Send(peer, GroupFormed() | JoinRefused()):
                self._replied.add(peer)
            case events.Decline(peer, round_id):
                if exchange := self._world.exchanges.get(round_id):
                    me, partner = exchange.peers.index(self.name), exchange.peers.index(peer)
                    exchange.send(Frame(me, partner, wire.GiveUp("it takes no part")))
        super().perform(action)

    def form(self, manifest: Manifest) -> None:
        """Begin an exchange."""
        if self.current is not None:
            raise Violation(f"{self.name} is in two exchanges at once")
        exchange = self.current = self._world.exchange(manifest)
        process = exchange.enter(self)
        self._rounds[exchange.id] = exchange, process
        for frame in self._early.pop(exchange.id, []):
            process.receive(frame)
        process.begin()

    # ---- the round ----

    def take(self, exchange: Exchange, frame: Frame) -> None:
        """A frame of a round has come."""
        if exchange.id in self._rounds:
            self._rounds[exchange.id][1].receive(frame)
        elif exchange.id not in self._over:
            self._early.setdefault(exchange.id, []).append(frame)

    def follow(self, exchange: Exchange, process: Process) -> None:
        """See what has become of a round."""
        if process.member.ended is not None and self.current is exchange:
            self.current = None
            if process.member.result is not None:
                before, self.values = self.values, values_of(process.member.result)
                self._world.apply(exchange, before, self.values)
                self.exchanged += 1
            self._world.judge(exchange)
            self.end_round(exchange.number)
        if process.member.closed:
            self._rounds.pop(exchange.id, None)
            self._over.add(exchange.id)

    # ---- faults ----

    @property
    def flows(self) -> Container[bytes]:
        """Its rounds."""
        return self._rounds

    def lose(self, other: str, reason: str) -> None:
        """It cannot reach another peer."""
        super().lose(other, reason)
        for exchange, process in list(self._rounds.values()):
            if other in exchange.peers:
                process.lose(exchange.peers.index(other), reason)

    def stop(self) -> None:
        """As by SIGSTOP."""
        super().stop()
        for _, process in self._rounds.values():
            process.stop()

    def resume(self, timers_first: bool = False) -> None:
        """As by SIGCONT."""
        super().resume(timers_first)
        for _, process in list(self._rounds.values()):
            process.resume(timers_first)

    def kill(self) -> None:
        """As by SIGKILL: what it holds is gone."""
        if not self.dead:
            super().kill()
            self._world.move(self.values, (0.0,) * len(PARTS))
            for exchange, process in self._rounds.values():
                process.kill()
                self._world.judge(exchange)


class World(matchmaking.World):
    """Daemons of one gossip run.

    Attributes:
        topology: From whom they draw partners.
        exchanges: By their rounds' ids, those that go on.
        ok: Exchanges that both have applied.
        failed: Exchanges that neither has.
        in_doubt: Exchanges that one has applied, and of which the other knows that it may be so, or has died.
    """

    processes: dict[str, Any]

    def __init__(
        self, names: Sequence[str], *, topology: str = "random", seed: int = 0, weather: Weather | None = None
    ) -> None:
        self.topology = topology
        self.exchanges: dict[bytes, Exchange] = {}
        self.ok = self.failed = self.in_doubt = 0
        self._applied: dict[bytes, list[Fraction]] = {}
        self._sum = Fraction(0)
        super().__init__(names, 2, seed=seed, weather=weather)

    def make(self, context: Context) -> Peer:
        """Make a daemon that stands so."""
        peer = Peer(self, context)
        self.move((0.0,) * len(PARTS), peer.values)
        self.publish(Record(peer.name, dialable=peer.dialable), self.draw(self.weather.directory))
        return peer

    def acquaint(self) -> None:
        """Have all know each other, as peers that were there for a while do."""
        records = [Record(name) for name in self.peers]
        for name, peer in self.peers.items():
            peer.machine.handle(events.CandidatesSeen(records), self.now)
            for other in self.peers.keys() - {name}:
                peer.machine.handle(events.MessageReceived(other, Whereabouts(RUN, 0)), self.now)

    def gossip(self, name: str, trains: bool = False) -> None:
        """Have a peer seek an exchange again and again, and take a training step before each if it trains."""

        def compute() -> float:
            if trains and self.processes[name].current is None:
                self.processes[name].step()
            return self.random.expovariate(1 / COMPUTE_SECONDS)

        self.each_round(name, compute)

    def exchange(self, manifest: Manifest) -> Exchange:
        """The round of a manifest."""
        return self.exchanges.setdefault(manifest.id, Exchange(self, manifest))

    @property
    def living(self) -> list[Peer]:
        """The daemons that are not dead."""
        return [peer for peer in self.processes.values() if not peer.dead]

    @property
    def error(self) -> float:
        """Mean squared distance from the mean."""
        total = 0.0
        for column in zip(*(peer.values for peer in self.living), strict=True):
            mean = sum(column) / len(column)
            total += sum((value - mean) ** 2 for value in column) / len(column)
        return total

    @property
    def pairing_messages(self) -> int:
        """Proposals, and answers to them, that were sent so far."""
        kinds = [kind.__name__ for kind in (JoinRequest, JoinRefused, GroupFormed)]
        return sum(kind in kinds for _, _, _, kind in self.messages)

    def move(self, before: Values, after: Values) -> None:
        """Values have changed otherwise than by an exchange."""
        self._sum += sum(map(Fraction, after)) - sum(map(Fraction, before))

    def apply(self, exchange: Exchange, before: Values, after: Values) -> None:
        """One of an exchange has applied its mean."""
        change = sum(map(Fraction, after), Fraction(0)) - sum(map(Fraction, before))
        self._applied.setdefault(exchange.id, []).append(change)

    def judge(self, exchange: Exchange) -> None:
        """Count an exchange that is over at both.

        Raises:
            Violation: It kept a promise not.
        """
        if exchange.judged or not (exchange.ended(0) and exchange.ended(1)):
            return
        exchange.judged = True
        members = [process.member for _, process in sorted(exchange.processes.items())]
        applied = self._applied.pop(exchange.id, [])
        if applied and len(members) < 2:
            raise Violation(f"an exchange of {exchange.peers} that one of them never began was applied")
        if applied:
            check_agreement(members)
        if len(applied) == 1:
            for member in members:
                if isinstance(member.ended, round_events.Fail) and not member.ended.in_doubt:
                    raise Violation(
                        f"{member.group.names[member.index]} failed without doubt: {member.ended}"
                    )
            self.in_doubt += 1
            self._sum += applied[0]
        elif sum(applied):
            raise Violation(f"an exchange of {exchange.peers} changed the sum by {sum(applied)}")
        self.ok += len(applied) == 2
        self.failed += not applied
        del self.exchanges[exchange.id]

    def check_sum(self) -> None:
        """Check that the sum of all values is what exchanges in doubt, steps and deaths leave of it.

        Raises:
            Violation: It is not.
        """
        under_way = sum(sum(changes) for changes in self._applied.values())
        found = sum(sum(map(Fraction, peer.values)) for peer in self.living)
        if found != self._sum + under_way:
            raise Violation(f"the sum is {float(found)}, not {float(self._sum + under_way)}")


@dataclass(frozen=True, slots=True)
class Mixing:
    """What exchanges without faults came to.

    Attributes:
        error: Mean squared distance from the mean, as a share of the first, after so many exchanges.
        in_doubt: Exchanges that one of the two applied, as far as the other knows.
        messages: Proposals and answers for each exchange.
    """

    error: dict[int, float]
    in_doubt: int
    messages: float


def mixes_as_expected(error: dict[int, float], peers: int) -> bool:
    """True if errors of `Mixing`, averaged over seeds, are those of random pairs, give or take a tenth.

    Args:
        error: After `peers` exchanges, twice as many, and so on.
        peers: Number of peers.
    """
    bounds = {}
    for done in error:
        # Least if all peers pair off at once again and again, most if two are drawn for each exchange (Boyd 2006).
        least = ((peers / 2 - 1) / (peers - 1)) ** (2 * done / peers)
        bounds[done] = 0.9 * least, 1.1 * (1 - 1 / (peers - 1)) ** done
    return all(bounds[done][0] <= found <= bounds[done][1] for done, found in error.items())


def mix(peers: int, topology: str, exchanges: int, seed: int) -> Mixing:
    """Have peers that know each other exchange; the error is taken after `peers` exchanges, twice as many, and so on.

    Raises:
        Violation: A promise was broken.
    """
    world = World([f"p{at:04}" for at in range(peers)], topology=topology, seed=seed)
    world.run(0.0)
    world.acquaint()
    first = world.error
    for name in world.peers:
        world.gossip(name)
    error: dict[int, float] = {}
    while world.ok < exchanges:
        due = min(peers * 2 ** len(error), exchanges)
        if not world.run(MIX_SECONDS, lambda: world.ok >= due):  # noqa: B023
            raise Violation(f"{due} exchanges of {peers} peers take more than {MIX_SECONDS:g} s")
        error[due] = world.error / first
    world.check_sum()
    return Mixing(error, world.in_doubt, world.pairing_messages / world.ok)


def storm(seed: int, exchanges: int, peers: int = 8) -> World:
    """Have peers that train exchange, while channels break and peers stop, die, come, and withdraw.

    Raises:
        Violation: A promise was broken.
    """
    weather = Weather(loss=0.002, repeats=0.02)
    world = World([f"p{at}" for at in range(peers)], seed=seed, weather=weather)
    chance, names = Random(f"storm {seed}"), itertools.count(peers)
    world.run(0.0)
    world.acquaint()

    def begin(name: str) -> None:
        world.gossip(name, trains=True)

    def trouble() -> None:
        living = [peer.name for peer in world.living]
        victim = chance.choice(living)
        match chance.choice(["stop", "kill", "break", "withdraw"]):
            case "stop":
                world.stop(victim, chance.choice(STOP_SECONDS))
            case "kill":
                world.kill(victim, chance.choice([0.0, 0.5, None]))
                world.add(name := f"p{next(names)}")
                begin(name)
            case "break":
                world.sever(*chance.sample(living, 2))
            case "withdraw" if world.processes[victim].machine.ready:
                world.withdraw(victim)
                world.ready(victim, after=chance.random())
        world.at(world.now + chance.expovariate(1 / TROUBLE_SECONDS), trouble)

    for name in list(world.peers):
        begin(name)
    world.at(TROUBLE_SECONDS, trouble)
    while world.ok < exchanges:
        before = world.ok
        world.run(MIX_SECONDS, lambda: world.ok >= min(before + 100, exchanges))  # noqa: B023
        world.check_sum()
        if world.ok == before:
            raise Violation(
                f"no exchange in {MIX_SECONDS:g} s: {[peer.machine.reason for peer in world.living]}"
            )
    return world
