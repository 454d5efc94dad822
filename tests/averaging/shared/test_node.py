"""Peers with shared tables in virtual time: messages are lost and late, peers die and begin anew, views split."""

from __future__ import annotations

import heapq
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from equipoise.averaging.shared.keeper import Send
from equipoise.averaging.shared.messages import SHARDS, Answer, Ask, Clock, Entered, Has, Item
from equipoise.averaging.shared.node import RETRY_SECONDS, SLOW_CLOCKS, Done, Node
from equipoise.averaging.shared.rows import OPTIMIZERS, RowStore, packed, unpacked
from equipoise.averaging.shared.view import View
from equipoise.averaging.strategy import SharedTables, parse_strategy

Id = tuple[str, int, int]
"""A push at one shard: its worker, its sequence, the shard."""


class Ledger(RowStore):
    """A shard that remembers which pushes it has counted."""

    def __init__(self, world: World) -> None:
        self.world, self.pushes = world, list[Id]()

    def apply(self, push: Mapping[str, Any]) -> None:
        assert not self.world.is_whole or self.world.slowest - push["base"] <= self.world.strategy.staleness
        self.pushes.append(push["id"])

    def read(self, pull: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"pushes": len(self.pushes)}

    def dump(self) -> Mapping[str, Any]:
        return {"pushes": list(self.pushes)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.pushes = list(state["pushes"])


class Peer:
    """A script that pulls, works, pushes and ends its clock, again and again."""

    def __init__(self, world: World, name: str, script: str, work: float) -> None:
        self.world, self.name, self.script, self.work = world, name, script, work
        self.ledgers: dict[int, Ledger] = {}
        self.node = Node(name, world.strategy, self.ledger)
        self.number = self.made = self.base = 0
        self.pushed: dict[int, list[int]] = {}
        self.seen: defaultdict[int, int] = defaultdict(int)
        self.failed: list[str] = []
        self.waking = -1.0

    def ledger(self, shard: int) -> Ledger:
        self.ledgers[shard] = Ledger(self.world)
        return self.ledgers[shard]

    def start(self) -> None:
        self.number += 1
        shards = self.world.chance.sample(range(SHARDS), 3)
        self.do(self.node.pull(self.number, {shard: {} for shard in shards}, self.world.now))

    def finish(self) -> None:
        self.number, self.made = self.number + 1, self.made + 1
        shards = self.world.chance.sample(range(SHARDS), 2)
        parts = {shard: {"id": (self.script, self.number, shard), "base": self.node.base} for shard in shards}
        self.pushed[self.number] = shards
        self.world.made.update((self.script, self.number, shard) for shard in shards)
        self.do(self.node.push(self.number, parts, self.world.now))
        self.do(self.node.tick())
        self.world.ticked(self)
        if self.made < self.world.pushes:
            self.start()

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Send(to, item, payload) if to == self.name:
                    self.do(self.node.got(to, self.script, self.node.views.view.name, item, payload))
                case Send():
                    self.world.send(self, action)
                case str(text):
                    self.world.notes.append(text)
                case Done(number, got, reason, lost) if number in self.pushed:
                    for shard in self.pushed.pop(number):
                        self.world.ended[self.script, number, shard] = "lost" if lost else reason or "counted"
                case Done(_, got, reason, _):
                    if reason:
                        self.failed.append(reason)
                        self.start()
                        continue
                    for shard, payload in got.items():
                        assert payload["pushes"] >= self.seen[shard] or shard in self.world.lost, (
                            "a version went back"
                        )
                        self.seen[shard] = payload["pushes"]
                    pace = self.work * self.world.chance.uniform(0.8, 1.2)
                    self.world.at(self.world.now + pace, self, self.finish)
        if self.waking != self.node.deadline:
            self.waking = self.node.deadline
            self.world.at(self.waking, self, self.wake)

    def wake(self) -> None:
        if self.node.deadline <= self.world.now:
            self.do(self.node.woke(self.world.now))


class World:
    """Peers, the messages between them, and rounds that name views."""

    def __init__(
        self, seed: int, peers: int, spec: str, pushes: int, loss: float = 0.0, slow: float = 1.0
    ) -> None:
        strategy = parse_strategy(spec)
        assert isinstance(strategy, SharedTables)
        self.strategy, self.chance, self.pushes, self.loss = strategy, Random(seed), pushes, loss
        self.now, self.round, self.gap, self.is_whole = 0.0, 0, 0, False
        self._order, self._queue = itertools.count(), list[Any]()
        self.made: set[Id] = set()
        self.notes: list[str] = []
        self.ended: dict[Id, str] = {}
        self.split: dict[str, int] = {}
        self.peers: dict[str, Peer] = {}
        self.everyone: list[Peer] = []
        for index in range(peers):
            self.join(f"peer{index}", slow if index == 0 else 1.0)

    def join(self, name: str, work: float = 1.0) -> Peer:
        peer = Peer(self, name, f"{name}/{len(self.everyone)}", work)
        self.peers[name] = peer
        self.everyone.append(peer)
        self.at(self.now, peer, peer.start)
        return peer

    def at(self, when: float, peer: Peer | None, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), peer, what))

    def send(self, peer: Peer, action: Send) -> None:
        for _ in range(1 + (self.chance.random() < self.loss)):  # As many are repeated as are lost.
            if self.chance.random() >= self.loss:
                _, _, fields = packed(peer.node.views.view.name, [(action.item, {})])
                view, [(item, _)] = unpacked({}, json.loads(json.dumps(fields)))
                delay = self.chance.expovariate(50.0)
                told = partial(self.deliver, peer, action.to, view, item, dict(action.payload))
                self.at(self.now + delay, peer, told)

    def deliver(self, sender: Peer, to: str, view: str, item: Item, payload: Mapping[str, Any]) -> None:
        peer = self.peers.get(to)
        if peer is None or self.split.get(sender.name, 0) != self.split.get(to, 0):
            return
        peer.do(peer.node.got(sender.name, sender.script, view, item, payload))
        if isinstance(item, Entered):
            self.check_owners()

    def ticked(self, peer: Peer) -> None:
        view = peer.node.views.view
        nodes = [self.peers[name].node for name in view.members if name in self.peers]
        if all(one.views.active and one.views.view == view for one in nodes):
            self.gap = max(self.gap, peer.node.clock - min(one.clock for one in nodes))

    @property
    def slowest(self) -> int:
        """The clock up to which all pushes of all peers are settled."""
        return min(one.node.clocks[one.name] for one in self.everyone)

    @property
    def lost(self) -> set[int]:
        """The shards of which users were told that all their holders have gone."""
        return {int(shard) for note in self.notes for shard in re.findall(r"\d+", note)}

    def hold(self, names: list[str], hear: float = 1.0) -> None:
        """A round among some peers, of which each hears the outcome with a chance."""
        self.round += 1
        view = View(self.round, tuple(sorted(names)))
        for name in names:
            if self.chance.random() < hear:
                peer = self.peers[name]
                self.at(
                    self.now + self.chance.expovariate(20.0),
                    peer,
                    lambda one=peer: one.do(one.node.enter(view)),
                )

    def run(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, peer, what = heapq.heappop(self._queue)
            if peer is None or self.peers.get(peer.name) is peer:
                what()
        self.now = max(self.now, until)

    def check_owners(self) -> None:
        """Of two scripts at most one serves a shard in a view: holders follow from members, and names from both."""
        active = {one.node.views.view for one in self.peers.values() if one.node.views.active}
        assert len({view.name for view in active}) == len(active)


def settle(world: World) -> bool:
    """Heal, hold views until one is active, and let all pushes end; False where too many have gone for ever."""
    world.split.clear()
    world.loss = 0.0
    for _ in range(5):
        world.hold(list(world.peers))
        world.run(world.now + 5 * RETRY_SECONDS)
    world.run(world.now + 3 * world.strategy.timeout)
    nodes = [one.node for one in world.peers.values()]
    stuck = [one for one in nodes if not one.views.active]
    rule, waits = (
        "go on only as more than half",
        "did not enter yet",
    )  # The rule is told to those whom it holds up.
    assert all(rule in one.told or waits in one.told for one in stuck), [one.told for one in nodes]
    assert not stuck or any(rule in one.told for one in nodes)
    assert stuck or len({one.views.view for one in nodes}) == 1
    return not stuck


def counted(world: World) -> Counter[Id]:
    """How often the owners have counted each push; copies have the same."""
    total: Counter[Id] = Counter()
    view = next(iter(world.peers.values())).node.views.view
    assert view is not None
    for shard in range(SHARDS):
        owner, *copies = view.holders(shard, world.strategy.copies)
        pushes = world.peers[owner].ledgers[shard].pushes
        assert all(world.peers[copy].ledgers[shard].pushes == pushes for copy in copies)
        total.update(pushes)
    return total


@pytest.mark.parametrize("staleness", ["0", "1", "3", "10", "inf"])
def test_no_peer_is_further_ahead_and_no_push_is_older_than_the_staleness(staleness: str) -> None:
    world = World(1, 8, f"shared:staleness={staleness},timeout=600", pushes=14, slow=4.0)
    world.hold(list(world.peers))
    world.is_whole = True  # Nobody dies, so all clocks are known.
    while len(world.ended) < 8 * 14 * 2 and world.now < 400.0:
        world.run(world.now + 5.0)
    bound = float(staleness) + 1
    assert world.gap <= bound
    assert world.gap == (
        bound if bound < 10 else world.gap
    )  # The slow one is waited for, and no earlier than that.
    assert set(world.ended.values()) == {"counted"}
    assert len(world.ended) == len(world.made) == 8 * 14 * 2
    assert counted(world) == Counter(world.made)


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 60))]
)
def test_a_push_is_counted_once_or_told_lost_through_deaths_splits_and_repetitions(seed: int) -> None:
    world = World(seed, 6, "shared:staleness=4,copies=2,timeout=60", pushes=70, loss=0.03)
    world.hold(list(world.peers))
    world.run(5.0)
    for _ in range(12):
        names = sorted(world.peers)
        happens = world.chance.choice(("dies", "splits", "round", "returns"))
        if happens == "dies" and len(names) > 4:
            del world.peers[world.chance.choice(names)]
        elif happens == "returns" and len(names) < 6:
            world.join(next(f"peer{index}" for index in range(6) if f"peer{index}" not in world.peers))
        elif happens == "splits":
            world.split = {name: world.chance.randrange(2) for name in names}
        world.run(world.now + world.chance.uniform(0.0, 2.0))
        for side in {world.split.get(name, 0) for name in world.peers}:
            there = [name for name in world.peers if world.split.get(name, 0) == side]
            world.round -= side  # Rounds of two sides may have one number.
            if any(world.peers[name].node.views.view.number for name in there) and len(there) > 1:
                world.hold(there, hear=0.9)
        world.run(world.now + world.chance.uniform(1.0, 8.0))
        if world.chance.random() < 0.5:
            world.split.clear()
            world.hold(list(world.peers), hear=0.9)
            world.run(world.now + 6.0)
    goes_on = settle(world)
    mine = {one for one in world.made if one[0] in {peer.script for peer in world.peers.values()}}
    assert mine <= set(world.ended), "a live script was told nothing"
    if not goes_on:
        return
    total = counted(world)
    assert max(total.values()) == 1
    acknowledged = {one for one, how in world.ended.items() if how == "counted"}
    lost = {
        shard
        for note in world.notes
        for shard in json.loads(re.findall(r"shards (\[.*\]) have lost", note)[0])
    }
    assert {one for one in acknowledged if one[2] not in lost} <= set(total)
    assert len(acknowledged) > len(world.made) / 2


