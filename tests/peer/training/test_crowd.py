"""More peers than fit into one group cannot hold one state: they are told so."""

from __future__ import annotations

import logging

import pytest
import torch

from equipoise.peer.errors import Refused
from equipoise.peer.training import DiLoCo
from fakes.training import FakeSwarm
from peer.training.trainers import Trainer, assert_alike

TOLD = "this run has 4 peers and groups of at most 3: they cannot hold one state; join with group_size >= 4"


def test_where_a_full_group_leaves_some_out_it_is_said_and_warned_of_once(
    fake: FakeSwarm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.group_size = 3
    trainers = [Trainer(fake, index, 6) for index in range(4)]
    monkeypatch.setattr("equipoise.peer.training.optimizer.require_room", lambda run: None)
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


@pytest.mark.parametrize("local", [False, True])
def test_one_too_many_is_refused_at_once(fake: FakeSwarm, local: bool) -> None:
    fake.group_size = 2
    made: list[object] = []

    def make(name: str) -> None:
        model = torch.nn.Linear(2, 2)
        run = fake.join(name, "text", model)
        if local:
            made.append(DiLoCo(run, every=4))
        else:
            made.append(run.optimizer(torch.optim.SGD(model.parameters(), 0.1), target_batch_size=4))

    make("a")
    make("b")
    with pytest.raises(Refused, match=r"this run has 3 peers and groups of at most 2: .* group_size >= 3"):
        make("c")
    assert len(made) == 2
