"""Strangers with another state: those who have trained together keep theirs, whatever the strangers' number."""

from __future__ import annotations

import pytest

from equipoise.averaging.counts import count
from equipoise.averaging.replication.snapshot_quorum import SnapshotQuorum
from equipoise.averaging.state import StateId
from fakes.trainers import SAMPLES, Trainer, assert_alike
from fakes.world import World
from oracles.training import network

OURS, THEIRS = StateId(7, "a" * 64), StateId(2**40, "b" * 64)


class Stranger(Trainer):
    """It comes with a state of its own, of any epoch, that nobody else has heard of."""

    def join(self) -> None:
        self.model = network(seed=7)
        super().join()
        self.opt.load(self.opt.member._state.image(THEIRS))


@pytest.mark.parametrize("strangers", [4, 20])
def test_newcomers_with_another_state_do_not_replace_that_of_three_who_have_trained(
    world: World, strangers: int
) -> None:
    world.options["group_size"] = 64
    ours = [Trainer(world, index, 30, target_batch_size=3 * SAMPLES).begin() for index in range(3)]
    for index in range(3, 3 + strangers):
        stranger = Stranger(world, index, THEIRS.epoch + 5, target_batch_size=3 * SAMPLES)
        stranger.begin(at=5.0)
    world.run()
    assert_alike(ours)
    assert all(trainer.opt.epoch == 30 for trainer in ours)
    steps = [epoch for epoch, _ in ours[0].seen]
    assert len(steps) <= 30 / 0.8, "at least 80 % of the steps are updates"
    told = [reason for _, reason in ours[0].seen if "keeps its own state" in reason]
    assert told[0] == (
        f"this peer keeps its own state: epoch {THEIRS.epoch} (bbbbbbbb) is that of "
        f"{count(strangers, 'other peer')}, with none of which it has trained; "
        'pass trust="heads" to follow the majority'
    )


def test_where_heads_are_trusted_most_are_followed(world: World) -> None:
    options = {"target_batch_size": 3 * SAMPLES, "trust": "heads"}
    ours = [Trainer(world, index, THEIRS.epoch + 5, **options).begin() for index in range(3)]
    strangers = [Stranger(world, index, THEIRS.epoch + 5, **options).begin(at=5.0) for index in range(3, 7)]
    world.run()
    assert_alike([*ours, *strangers])


def test_a_peer_that_was_cut_off_among_strangers_gets_the_state_of_those_it_knows(world: World) -> None:
    """It comes back when the means are forgotten, so it needs a snapshot, and most offer that of the strangers."""
    ours = [Trainer(world, index, 50, target_batch_size=3 * SAMPLES).begin() for index in range(3)]
    for index in range(3, 7):
        Stranger(world, index, THEIRS.epoch + 60, target_batch_size=3 * SAMPLES).begin(at=2.0)

    def cut() -> None:
        world.compute(4.0)
        world.net.cut("peer2")
        world.compute(7.0)
        world.net.cuts.clear()

    world.peer("weather", cut)
    world.run()
    assert any("caught up with the group" in reason for _, reason in ours[2].seen)
    assert_alike(ours)


def test_a_snapshot_is_asked_of_those_it_knows_while_one_is_there() -> None:
    poll = SnapshotQuorum(3, among=frozenset("bc"))
    assert poll.see(("b", "m", "n"), 0.0) == ["b"]
    assert sorted(poll.see(("m", "n"), 1.0)) == ["m", "n"]
    assert poll.see(("c", "m", "n"), 2.0) == ["c"]
    poll.bar("c", "sent a wrong byte")
    assert sorted(poll.see(("c", "m", "n"), 3.0)) == ["m", "n"]