def test_a_peer_for_which_the_others_wait_at_the_end_of_many_clocks_is_told() -> None:
    world = World(1, 3, "shared:staleness=0,timeout=600", pushes=SLOW_CLOCKS + 2, slow=4.0)
    world.hold(list(world.peers))
    world.run(100.0)
    told = [one.node.told for one in world.peers.values()]
    assert "the others waited for this peer at the end of each of" in told[0]
    assert told[1].startswith("view 1 of 3 peers, clock 10")
    assert "waited" not in told[1] + told[2]


def test_a_pull_that_waits_too_long_names_whom_it_waited_for() -> None:
    world = World(1, 2, "shared:staleness=0,timeout=5", pushes=9, slow=100.0)
    world.hold(list(world.peers))
    world.run(20.0)
    assert "a pull waited 5 s: ..peer0 is at clock 0, and this peer at 1" in world.peers["peer1"].failed
    del world.peers["peer0"]
    world.run(40.0)
    world.round += 1
    world.peers["peer1"].do(world.peers["peer1"].node.enter(View(world.round, ("peer1",))))
    world.run(60.0)
    assert any("1 of the 2 peers of view 1 are there" in told for told in world.peers["peer1"].failed)


def empty(shard: int) -> RowStore:
    """A shard without tables."""
    return RowStore({}, shard, OPTIMIZERS.parse("sgd"))


