"""Training that goes on from a checkpoint: with the swarm's optimizer, in a swarm in one process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.peer.training import DiLoCo
from equipoise.peer.training.checkpoint import Checkpoints
from equipoise.peer.training.checkpoint_files import IMAGE_FILE, CheckpointError, Misfit, read_manifest
from fakes.trainers import SAMPLES, Trainer
from fakes.world import World
from oracles.training import batch_of, loss_of, network

PEERS = 2


class Resuming(Trainer):
    """A trainer whose checkpoints are in a directory of the peer's own."""

    def __init__(self, swarm: World, folder: Path, index: int, epochs: int, **options: Any) -> None:
        directory, resume = folder / f"peer{index}", options.pop("resume", True)
        checkpoints = Checkpoints(every=4, directory=directory, resume=resume)
        given = {"target_batch_size": PEERS * SAMPLES, "checkpoints": checkpoints, **options}
        super().__init__(swarm, index, epochs, **given)
        self.began = -1

    def join(self) -> None:
        super().join()
        self.began = self.opt.epoch

    def backward(self) -> None:
        settle()
        loss_of(self.model, batch_of(self.index, self.opt.epoch, SAMPLES)).backward()

    def train(self) -> None:
        try:
            super().train()
        finally:
            self.run.leave()

    def flat(self) -> torch.Tensor:
        return torch.cat([one.flatten() for one in self.named().values()])


def settle() -> None:
    """Let threads that write finish: virtual time does not wait for a disk."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


def train(folder: Path, epochs: int, **options: Any) -> list[Resuming]:
    swarm = World()
    trainers = [Resuming(swarm, folder, index, epochs, **options) for index in range(PEERS)]
    swarm.run(*trainers)
    return trainers


def recorded(folder: Path, index: int = 0) -> list[int]:
    paths = (folder / f"peer{index}" / "text").glob("epoch-*")
    return sorted(read_manifest(path).state.epoch for path in paths)


def test_they_are_written_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    train(tmp_path, 10)
    assert recorded(tmp_path) == [4, 8, 10]


def test_stopping_and_resuming_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path / "a", 6)
    resumed = train(tmp_path / "a", 14)
    straight = train(tmp_path / "b", 14)
    assert [trainer.began for trainer in resumed] == [6, 6]
    assert torch.equal(resumed[0].flat(), resumed[1].flat())
    assert resumed[0].opt.id == resumed[1].opt.id
    assert resumed[0].opt.epoch == straight[0].opt.epoch
    assert torch.equal(resumed[0].flat(), straight[0].flat())


def test_the_scheduler_and_the_users_own_state_go_on_too(tmp_path: Path) -> None:
    def scheduler(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)

    train(tmp_path, 5, scheduler=scheduler)
    resumed = train(tmp_path, 7, scheduler=scheduler)
    assert resumed[0].opt.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**7)


def test_a_peer_that_has_lost_its_newest_checkpoint_catches_up_from_the_swarm(tmp_path: Path) -> None:
    train(tmp_path, 10)
    for path in (tmp_path / "peer1" / "text").glob("epoch-*"):
        if read_manifest(path).state.epoch > 4:
            os.truncate(path / IMAGE_FILE, 100)
    resumed = train(tmp_path, 16)
    assert [trainer.began for trainer in resumed] == [10, 4]
    assert resumed[0].opt.id == resumed[1].opt.id
    assert torch.equal(resumed[0].flat(), resumed[1].flat())


def test_without_resume_training_starts_anew(tmp_path: Path) -> None:
    train(tmp_path, 6)
    assert [trainer.began for trainer in train(tmp_path, 1, resume=False)] == [0, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target_batch_size": 99}, "another target batch size: '16' there, '99' here"),
        ({"clip": 1.0}, "another clip: 'none' there, '1' here"),
    ],
)
def test_other_terms_are_refused_and_nothing_is_loaded(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    train(tmp_path, 4)
    swarm = World()
    trainer = Resuming(swarm, tmp_path, 0, 5, **options)
    with pytest.raises(Misfit, match=expected):
        swarm.run(trainer)
    assert torch.equal(trainer.flat(), torch.cat([one.detach().flatten() for one in network().parameters()]))


def test_a_temporary_home_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    swarm = World()
    trainer = Resuming(swarm, tmp_path, 0, 5, checkpoints=Checkpoints())
    with pytest.raises(
        CheckpointError, match="temporary home; give the Peer a home, or Checkpoints a directory"
    ):
        swarm.run(trainer)


def test_a_state_in_the_middle_of_an_update_is_not_written(tmp_path: Path) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise KeyboardInterrupt

    swarm = World()
    model = network()

    def work() -> None:
        run = swarm.join("peer0", "text", model)
        checkpoints = Checkpoints(every=1, directory=tmp_path)
        options: dict[str, Any] = {
            "batch_size": 8,
            "target_batch_size": 8,
            "patience": 0,
        }
        opt = run.optimizer(Broken(model.parameters(), lr=1.0), checkpoints=checkpoints, **options)
        loss_of(model, batch_of(0, 0, 8)).backward()
        try:
            opt.step()
        except KeyboardInterrupt:
            run.leave()

    swarm.peer("peer0", work)
    swarm.run()
    assert not list((tmp_path / "text").glob("epoch-*"))


def train_locally(folder: Path, steps: int, fragments: int) -> list[DiLoCo]:
    """Two peers that exchange every four of their steps; returns their ends."""
    world = World()

    def work(peer: int) -> DiLoCo:
        model = network()
        run = world.join(f"peer{peer}", "text", model)
        checkpoints = Checkpoints(every=2, directory=folder / f"peer{peer}", resume=True)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        local = DiLoCo(run, every=4, fragments=fragments, checkpoints=checkpoints)
        with local:
            while local.steps < steps:
                world.compute(0.5)
                inner.zero_grad()
                loss_of(model, batch_of(peer, local.steps, SAMPLES)).backward()
                inner.step()
        runs: list[Any] = [run, *(fragment.run for fragment in local._fragments)]
        for one in runs:
            one.leave()
        return local

    return world.each(PEERS, work)


@pytest.mark.parametrize("fragments", [1, 2])
def test_local_steps_go_on_from_what_all_agreed_on(tmp_path: Path, fragments: int) -> None:
    first = train_locally(tmp_path, 8, fragments)
    agreed = [member.id for member in first[0].members]
    begun: list[DiLoCo] = train_locally(tmp_path, 0, fragments)
    assert [[member.id for member in one.members] for one in begun] == [agreed, agreed]
    again = train_locally(tmp_path, 16, fragments)
    assert [member.id for member in again[0].members] == [member.id for member in again[1].members]
    assert again[0].epoch == 4
