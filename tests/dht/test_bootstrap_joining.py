"""Ways into the swarm are tried again and again, ever more rarely, and few lines say so: in virtual time."""

from __future__ import annotations

import itertools
import random

import pytest

from equipoise.dht.bootstrap import MAX_RETRY_SECONDS, Joining, Way
from equipoise.dht.state import AddressState

ENTRY = Way("entry", "/ip4/192.0.2.7/tcp/31337/p2p/entry")
SECONDS = 0.1
"""What an attempt takes."""


class World:
    """Runs a machine in virtual time; what is at the end of a way is up to the test."""

    def __init__(self, *given: Way, seed: int = 0) -> None:
        self.now = 1000.0
        self.machine = Joining(given, random.Random(seed), self.now)
        self.failures: dict[str, tuple[AddressState, str]] = {}
        self.remembered: tuple[str, ...] = ()
        self.alive: set[str] = set()
        self.tried: list[tuple[float, Way]] = []
        self.lines = [self.machine.why_alone()]

    def run(self, seconds: float, until_met: bool = False) -> None:
        end = self.now + seconds
        while self.now < end and not (until_met and self.alive):
            for way in self.machine.look(frozenset(self.alive), self.remembered, self.now):
                self._attempt(way)
            # As the driver: it looks once a second, and whenever an attempt is due.
            self.now = min(end, max(self.now + 0.001, min(self.now + 1.0, self.machine.deadline)))

    def _attempt(self, way: Way) -> None:
        self.tried.append((self.now, way))
        state, reason = self.failures.get(way.peer, ("connected", "connected"))
        self.now += SECONDS
        if state == "connected":
            self.alive.add(way.peer)
        self.machine.ended(way, state, reason, self.now)
        if self.lines[-1] != self.machine.why_alone():
            self.lines.append(self.machine.why_alone())

    def tries_after(self, moment: float) -> int:
        return sum(when > moment for when, _ in self.tried)


@pytest.mark.parametrize("seed", range(20))
def test_an_entry_peer_that_is_down_for_an_hour(seed: int) -> None:
    world = World(ENTRY, seed=seed)
    world.remembered = (ENTRY.peer,)
    world.failures[ENTRY.peer] = "refused", "nobody listens at 192.0.2.7 port 31337 (connection refused)"
    began = world.now
    world.run(3600.0)
    attempts = world.tries_after(began + 60.0)
    print(f"{len(world.tried)} attempts, {attempts} after the first minute, {len(world.lines)} lines")
    assert 55 <= attempts <= 100
    assert len(world.lines) <= 5
    del world.failures[ENTRY.peer]
    back = world.now
    world.run(120.0, until_met=True)
    assert world.now - back <= 65.0


def test_pauses_grow_to_their_maximum_and_differ_from_daemon_to_daemon() -> None:
    worlds = [World(ENTRY, seed=seed) for seed in range(2)]
    pauses = []
    for world in worlds:
        world.failures[ENTRY.peer] = "timeout", "nobody answers"
        world.run(600.0)
        moments = [when for when, _ in world.tried]
        pauses.append([later - one for one, later in itertools.pairwise(moments)])
    assert pauses[0] != pauses[1]
    for row in pauses:
        assert row[0] < 0.5
        assert 0.75 * MAX_RETRY_SECONDS <= max(row) <= MAX_RETRY_SECONDS + 1.0


def test_the_next_attempt_is_said() -> None:
    world = World(ENTRY)
    world.failures[ENTRY.peer] = "timeout", "nobody answers"
    world.run(300.0)
    [row] = world.machine.status(world.now)
    assert (row.state, row.reason, row.attempts) == ("timeout", "nobody answers", len(world.tried))
    assert row.next_attempt is not None
    assert row.next_attempt == pytest.approx(world.machine.deadline - world.now)
    assert 0 < row.next_attempt <= MAX_RETRY_SECONDS


def test_the_next_attempt_at_a_peer_met_before_is_said_while_alone() -> None:
    world = World(ENTRY)
    world.remembered = ("met", ENTRY.peer)
    world.failures = {ENTRY.peer: ("refused", "nobody listens"), "met": ("timeout", "nobody answers")}
    world.run(300.0)
    [row] = world.machine.returning(world.now)
    assert (row.address, row.state, row.reason) == ("met", "timeout", "nobody answers")
    assert row.attempts == sum(way.peer == "met" for _, way in world.tried)
    assert row.next_attempt is not None
    assert 0 < row.next_attempt <= MAX_RETRY_SECONDS
    world.alive = {"another"}
    world.run(2.0)
    assert world.machine.returning(world.now) == (), "nobody tries them in company"


def test_a_lost_entry_peer_is_tried_at_once_though_others_are_there() -> None:
    world = World(ENTRY)
    world.run(5.0)
    world.alive = {"another"}
    world.failures[ENTRY.peer] = "refused", "nobody listens"
    lost = world.now
    world.run(2.0)
    assert world.tries_after(lost - 0.001) >= 2
    assert world.tried[1][0] == lost
    assert world.machine.status(world.now)[0].state == "refused"


def test_peers_met_before_are_tried_only_while_alone() -> None:
    world = World()
    world.remembered = ("b", "a")
    world.failures = {"a": ("refused", "nobody listens at a"), "b": ("timeout", "nobody answers at b")}
    world.run(10.0)
    assert {way.peer for _, way in world.tried} == {"a", "b"}
    assert world.machine.why_alone() == (
        False,
        "no peer met before is there: nobody answers at b; trying again",
    )
    world.alive = {"c"}
    world.run(1.0)
    before = len(world.tried)
    world.run(600.0)
    assert len(world.tried) == before
    world.alive.clear()
    world.run(1.0)
    assert len(world.tried) > before


def test_another_network_makes_old_failures_void() -> None:
    world = World(ENTRY)
    world.failures[ENTRY.peer] = "no network", "no network route"
    world.run(600.0)
    assert world.machine.why_alone() == (True, "no network route; trying again")
    del world.failures[ENTRY.peer]
    world.machine.network_changed(world.now)
    changed = world.now
    world.run(60.0, until_met=True)
    assert world.tried[-1][0] == changed
    assert world.alive == {ENTRY.peer}


def test_a_peer_without_an_address_to_try_says_so() -> None:
    world = World()
    world.run(60.0)
    assert world.tried == []
    assert world.machine.deadline == float("inf")
    assert world.machine.why_alone()[1].startswith("no other peer has joined yet")