def owner(copies: int) -> tuple[Node, str, int]:
    """A peer in an active view of two, the view's name, and a shard that it owns."""
    strategy = parse_strategy(f"shared:copies={copies}")
    assert isinstance(strategy, SharedTables)
    node, view = Node("a", strategy, empty), View(1, ("a", "b"))
    node.enter(view)
    node.got("a", "", view.name, node.views.mine, {})
    node.got("b", "", view.name, Entered(first=1), {})
    node.got("b", "", view.name, Clock(0), {})
    return node, view.name, next(shard for shard in range(SHARDS) if view.holders(shard)[0] == "a")


def test_a_peer_cannot_use_up_the_numbers_of_another_ones_pushes() -> None:
    node, view, shard = owner(copies=1)
    node.got("b", "script", view, Ask(shard, 2**53, 0), {})
    node.got("a", "script", view, Ask(shard, 1, 0), {})
    (done,) = node.got("a", "script", view, Ask(shard, 1, -1), {})
    assert isinstance(done, Send)
    assert done.item == Answer(shard, 1, 2)


def test_a_peer_has_at_most_one_pull_and_one_push_that_wait_for_copies() -> None:
    node, view, shard = owner(copies=2)
    for number in range(1, 100):
        node.got("b", "script", view, Ask(shard, number, -number % 2 - 1), {})
    assert len(node._keeper._shards[shard].answers) <= 2


