"""More peers than fit into one group cannot hold one state: they are told so."""

from __future__ import annotations

import logging

import pytest

from fakes.trainers import Trainer, assert_alike
from fakes.training import FakeSwarm

TOLD = "this run has 4 peers and groups of at most 3: they cannot hold one state; join with group_size >= 4"


def test_where_a_full_group_leaves_some_out_it_is_said_and_warned_of_once(
    fake: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    fake.group_size = 3
    trainers = [Trainer(fake, index, 6) for index in range(4)]
    for trainer in trainers:
        trainer.begin()

    def end() -> None:
        fake.compute(20.0)
        for trainer in trainers:
            fake.kill(trainer.name)

    fake.peer("end", end)
    with caplog.at_level(logging.WARNING):
        fake.run()
    told = [trainer for trainer in trainers if any(TOLD in reason for _, reason in trainer.seen)]
    assert len(told) >= 3
    assert caplog.messages.count(f"run text: {TOLD}") == len(told)


def test_as_many_as_fit_hear_nothing_of_it(fake: FakeSwarm) -> None:
    fake.group_size = 3
    trainers = [Trainer(fake, index, 6).begin() for index in range(3)]
    fake.run()
    assert_alike(trainers)
    assert not any("group_size" in reason for trainer in trainers for _, reason in trainer.seen)
