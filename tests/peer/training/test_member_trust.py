"""Strangers with another state: those who have trained together keep theirs, whatever the strangers' number."""

from __future__ import annotations

import pytest

from equipoise.averaging.counts import count
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


@pytest.mark.parametrize("strangers", [4, pytest.param(20, marks=pytest.mark.slow)])
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
    for outcome in {one.digest: one for _, _, one in world.outcomes if one.ok}.values():
        assert len({outcome.states[name] for name in outcome.givers}) <= 1, "each mean is over one state"
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


class Stubborn(Stranger):
    """It keeps its state whatever the others claim, until `awaited` has ended."""

    awaited: Honest

    def join(self) -> None:
        super().join()
        self.opt.member._follower.known.group = lambda *_: self.opt.id  # type: ignore[method-assign]

    def backward(self) -> None:
        super().backward()
        self.epochs = 0 if self.awaited.ended else THEIRS.epoch * 2


class Honest(Trainer):
    ended = False

    def train(self) -> None:
        self.held: dict[int, str] = {}
        super().train()
        self.ended = True

    def backward(self) -> None:
        super().backward()
        self.held[self.opt.epoch] = self.opt.id.lineage


@pytest.mark.parametrize(
    ("honest", "strangers"),
    [(1, 4), *(pytest.param(*fewer, marks=pytest.mark.slow) for fewer in ((1, 1), (3, 4)))],
)
def test_a_newcomer_takes_the_state_of_the_peer_that_its_user_named(
    world: World, honest: int, strangers: int
) -> None:
    world.options["group_size"], world.named = 64, frozenset({"peer0"})
    options = {"target_batch_size": 3 * SAMPLES}
    ours = [Honest(world, index, 60, **options) for index in range(1 + honest)]
    newcomer = Honest(world, 5, 30, **options)
    for trainer in ours:
        trainer.begin()
    for index in range(strangers):
        stranger = Stubborn(world, 10 + index, THEIRS.epoch * 2, **options)
        stranger.awaited = newcomer
        stranger.begin(at=3.0)
    newcomer.begin(at=6.0)
    world.run()
    assert max(newcomer.held) < THEIRS.epoch
    assert newcomer.opt.id.lineage == ours[0].held[newcomer.opt.epoch]
    alike = newcomer.held.items() & ours[0].held.items()
    assert len(alike) >= 0.7 * len(newcomer.held) >= 3, "alone among strangers, it makes a step of its own"


class Watched(Trainer):
    """It notes when it held which state."""

    def train(self) -> None:
        self.held: list[tuple[float, StateId]] = []
        super().train()

    def backward(self) -> None:
        super().backward()
        self.held.append((self.swarm.now, self.opt.id))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [100.0, 600.0])
def test_the_smaller_part_of_a_swarm_that_was_cut_in_two_comes_back(world: World, seconds: float) -> None:
    """Far more means are made meanwhile than daemons keep; both parts go on, each by means of several."""
    ours = [Watched(world, index, int(2 * seconds) + 80, target_batch_size=2 * SAMPLES) for index in range(5)]

    def cut() -> None:
        world.compute(4.0)
        world.net.cut("peer3", "peer4")
        world.compute(seconds)
        world.net.cuts.clear()

    for trainer in ours:
        trainer.begin()
    world.peer("weather", cut)
    world.run()
    assert_alike(ours)
    most = {state for _, state in ours[0].held}
    for one in ours[3:]:
        assert any(state not in most for _, state in one.held), "both parts went on"
        back = next(at for at, state in one.held if at >= 4.0 + seconds and state in most)
        assert back <= 4.0 + seconds + 30.0
        assert any("behind: it holds epoch" in reason for _, reason in one.seen)
    assert not any("behind" in reason for one in ours[:3] for _, reason in one.seen)


def test_a_survivor_beside_strangers_makes_its_steps_alone(world: World) -> None:
    world.options["group_size"] = 64
    survivor = Honest(world, 0, 40, target_batch_size=2 * SAMPLES, patience=1000.0)
    survivor.begin()
    Trainer(world, 1, 10, target_batch_size=2 * SAMPLES).begin()
    for index in range(3):
        stranger = Stubborn(world, 10 + index, THEIRS.epoch * 2, target_batch_size=2 * SAMPLES)
        stranger.awaited = survivor
        stranger.begin(at=2.0)
    world.run()
    assert survivor.opt.epoch == 40
    assert len(survivor.seen) <= 40 / 0.8, "at least 80 % of the steps are updates"
    assert any("keeps its own state" in reason for _, reason in survivor.seen)
