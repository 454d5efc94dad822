"""Strangers that have taken part in a round, and then lie about the round that they are in."""

from __future__ import annotations

import pytest

from equipoise.averaging.manifest import MAX_ROUND
from simulator.matchmaking import Record, World

SECONDS = 120.0


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
def test_what_most_mates_lie_stops_nobody(honest: int, liars: int, ahead: int | None, slow: bool) -> None:
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
