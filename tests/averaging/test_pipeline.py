"""Peers of a pipeline through their machines, in virtual time: what is counted, by whom, and what deaths cost."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest

from equipoise.averaging import pipeline
from equipoise.averaging.pipeline import Stage

LATENCY, LOOK, NOTICE, ROUND = 0.002, 0.1, 0.5, 0.05
"""Seconds: of a message, between looks at the members, until a death shows in them, and of a round."""


class Peer:
    """A script with its machine: it computes one pass after another, and gives what it has counted to rounds."""

    def __init__(self, world: World, name: str, at: int) -> None:
        self.world, self.name, self.alive = world, name, True
        self.stage = Stage(name, at, world.stages, world.chance.randrange(2**32), world.back_first)
        self.held: set[pipeline.Mark] = set()
        self.gradients: Counter[str] = Counter()
        self.updates, self.busy = 0, 0.0
        self.computing = False
        self.most_away = 0
        self.losses: list[float] = []
        self.ready = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return (3,) * self.world.batches

    def tell(self, event: pipeline.Event) -> None:
        if not self.alive:
            return
        for action in self.stage.handle(event, self.world.now):
            self.perform(action, event)
        if not self.computing and self.alive and (job := self.stage.job) is not None:
            self.compute(job)

    def perform(self, action: pipeline.Action, event: pipeline.Event) -> None:
        world = self.world
        match action:
            case pipeline.Send(peer, note, mark):
                world.traffic += 1
                if mark is not None:
                    assert mark in self.held, "only what is held is sent"
                if world.chance.random() < world.refusals:
                    world.at(LATENCY, self.tell, pipeline.Failed(action))
                else:
                    world.carry(self.name, peer, pipeline.Heard(self.name, note, mark is not None))
            case pipeline.Keep(mark):
                assert isinstance(event, pipeline.Heard)
                assert event.whole
                self.held.add(mark)
            case pipeline.Forget(mark):
                self.held.discard(mark)
            case pipeline.Drop():
                self.gradients.clear()
                world.drops += 1
            case pipeline.Finish(loss, told):
                self.updates += 1
                self.losses.append(loss)
                world.told += [told] if told else []
                if self.updates < world.goal:
                    world.at(world.chance.random() * world.jitter, self.begin)
            case pipeline.Fail(reason):
                world.failed.append(reason)
                self.alive = False

    def begin(self) -> None:
        epoch = self.world.epochs[self.stage.at]
        if self.alive:
            if self.stage.at == 0:
                self.held |= {(epoch, f"{self.name}/{index}") for index in range(self.world.batches)}
            self.tell(pipeline.Began(epoch, self.sizes))

    def compute(self, job: pipeline.Job) -> None:
        assert job.mark in self.held
        self.computing = True
        took = self.world.seconds[job.forward] * self.world.slow.get(self.name, 1.0)
        self.busy += took
        self.world.at(took, self.computed, job)

    def computed(self, job: pipeline.Job) -> None:
        self.computing = False
        if not self.alive:
            return
        if job.mark in self.stage._items:
            if not job.forward:
                self.gradients[job.mark[1]] += 1
            self.tell(pipeline.Computed(job, 0.5))
        elif (other := self.stage.job) is not None:
            self.compute(other)
        self.most_away = max(self.most_away, sum(one.phase == "away" for one in self.stage._items.values()))


class World:
    """Peers of some stages; messages keep their order between two peers."""

    def __init__(
        self, seed: int, replicas: tuple[int, ...], goal: int, batches: int = 4, back_first: bool = False
    ) -> None:
        self.chance, self.now, self.goal, self.batches = Random(seed), 0.0, goal, batches
        self.stages, self.back_first = len(replicas), back_first
        self.queue: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.seconds = {True: 0.01, False: 0.02}
        self.slow: dict[str, float] = {}
        self.jitter = self.refusals = 0.0
        self.epochs = [0] * self.stages
        self.closed: list[list[frozenset[str]]] = [[] for _ in replicas]
        self.peers: dict[str, Peer] = {}
        self.failed: list[str] = []
        self.told: list[str] = []
        self.drops = self.traffic = self.made = 0
        self.rounds: defaultdict[int, float] = defaultdict(float)
        self.arrives: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.seen: dict[str, float] = {}
        for at, number in enumerate(replicas):
            for _ in range(number):
                self.start(at)
        self.at(0.0, self.look)

    def start(self, at: int, epoch: int = 0) -> Peer:
        self.made += 1
        name = f"{self.chance.randrange(10**6):06}-{self.made}"
        peer = self.peers[name] = Peer(self, name, at)
        peer.updates = epoch
        self.at(2 * LOOK + self.chance.random() * LOOK, peer.begin)
        return peer

    def at(self, seconds: float, call: Any, *args: Any) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), call, args))

    def carry(self, sender: str, to: str, event: pipeline.Heard) -> None:
        arrives = max(self.now + LATENCY * (1 + self.chance.random()), self.arrives[sender, to])
        self.arrives[sender, to] = arrives
        self.at(arrives - self.now, lambda: self.peers[to].tell(event))

    def live(self, at: int | None = None) -> list[Peer]:
        return [one for one in self.peers.values() if one.alive and at in (None, one.stage.at)]

    def kill(self, peer: Peer) -> None:
        peer.alive = False
        self.seen[peer.name] = self.now + NOTICE

    def look(self) -> None:
        shown = {name for name, one in self.peers.items() if one.alive or self.seen.get(name, 0) > self.now}
        for peer in self.live():
            peer.tell(pipeline.Looked(frozenset(shown - {peer.name})))
        self.at(LOOK, self.look)

    def meet(self) -> None:
        """Make the rounds that are due: all live peers of a stage offer shares that sum to 1."""
        for at in range(self.stages):
            shares = {one.name: one.stage.update.share for one in self.live(at)}
            given = [share for share in shares.values() if share is not None]
            whole = len(given) == len(shares) and given and abs(sum(given) - 1) < 1e-6
            if not whole:
                self.rounds.pop(at, None)
            elif at not in self.rounds:
                self.rounds[at] = self.now + ROUND
                self.at(ROUND, lambda: None)
            elif self.now >= self.rounds[at]:
                del self.rounds[at]
                self.update(at)

    def update(self, at: int) -> None:
        peers, counted = self.live(at), Counter[str]()
        for one in peers:
            counted += one.gradients
            one.gradients.clear()
        assert set(counted.values()) <= {1}, "each is counted once"
        self.closed[at].append(frozenset(counted))
        self.epochs[at] += 1
        if at and not self.told and not any(one.stage.update.told for one in peers):
            assert self.closed[at][-1] == self.closed[at - 1][self.epochs[at] - 1], "and in all stages"
        for one in peers:
            one.tell(pipeline.Updated(self.epochs[at]))

    def run(self, until: float = 1000.0) -> None:
        while self.queue and self.now < until and min(self.epochs) < self.goal and not self.failed:
            self.now, _, call, args = heapq.heappop(self.queue)
            call(*args)
            self.meet()


@pytest.mark.parametrize("back_first", [False, True], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [(1, 1), (1, 2, 1, 2), (2, 1, 3), (1, 1, 1, 1)], ids=str)
def test_each_update_counts_each_micro_batch_once_in_each_stage(
    replicas: tuple[int, ...], back_first: bool
) -> None:
    world = World(1, replicas, goal=5, back_first=back_first)
    world.run()
    assert world.epochs == [5] * len(replicas)
    assert {len(one) for stage in world.closed for one in stage} == {4 * replicas[0]}
    assert (world.drops, world.told, world.failed) == (0, [], [])
    for peer in world.live():
        assert len(peer.held) <= 8 * replicas[0], "and nothing is held for ever"
        assert {loss for loss in peer.losses if loss == loss} == {0.5}


def deaths(seed: int, replicas: tuple[int, ...] = (2, 2, 2), every: float = 1.0, goal: int = 12) -> World:
    """A peer of a stage with several is killed again and again, and another one starts in its place."""
    world = World(seed, replicas, goal, back_first=seed % 2 == 1)
    world.jitter, world.refusals = 0.01 * (seed % 3), 0.02 * (seed % 5 == 0)

    def strike() -> None:
        able = [one for one in world.live() if len(world.live(one.stage.at)) > 1]
        if able:
            victim = world.chance.choice(able)
            world.kill(victim)
            world.at(NOTICE + 0.3, newcomer, victim.stage.at)
        world.at(every * (0.5 + world.chance.random()), strike)

    def newcomer(at: int) -> None:
        world.start(at, world.epochs[at])

    world.at(0.5, strike)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(10))
def test_no_micro_batch_is_lost_or_counted_twice_while_peers_die(seed: int) -> None:
    world = deaths(seed, every=2.0)
    assert min(world.epochs) == 12, world.failed
    assert not world.told


@pytest.mark.parametrize("replicas", [(2, 2, 2), (1, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_two_deaths_in_one_update_have_lost_is_told(
    seed: int, replicas: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "LOST_SECONDS", 5.0)
    world = deaths(seed, replicas, every=1.0)
    assert min(world.epochs) == 12, world.failed
    assert all("micro-batches are lost" in told for told in world.told)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_storms_of_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LOST_SECONDS", 5.0)
    told, drops = Counter[float](), Counter[float]()
    for every, seed in itertools.product((4.0, 2.0, 1.0), range(100)):
        for replicas in ((2, 2, 2), (1, 2, 1, 2)):
            world = deaths(seed, replicas, every)
            assert min(world.epochs) == 12, (seed, every, replicas, world.failed)
            told[every] += len(world.told) > 0
            drops[every] += world.drops
    print(
        f"of 200 trainings each, by seconds between deaths: {told} lost some, {drops} lives ended by others"
    )
    assert told[4.0] == 0


def test_a_stage_whose_only_peer_dies_is_named() -> None:
    world = World(1, (1, 1, 1), goal=1000)
    world.at(1.0, lambda: world.kill(world.live(1)[0]))
    world.run(until=200.0)
    assert world.failed == ["no peer holds stage 1"] * 2


@pytest.mark.parametrize("batches", [1, 4, 8])
@pytest.mark.parametrize("back_first", [False, True], ids=["gpipe", "1f1b"])
def test_the_bubble_shrinks_as_the_schedule_says(
    batches: int, back_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LATENCY", "ROUND"):
        monkeypatch.setattr(sys.modules[__name__], name, 1e-6)
    stages, goal = 4, 10
    world = World(1, (1,) * stages, goal, batches, back_first)
    world.run()
    world.now, busy = 0.0, [one.busy for one in world.live()]
    world.goal = 2 * goal
    began = max(at for at, *_ in world.queue)
    for one in world.live():
        world.at(began, one.begin)
    world.run()
    took = world.now - began
    shares = [(one.busy - before) / took for one, before in zip(world.live(), busy, strict=True)]
    assert shares == pytest.approx([batches / (batches + stages - 1)] * stages, rel=0.02)
    most = [one.most_away for one in world.live()]
    assert most == (
        [min(batches, stages - at) for at in range(3)] + [0] if back_first else [batches] * 3 + [0]
    )


def test_the_faster_replica_gets_more() -> None:
    world = World(3, (1, 2), goal=10, batches=12)
    slow, fast = world.live(1)
    world.slow[slow.name] = 4.0
    world.run()
    assert slow.busy / 4 < 0.5 * fast.busy


def test_peers_without_a_stage_take_those_of_the_least_throughput() -> None:
    held = pipeline.throughputs({"b": pipeline.Stand(-1, 1), "c": pipeline.Stand(0, 1)}, 3)
    assert held == [1.0, 0.0, 0.0, 1.0]
    assert [pipeline.vacancy(held, rank) for rank in range(4)] == [1, 2, 0, 1]
    slow = {
        name: pipeline.Stand(at, 1, speed=speed)
        for name, at, speed in (("b", 0, 2.0), ("c", 1, 9.0), ("e", 0, 3.0), ("f", 1, 0.0))
    }
    held = pipeline.throughputs(slow, 2)
    assert held == pytest.approx([5.0, 9.0 + 14 / 3, 14 / 3])
    assert [pipeline.vacancy(held, rank) for rank in range(3)] == [0, 0, 1]
