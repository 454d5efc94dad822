"""More peers than a group has places: one state, always; those without a place say so, and follow it."""

from __future__ import annotations

import pytest

from equipoise.peer.errors import Refused
from equipoise.peer.training import LocalSGD
from fakes.trainers import Trainer, assert_alike
from fakes.training import FakeSwarm
from oracles.training import network

WAITS = "4 of 4 places are taken; this peer waits for a place"


class Watched(Trainer):
    """A trainer that notes the state in which it says to be in step, the reason, and the time, after each step."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.told: list[tuple[float, int, str, str]] = []

    def backward(self) -> None:
        super().backward()
        if self.calls:
            lineage = self.opt.id.lineage if self.opt.in_step else ""
            self.told.append((self.swarm.now, self.opt.epoch, lineage, self.opt.reason))

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


@pytest.mark.parametrize("count", [6, 12])
def test_peers_beyond_a_group_follow_its_state_and_take_the_places_that_fall_free(
    fake: FakeSwarm, count: int
) -> None:
    fake.group_size = 4
    trainers = [Watched(fake, index, 20, seconds=0.2) for index in range(count)]
    for trainer in trainers:
        trainer.begin()
    killed: dict[str, int] = {}

    def kill() -> None:
        fake.compute(15.0)
        _, holders = next(iter(fake.made.values()))
        for name in holders[:2]:
            killed[name] = max(trainer.opt.epoch for trainer in trainers)
            fake.kill(name)

    fake.peer("kill", kill)
    fake.run()
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
        len(outcome.contributors) == 4 for state, (outcome, _) in fake.kept.items() if state.epoch > epoch + 2
    )


def test_as_many_as_fit_hear_nothing_of_it(fake: FakeSwarm) -> None:
    fake.group_size = 3
    trainers = [Trainer(fake, index, 6).begin() for index in range(3)]
    fake.run()
    assert_alike(trainers)
    assert not any("place" in reason for trainer in trainers for _, reason in trainer.seen)


def test_to_wait_for_more_than_fit_into_a_group_is_refused(fake: FakeSwarm) -> None:
    fake.group_size, model = 4, network()
    with pytest.raises(Refused, match="group_size >= 6"):
        LocalSGD(fake.join("a", "text", model), every=2, wait_for=5)
    with pytest.raises(Refused, match="expected wait_for below group_size=4, got 4"):
        Trainer(fake, 0, 1, wait_for=4).join()
