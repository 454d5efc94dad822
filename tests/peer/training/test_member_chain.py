"""Peers that were believed, and claim another state: a peer leaves its state only along means that most have signed."""

from __future__ import annotations

import pytest

from equipoise.averaging.state import StateId
from fakes.trainers import SAMPLES, Trainer, assert_alike
from fakes.world import World

THEIRS = StateId(2**40, "b" * 64)


class Sleeper(Trainer):
    """It trains as the others for so many epochs, then loads another state of a higher epoch, and goes on."""

    honest = 2

    def train(self) -> None:
        self.epochs, end = self.honest, self.swarm.now + 40.0
        super().train()
        state = self.opt.member._state
        for one in self.named().values():
            one.fill_(666.0)
        self.opt.load(state.image(THEIRS))
        while self.swarm.now < end:
            self.swarm.compute(self.seconds)
            self.opt.zero_grad()
            self.backward()
            self.opt.step()


@pytest.mark.parametrize(
    ("sleepers", "honest", "rounds"),
    [
        (1, 1, 1),
        (4, 3, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 1, 10), (4, 3, 10), (20, 3, 2), (20, 3, 10))
        ),
    ],
)
def test_sleepers_never_replace_what_others_have_trained(
    world: World, sleepers: int, honest: int, rounds: int
) -> None:
    world.options["group_size"] = 64
    target = {"target_batch_size": honest * SAMPLES}
    ours = [Trainer(world, index, 40, **target).begin() for index in range(honest)]
    for index in range(honest, honest + sleepers):
        sleeper = Sleeper(world, index, 0, **target)
        sleeper.honest = 5 + rounds
        sleeper.begin(at=2.0)
    world.run()
    assert all(trainer.opt.epoch == 40 for trainer in ours)
    assert all(float(one.abs().max()) < 100 for trainer in ours for one in trainer.named().values())
    assert_alike(ours)
    assert len(ours[0].seen) <= 40 / 0.8, "at least 80 % of the steps are updates"


@pytest.mark.parametrize("seconds", [40.0, pytest.param(600.0, marks=pytest.mark.slow)])
def test_two_that_were_cut_from_three_come_back_to_them(world: World, seconds: float) -> None:
    """The two go on by themselves meanwhile, and make more updates than the three."""
    trainers = [Trainer(world, index, 10_000, seconds=1.0 - 0.1 * (index > 2)) for index in range(5)]
    for trainer in trainers:
        trainer.begin()
    healed: list[float] = []

    def weather() -> None:
        world.compute(20.0)
        world.net.cut("peer3", "peer4")
        world.compute(seconds)
        world.net.cuts.clear()
        assert trainers[4].opt.epoch > trainers[0].opt.epoch
        while len(trainers[0].last.group) < 5:
            world.compute(0.1)
        begun = world.now
        while len({trainer.opt.id for trainer in trainers}) > 1 and world.now < begun + 60.0:
            world.compute(0.1)
        healed.append(world.now - begun)
        for trainer in trainers:
            trainer.epochs = trainers[0].opt.epoch + 10

    world.peer("weather", weather)
    world.run()
    assert healed[0] <= 30.0
    assert_alike(trainers)
    for trainer in trainers:
        told = [reason for _, reason in trainer.seen if "left with less than half of its group at" in reason]
        assert bool(told) == (trainer.index > 2)