def test_nobody_reads_first_values_that_no_copy_has() -> None:
    node, view, shard = owner(copies=2)
    assert node.got("b", "script", view, Ask(shard, 1, -1), {}) == []
    (sent,) = node.got("b", "script", view, Has(shard, 0), {})
    assert isinstance(sent, Send)
    assert sent.item == Answer(shard, 1, 0)


def test_what_was_asked_wrongly_is_answered() -> None:
    node, view, shard = owner(copies=1)
    bad = {"ids/x": torch.tensor([0])}
    (sent,) = node.got("b", "script", view, Ask(shard, 1, 0), bad)
    assert isinstance(sent, Send)
    assert sent.item == Answer(shard, 1, 0, "expected ids and gradients of some tables, and nothing else")


def test_a_pull_that_another_one_follows_is_given_up() -> None:
    node, _, _ = owner(copies=1)
    node.pull(1, {0: {}}, 0.0)
    done = node.pull(2, {0: {}}, 0.0)[0]
    assert isinstance(done, Done)
    assert (done.number, done.reason) == (1, "another pull took its place")


def test_a_view_of_others_is_not_entered() -> None:
    strategy = parse_strategy("shared")
    assert isinstance(strategy, SharedTables)
    node = Node("a", strategy, empty)
    assert node.enter(View(2, ("b", "c"))) == []
    assert node.views.view.number == 0


def test_a_peer_that_is_outside_of_views_waits_for_its_pushes_alone() -> None:
    strategy = parse_strategy("shared:timeout=5")
    assert isinstance(strategy, SharedTables)
    node = Node("a", strategy, empty)
    node.push(1, {0: {}}, 0.0)
    node.tick()
    assert not node.is_through
    node.woke(5.0)
    assert node.is_through
