"""Federated rounds in virtual time: peers that train for milliseconds to minutes, die, stop, and see others too late.

The matchmaking machines are the program's. The trainers and the exchange are models: a drawn peer trains once for each
state, joins with its contribution, and keeps that until a round has taken it or is said to have gone without it. With
`late=next` it keeps a late one until a later round has taken it at its discount. An exchange succeeds if more than half
of its members and a quorum of its contributors are there to its end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from equipoise.averaging.machines import policy
from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import Federated
from equipoise.averaging.weights import LEAST_CONTRIBUTION
from simulator import matchmaking
from simulator.core import Violation
from simulator.matchmaking import Weather, World, stated

POLL_SECONDS = 0.5
"""Between two looks of a trainer at the draw."""

LOOK_SECONDS = 2.0
"""From a mean to its arrival at a peer that missed it, where no coordinator told the peer so."""

WITHHELD_SECONDS = 10.0
"""How long a late contribution is withheld; see `equipoise.peer.training.federated`."""

SLACK_SECONDS = 3.0
"""Most seconds that a round stays open while its coordinator lives: beyond its grace, and beyond any exchange of values
from its state, whose end late contributions await."""

BEGINNING = StateId(1, hashlib.sha256(b"beginning").hexdigest())


class Trainer(matchmaking.Peer):
    """One peer and its script.

    Attributes:
        state: The state that it holds.
        result: The state from which it has trained its contribution, if it has one.
        trained: The states for which it has trained.
        late: How often it was told that its contribution came too late.
    """

    def __init__(self, world: FederatedWorld, context: Context) -> None:
        super().__init__(world, context)
        self.state = world.head
        self.result: StateId | None = None
        self.trained: set[StateId] = set()
        self.late = 0
        self.begun = False
        self.tags, self.observes = world.roles.get(self.name, ((), False))
        context.membership.observes = self.observes
        self._fed = world
        self._trains = False
        self._weight = 0.0
        self._round: Manifest | None = None
        self._search = 0
        self._withheld_until = 0.0
        self.after(POLL_SECONDS * world.random.random(), self.act)

    def matchmaker(self, world: World, context: Context) -> Matchmaker:
        """See `matchmaking.Peer.matchmaker`."""
        assert isinstance(world, FederatedWorld)
        return Matchmaking(context, policy(world.strategy, context))

    def act(self) -> None:
        """Do what is due: catch up, train, or join; again and again."""
        self.after(POLL_SECONDS, self.act)
        if self._trains or self._round is not None:
            return
        self.catch_up(LOOK_SECONDS)
        assert isinstance(self.machine, Matchmaking)
        found = self.machine.draw(self.state, self._fed.now)
        first = self.state == BEGINNING and not self.begun
        if first and len(found.live) < self._fed.strategy.available:
            return
        self.begun = True
        drawn = self.name in found.peers and not self.observes
        if drawn and self.result is None and self.state not in self.trained:
            self._train()
        elif self.machine.ready and not self._weight and self.result is not None:
            if self._fed.now >= self._withheld_until:
                self.tell(
                    events.Withdrew()
                )  # The round for which it was late has failed: it counts in the next.
        elif not self.machine.ready:
            self._join()

    def _train(self) -> None:
        if self.machine.ready:
            self.tell(events.Withdrew())
        self._trains = True
        self.trained.add(self.state)
        self._fed.note_training(self.name, self.state)
        self.after(self._fed.training_seconds(), self._has_trained)

    def _has_trained(self) -> None:
        self._trains, self.result = False, self.state
        self._join()

    def _join(self) -> None:
        self._search += 1
        strategy, nonce = self._fed.strategy, self._fed.random.randbytes(NONCE_BYTES)
        patience = strategy.deadline + strategy.reserve
        weight = 0.0
        if self.result is not None and self._fed.now >= self._withheld_until:
            weight = discounted(self.result, self.state)
            self._fed.origins[nonce] = self.result
        self._weight = weight
        self.after(strategy.deadline, self._give_up, self._search, self._fed.now + strategy.deadline)
        self.became_ready += 1
        join = stated(weight=weight, nonce=nonce, dialable=self.dialable, state=self.state)
        self.tell(events.BecameReady(join, patience))

    def _give_up(self, search: int, due: float) -> None:
        """Give up at the deadline, unless the quorum is there: then the round is to close within its grace."""
        if not self.machine.ready or search != self._search:
            return
        strategy, gathering = self._fed.strategy, self.machine.gathering
        reached = gathering is not None and len(gathering.contributed) >= strategy.quorum
        if reached and self._fed.now < due + strategy.grace + SLACK_SECONDS:
            self.after(POLL_SECONDS, self._give_up, search, due)
        else:
            self.tell(events.Withdrew())

    def catch_up(self, lag: float) -> None:
        """Take the means that the group has applied meanwhile, if they are older than `lag` seconds."""
        before = self.state
        while (found := self._fed.following.get(self.state)) and self._fed.now - found.ended >= lag:
            self._move(found.after, self.name in found.weights)
        if self.state != before and self.machine.ready:
            self.tell(events.Withdrew())

    def _move(self, after: StateId, counted: bool) -> None:
        """Take on the state that follows; the contribution goes if it has counted, or is not to count any more."""
        self.state = after
        if counted or self._fed.strategy.late == "drop":
            self.result = None
        self._withheld_until = 0.0

    def perform(self, action: events.Action) -> None:
        """Do what the machine asks for."""
        if isinstance(action, events.Late):
            self.late += 1
            self._withheld_until = self._fed.now + WITHHELD_SECONDS
            if action.seconds <= 0:
                raise Violation(f"{self.name} is late by {action.seconds} s")
            self.after(0.0, self.catch_up, 0.0)
        super().perform(action)

    def form(self, manifest: Manifest) -> None:
        """Begin a round."""
        self._round = manifest
        world = self._fed
        for member in map(world.peers.__getitem__, manifest.peers):
            member.after(world.draw(world.weather.latency), member.greet, self, manifest)
        world.begin(manifest)

    def end(self, manifest: Manifest, follows: Following | None) -> None:
        """A round has ended; in a mean, if a state follows from it."""
        if self._round is not manifest and self._round != manifest:
            return
        self._round = None
        if follows is not None and self.state == manifest.before:
            self._move(follows.after, self.name in follows.weights)
        self.tell(events.RoundEnded(manifest.round, ok=follows is not None))


class Following(NamedTuple):
    """The end of a round in a mean.

    Attributes:
        after: The state that the mean led to.
        manifest: The round's group.
        weights: PeerID -> counted weight.
        ended: When its members had the mean.
    """

    after: StateId
    manifest: Manifest
    weights: dict[str, float]
    ended: float


def discounted(trained: StateId, state: StateId) -> float:
    """The weight of a contribution that was trained from one state, in the round after another."""
    return 1 / math.sqrt(1 + state.epoch - trained.epoch)


@dataclass(frozen=True)
class Times:
    """Seconds of training: most draws are between the first two, some up to the third."""

    least: float
    usual: float
    most: float


class FederatedWorld(World):
    """Daemons of one federated run.

    Attributes:
        strategy: Of the run.
        head: The last state of the group.
        following: The round that led on from a state.
        roles: The tags of a peer, and whether it only observes; none, and False, by default.
        origins: The state from which a contribution was trained, by the nonce of its join.
        trainings: Who trained for a state.
        rounds: When rounds ended, their groups, and whether they succeeded.
        forks: Rounds that succeeded from a state from which another had: views of the run were too different.
        late_counted: Late contributions that a later round counted.
    """

    def __init__(
        self,
        names: list[str],
        strategy: Federated,
        times: Times,
        *,
        seed: int = 0,
        weather: Weather | None = None,
        roles: Mapping[str, tuple[tuple[str, ...], bool]] | None = None,
    ) -> None:
        self.strategy = strategy
        self.head = BEGINNING
        self.following: dict[StateId, Following] = {}
        self.roles = roles or {}
        self.origins: dict[bytes, StateId] = {}
        self._counted: set[tuple[str, StateId]] = set()
        self.trainings: dict[StateId, list[str]] = {}
        self.rounds: list[tuple[float, Manifest, bool]] = []
        self._times = times
        self.forks = 0
        self.late_counted = 0
        self._begun: dict[bytes, Manifest] = {}
        self._over: set[bytes] = set()
        self._exchanged: dict[StateId | None, float] = {}
        super().__init__(names, 16, seed=seed, weather=weather)
        self.at(1.0, self._check)

    def make(self, context: Context) -> matchmaking.Peer:
        """See `World.make`."""
        strategy = self.strategy
        context.needs = context.needs._replace(quorum=strategy.quorum, least=strategy.least)
        return Trainer(self, context)

    @property
    def trainers(self) -> list[Trainer]:
        """The living peers."""
        return [one for one in self.peers.values() if isinstance(one, Trainer) and not one.dead]

    def may_train(self, name: str) -> bool:
        """Whether a draw may take a peer: it trains, and carries the tags of the strategy."""
        tags, observes = self.roles.get(name, ((), False))
        return not observes and set(self.strategy.tags) <= set(tags)

    def training_seconds(self) -> float:
        """How long a training takes."""
        times, usual = self._times, self.random.random() < 0.9
        least, most = (times.least, times.usual) if usual else (times.usual, times.most)
        return float(least * (most / least) ** self.random.random())

    def note_training(self, name: str, state: StateId) -> None:
        """Note that a peer trains for a state."""
        self.trainings.setdefault(state, []).append(name)
        if not self.may_train(name):
            raise Violation(f"{name} trains, which only observes, or lacks tags")

    def begin(self, manifest: Manifest) -> None:
        """The first member has begun a round."""
        if manifest.id in self._begun:
            if manifest.id in self._over:  # This member was told of its group only now.
                self.at(self.now + LOOK_SECONDS, self._tell_end, manifest, None, frozenset())
            return
        self._begun[manifest.id] = manifest
        given = [join for join in manifest.members if join.weight >= LEAST_CONTRIBUTION]
        if len(given) < self.strategy.quorum:
            raise Violation(f"round {manifest.round} has {len(given)} contributors, below its quorum")
        stale = [join.peer for join in given if join.state != manifest.before]
        if stale:
            raise Violation(f"round {manifest.round} counts contributions of {stale} to another state")
        self.at(self.now + self.draw(self.weather.exchange), self._end, manifest)

    def _end(self, manifest: Manifest) -> None:
        there = [
            one
            for one in self.trainers
            if not one.stopped and any(known.id == manifest.id for _, known in one.formed)
        ]
        names = {one.name for one in there}
        given = [
            join for join in manifest.members if join.weight >= LEAST_CONTRIBUTION and join.peer in names
        ]
        before, follows = manifest.before, None
        ok = 2 * len(there) > len(manifest.members) and len(given) >= self.strategy.quorum
        if ok:
            assert before is not None, "contributors claim states"
            # The members of the smaller side find out in the next round, and take the other's state.
            self.forks += before in self.following
        if ok and before is not None and before not in self.following:
            content = before.lineage + manifest.id.hex()
            after = StateId(before.epoch + 1, hashlib.sha256(content.encode()).hexdigest())
            weights = {join.peer: join.weight for join in given}
            follows = Following(after, manifest, weights, self.now)
            self.following[before], self.head = follows, after
            self._count(before, given)
        self.rounds.append((self.now, manifest, ok))
        self._over.add(manifest.id)
        self._exchanged[before] = self.now
        self._tell_end(manifest, follows, frozenset(names))

    def _count(self, before: StateId, given: list[Join]) -> None:
        """A training counts once: in the round that it was made for or, with `late=next`, later at its discount."""
        for join in given:
            trained = self.origins[join.nonce]
            if (join.peer, trained) in self._counted:
                raise Violation(f"the training of {join.peer} from epoch {trained.epoch} counts twice")
            self._counted.add((join.peer, trained))
            if self.strategy.late == "drop" and trained != before:
                raise Violation(f"a late contribution of {join.peer} to epoch {trained.epoch} counts")
            if join.weight != discounted(trained, before):
                told = f"of {join.peer} to epoch {trained.epoch} counts {join.weight:g} after {before.epoch}"
                raise Violation(f"a contribution {told}")
            self.late_counted += trained != before

    def _tell_end(self, manifest: Manifest, follows: Following | None, names: frozenset[str]) -> None:
        for one in self.trainers:
            if one.name in manifest.peers:
                one.happen(False, one.end, manifest, follows if one.name in names else None)

    def _check(self) -> None:
        """No draw has a peer that may not train. No round stays open longer than it may while its coordinator runs."""
        self.at(self.now + 1.0, self._check)
        quorum, grace = self.strategy.quorum, self.strategy.grace
        for one in self.trainers:
            assert isinstance(one.machine, Matchmaking)
            barred = [
                name for name in one.machine.draw(one.state, self.now).peers if not self.may_train(name)
            ]
            if barred:
                raise Violation(f"the draw of {one.name} has {barred}, who only observe, or lack tags")
            for gathering in one.machine._coordinator._builders.values():
                arrived = sorted(gathering.parked[peer].arrived for peer in gathering.contributors)
                if one.stopped or len(arrived) < quorum:
                    continue
                since = max(arrived[quorum - 1], one.resumed_at)
                due = max(since + grace, self._exchanged_until(gathering.state)) + SLACK_SECONDS
                if self.now > due and self._is_current(one, gathering.round):
                    told = f"is open {self.now - since:.1f} s after its quorum"
                    raise Violation(f"round {gathering.round} at {one.name} {told}")

    def _exchanged_until(self, state: StateId | None) -> float:
        """When the last exchange of values from a state ended: until then, contributions to that state are late for it.

        They wait for its end, because they are to count where it fails, and only there.
        """
        going = (one.before for name, one in self._begun.items() if name not in self._over)
        return self.now if state in going else self._exchanged.get(state, 0.0)

    def _is_current(self, one: Trainer, round: int) -> bool:
        assert isinstance(one.machine, Matchmaking)
        believed = one.machine.context.membership.believed_round(self.now)
        return believed is None or believed <= round


def fault(world: FederatedWorld, names: list[str], draw: Random) -> None:
    """One fault, drawn at random; more than a quorum of peers that may train stays alive."""
    name, kind = draw.choice(names[1:]), draw.random()
    peer = world.peers[name]
    alive = sum(not one.dead and world.may_train(one.name) for one in world.peers.values())
    alive += not world.may_train(name)
    if peer.dead:
        again = world.add(name)
        assert isinstance(again, Trainer)
        again.begun = True
    elif kind < 0.3 and alive > world.strategy.quorum + 1:
        world.kill(name, draw.choice([0.0, 0.5, None]))
    elif kind < 0.6:
        peer.resume() if peer.stopped else peer.stop()
    elif kind < 0.8:
        world.sever(*draw.sample(names, 2))
    else:
        peer.blind_to = set(draw.sample(names, len(names) // 3)) - {name}


def draw_roles(names: list[str], draw: Random) -> dict[str, tuple[tuple[str, ...], bool]]:
    """The tags of each peer, and whether it only observes, drawn at random; at least two train and have all tags."""
    others = draw.choice([0.0, 0.3])
    all_tags: tuple[tuple[str, ...], bool] = ("gpu",), False
    roles = dict.fromkeys(names[:2], all_tags)
    for name in names[2:]:
        roles[name] = (() if draw.random() < others else ("gpu",), draw.random() < others)
    return roles


def storm(seed: int) -> FederatedWorld:
    """A run with faults drawn by a seed; then calm, in which all peers must come to further states together.

    Every fourth run has a large model, whose exchange takes up to a minute.

    Raises:
        Violation: A promise was broken.
    """
    draw = Random(seed)
    count = draw.randint(3, 9)
    names = [f"peer{index:02}" for index in range(count)]
    roles = draw_roles(names, draw)
    tags = draw.choice([(), ("gpu",)])
    fit = sum(not observes and set(tags) <= set(own) for own, observes in roles.values())
    quorum = draw.randint(2, max(2, fit // 2))
    strategy = Federated(
        fraction=draw.choice([0.3, 0.5, 1.0]),
        minimum=quorum,
        available=fit,
        quorum=quorum,
        grace=draw.choice([0.0, 2.0, 10.0, 60.0]),
        deadline=draw.choice([30.0, 120.0]),
        late=draw.choice(["drop", "next"]),
        tags=tags,
    )
    times = draw.choice([Times(0.001, 0.5, 5.0), Times(0.5, 5.0, 20.0), Times(0.001, 10.0, 200.0)])
    weather = Weather(
        latency=draw.choice([(0.0005, 0.002), (0.02, 0.2)]),
        directory=draw.choice([(0.01, 0.05), (0.5, 3.0)]),
        exchange=(10.0, 60.0) if seed % 4 == 3 else (0.5, 1.5),
        loss=draw.choice([0.0, 0.0, 0.01]),
    )
    world = FederatedWorld(names, strategy, times, seed=seed, weather=weather, roles=roles)
    if not world.run(60.0, until=lambda: all(one.begun for one in world.trainers)):
        raise Violation("not all peers begin")
    for _ in range(draw.randint(0, 10)):
        world.run(draw.choice([0.1, 1.0, 5.0, 20.0]) * draw.random())
        fault(world, names, draw)
    world.weather = Weather(weather.latency, weather.directory, weather.exchange)
    for peer in world.peers.values():
        peer.blind_to = set()
        if peer.stopped:
            peer.resume()
    reach = world.head.epoch + 2
    bound = 3 * (strategy.deadline + strategy.grace + times.most + weather.exchange[1]) + 120.0
    if not world.run(bound, until=lambda: all(one.state.epoch >= reach for one in world.trainers)):
        states = {
            one.name: (one.state.epoch, one.machine.round, one.machine.reason) for one in world.trainers
        }
        raise Violation(f"no two rounds within {bound:.0f} s of calm: {states}")
    return world
