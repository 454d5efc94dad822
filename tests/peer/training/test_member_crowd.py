"""More peers than a group has places: one state, always; those without a place say so, and follow it."""

from __future__ import annotations

import pytest
import torch

from equipoise.averaging.state import StateId
from equipoise.peer.errors import Refused
from equipoise.peer.training import DiLoCo, LocalSGD
from fakes.trainers import Trainer, assert_alike
from fakes.world import World
from oracles.training import batch_of, loss_of, network

WAITS = "4 of 4 places are taken; this peer waits for a place"


class Watched(Trainer):
    """A trainer that notes the state in which it says to be in step, the reason, and the time, after each step."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.told: list[tuple[float, int, str, str]] = []

    def backward(self) -> None:
        super().backward()
        if self.calls:
            self.note()

    def note(self) -> None:
        lineage = self.state.lineage if self.opt.in_step else ""
        self.told.append((self.swarm.now, self.opt.epoch, lineage, self.opt.reason))

    @property
    def state(self) -> StateId:
        return self.opt.id

    def waited(self, since: float = 0.0) -> bool:
        return any(WAITS in reason for at, _, _, reason in self.told if at >= since)


def states(trainers: list[Watched]) -> dict[int, set[str]]:
    """By epoch: the states of those that say to be in step."""
    found: dict[int, set[str]] = {}
    for trainer in trainers:
        for _, epoch, lineage, _ in trainer.told:
            if lineage:
                found.setdefault(epoch, set()).add(lineage)
    return found


@pytest.mark.parametrize("count", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_peers_beyond_a_group_follow_its_state_and_take_the_places_that_fall_free(
    world: World, count: int
) -> None:
    world.options["group_size"] = 4
    trainers = [Watched(world, index, 20, seconds=0.2) for index in range(count)]
    for trainer in trainers:
        trainer.begin()
    killed: dict[str, int] = {}

    def kill() -> None:
        world.compute(15.0)
        _, holders = world.made
        for name in holders[:2]:
            killed[name] = max(trainer.opt.epoch for trainer in trainers)
            world.kill(name)

    world.peer("kill", kill)
    world.run()
    alive = [trainer for trainer in trainers if trainer.name not in killed]
    assert len(killed) == 2
    assert len(alive) == count - 2
    assert all(len(found) == 1 for found in states(trainers).values())
    assert_alike(alive)
    waiting = [trainer for trainer in trainers if trainer.waited()]
    assert len(waiting) == count - 4
    assert all(next(at for at, *_, reason in one.told if WAITS in reason) <= 6.0 for one in waiting)
    # Two rounds after the death of two, the group has four contributors again.
    epoch = max(killed.values())
    assert all(
        len(outcome.contributors) == 4
        for _, _, outcome in world.outcomes
        if outcome.ok and outcome.givers and outcome.state is not None and outcome.state.epoch > epoch + 2
    )


class LocalWatched(Watched):
    """The same with local steps: an outer step after every fourth."""

    def train(self) -> None:
        self.run = self.swarm.join(self.name, "text", self.model)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        with DiLoCo(self.run, every=4) as self.opt:  # type: ignore[assignment]
            while self.opt.epoch < self.epochs:
                self.swarm.compute(self.seconds)
                inner.zero_grad()
                loss_of(self.model, batch_of(self.index, self.calls, 8)).backward()
                inner.step()
                self.calls += 1
                self.note()
        self.note()

    @property
    def state(self) -> StateId:
        return self.opt.member.id


@pytest.mark.parametrize(
    ("count", "dead"), [(8, 4), *(pytest.param(12, dead, marks=pytest.mark.slow) for dead in (1, 4))]
)
def test_peers_whose_snapshot_comes_late_take_no_seat_with_an_old_state(
    world: World, count: int, dead: int
) -> None:
    """The first snapshots take longer than the means after them are kept; those from epoch 13 on do not."""
    world.options["group_size"], world.fetch_seconds = 4, 20.0
    trainers = [LocalWatched(world, index, 22, seconds=0.1) for index in range(count)]
    for trainer in trainers:
        trainer.begin()
    killed: list[str] = []

    def kill() -> None:
        while world.made[0] < 13:
            world.compute(0.1)
        world.fetch_seconds = 1.0
        world.compute(3.0)
        for name in world.made[1][:dead]:
            killed.append(name)
            world.kill(name)

    world.peer("kill", kill)
    world.run()
    alive = [trainer for trainer in trainers if trainer.name not in killed]
    assert {epoch: found for epoch, found in states(trainers).items() if len(found) > 1} == {}
    assert len(killed) == dead
    assert {trainer.opt.epoch for trainer in alive} == {22}
    assert len({trainer.state for trainer in alive}) == 1


def test_as_many_as_fit_hear_nothing_of_it(world: World) -> None:
    world.options["group_size"] = 3
    trainers = [Trainer(world, index, 6).begin() for index in range(3)]
    world.run()
    assert_alike(trainers)
    assert not any("place" in reason for trainer in trainers for _, reason in trainer.seen)


def test_to_wait_for_more_than_fit_into_a_group_is_refused(world: World) -> None:
    world.options["group_size"], model = 4, network()
    with pytest.raises(Refused, match="group_size >= 6"):
        LocalSGD(world.join("a", "text", model), every=2, wait_for=5)
    with pytest.raises(Refused, match="expected wait_for below group_size=4, got 4"):
        Trainer(world, 0, 1, wait_for=4).join()
