"""What a script is told when it leaves a run: one line where no round was ok, and who contributed where one was."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from equipoise.averaging.outcome import NoPeers
from equipoise.peer import Run
from equipoise.peer.training import DiLoCo
from fakes.trainers import SAMPLES, Trainer, adamw
from fakes.world import World
from oracles.training import batch_of, loss_of, network


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def train_and_leave(swarm: World, peers: int, **options: Any) -> list[Trainer]:
    trainers = [Trainer(swarm, index, 3, **options) for index in range(peers)]

    def work(trainer: Trainer) -> None:
        trainer.train()
        trainer.run.leave()

    for trainer in trainers:
        swarm.peer(trainer.name, lambda trainer=trainer: work(trainer))
    swarm.run()
    return trainers


def test_one_line_where_it_trained_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (alone,) = train_and_leave(world, 1, patience=0)
    assert alone.opt.epoch == 3
    assert told(caplog) == ["run text ends without one round that was ok: no other peer of this run is known"]
    assert repr(alone.run) == "<Run 'text', left, rounds: 0 ok, 0 failed>"


def test_one_line_for_all_fragments(world: World, caplog: pytest.LogCaptureFixture) -> None:
    model = network()

    def work() -> None:
        run = world.join("peer0", "text", model)
        optimizer = adamw(model.parameters())
        with DiLoCo(run, every=4, fragments=2):
            for at in range(8):
                loss_of(model, batch_of(0, at, SAMPLES)).backward()
                optimizer.step()
        run.leave()

    world.peer("peer0", work)
    world.run()
    assert told(caplog) == ["run text ends without one round that was ok: no other peer of this run is known"]


def test_nothing_where_a_round_was_ok(world: World, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = train_and_leave(world, 2, target_batch_size=2 * SAMPLES)
    assert told(caplog) == []
    assert first.run.rounds_ok >= 3
    assert f"rounds: {first.run.rounds_ok} ok" in repr(first.run)
    assert "contributors ...peer0: " in repr(first.run)
    assert ", ...peer1: " in repr(first.run)


def test_nothing_where_nothing_was_asked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.join("peer0", "text", network()).leave()
    assert told(caplog) == []


def test_one_that_trains_alone_says_why_nobody_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(world, 0, 1, patience=0, target_batch_size=SAMPLES)
    trainer.join()
    monkeypatch.setattr(Run, "state", NoPeers("the daemon on its home was killed"))
    trainer.backward()
    trainer.opt.step()
    assert trainer.opt.epoch == 1
    assert trainer.opt.reason == (
        "it trains alone: no other peer of this run is known; the daemon on its home was killed"
    )
