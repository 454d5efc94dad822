"""Strangers that have taken part in a round: they lie about the round that they are in, or hold another state."""

from __future__ import annotations

import pytest

from equipoise.averaging.manifest import MAX_ROUND, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.matchmaking import formed, join, machine, ready
from simulator.matchmaking import RECORD_SECONDS, RUN, Record, World

SECONDS = 120.0
OURS, NEXT, THEIRS = StateId(7, "a" * 64), StateId(8, "c" * 64), StateId(2**40, "b" * 64)
HONEST, STRANGERS = [f"honest{index}" for index in range(3)], [f"stranger{index}" for index in range(4)]


def lie(world: World, liar: str, honest: list[str], ahead: int | None) -> None:
    """Publish a record four times a second: so many rounds ahead of the others, or in the last round of all."""
    claimed = MAX_ROUND if ahead is None else max(world.peers[name].machine.round for name in honest) + ahead
    world.publish(Record(liar, ready=True, round=claimed), 0.0)
    world.peers[liar].after(0.25, lie, world, liar, honest, ahead)


@pytest.mark.parametrize("slow", [False, True], ids=["in step", "one slow"])
@pytest.mark.parametrize("ahead", [None, 1000, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("honest", "liars"),
    [(3, 3), (2, 2), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((3, 1), (2, 6)))],
)
def test_mates_that_lie_stop_no_peer(honest: int, liars: int, ahead: int | None, slow: bool) -> None:
    names = [f"honest{index}" for index in range(honest)]
    strangers = [f"liar{index}" for index in range(liars)]
    world = World([*names, *strangers], 16)
    compute = dict.fromkeys(world.peers, (0.2, 0.4))
    for name in world.peers:
        world.each_round(name, lambda name=name: world.random.uniform(*compute[name]))

    def full(since: float) -> int:
        formed = world.peers[names[0]].formed
        return sum(at > since and set(manifest.peers).issuperset(names) for at, manifest in formed)

    assert world.run(
        60.0,
        until=lambda: any(
            len(manifest.peers) == honest + liars for _, manifest in world.peers[names[0]].formed
        ),
    )
    for name in strangers:
        world.peers[name].on_idle = lambda: None
        lie(world, name, names, ahead)
    if slow:
        compute[names[0]] = 20.0, 40.0
    since = world.now
    world.run(SECONDS)
    assert full(since) >= SECONDS / (60.0 if slow else 1.0)


def two_states() -> World:
    """A world of three fast peers that hold one state, and four that hold another and take a second for a step."""
    world = World([*HONEST, *STRANGERS], 16)
    for name in HONEST:
        world.peers[name].holds = OURS
        world.each_round(name, lambda: world.random.uniform(0.1, 0.2))
    world.run(20.0)
    for name in STRANGERS:
        world.peers[name].holds = THEIRS
        world.each_round(name, lambda: world.random.uniform(1.0, 1.2))
    return world


def groups(world: World, name: str, since: float) -> list[set[str]]:
    return [set(manifest.peers) for at, manifest in world.peers[name].formed if at > since]


def test_nobody_waits_for_slow_peers_that_hold_another_state() -> None:
    world = two_states()
    before, since = len(groups(world, HONEST[0], 0.0)), world.now
    world.run(20.0)
    assert len(groups(world, HONEST[0], since)) >= 0.8 * before
    late = since + 5.0
    assert all(group == set(HONEST) for group in groups(world, HONEST[0], late))
    assert set(STRANGERS) in groups(world, STRANGERS[0], late)


def test_the_last_holder_of_its_state_meets_the_others() -> None:
    world = two_states()
    world.run(20.0)
    for name in HONEST[1:]:
        world.kill(name)
    since = world.now
    assert world.run(
        RECORD_SECONDS + 10.0,
        until=lambda: any(group.intersection(STRANGERS) for group in groups(world, HONEST[0], since)),
    )


def test_peers_that_take_over_the_others_state_are_in_their_groups_again() -> None:
    world = two_states()
    world.run(20.0)
    for name in STRANGERS:
        world.peers[name].holds = OURS
        world.each_round(name, lambda: world.random.uniform(0.1, 0.2))
        world.peers[name].tell(events.Withdrew())
        world.ready(name, weight=0.0)
    since = world.now
    everybody = {*HONEST, *STRANGERS}
    assert world.run(30.0, until=lambda: groups(world, HONEST[0], since)[-3:] == [everybody] * 3)


def test_a_member_that_is_a_round_behind_is_planned_with_and_a_stranger_is_not() -> None:
    one = machine("alice", "bob", "carol", "dave", group_size=8)
    rounds = [
        {"alice": OURS, "bob": OURS, "carol": OURS, "dave": OURS},
        {"alice": NEXT, "bob": NEXT, "carol": OURS, "dave": THEIRS},
        {"alice": NEXT, "bob": NEXT, "carol": NEXT, "dave": THEIRS},
    ]
    for number, states in enumerate(rounds):
        weights = {"dave": ATTENDANCE_LIMIT} if number == 2 else {}  # It has missed a round, and attends.
        joins = [
            join(name, number, weight=weights.get(name, 1.0), state=state) for name, state in states.items()
        ]
        manifest = Manifest.of("bob", joins)
        one.handle(ready(state=states["alice"]), 0.0)
        assert formed(one.handle(events.MessageReceived("bob", wire.GroupFormed(RUN, manifest, 0.0)), 0.0))
        one.handle(events.RoundEnded(number, ok=True), 0.0)
        if number:
            assert set(one.context.membership.group("alice", number + 1)) == {"alice", "bob", "carol"}
    one.handle(ready(weight=0.0), 0.0)
    assert set(one.context.membership.group("alice", 3)) == {"alice", "bob", "carol", "dave"}
