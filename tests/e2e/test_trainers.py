"""Trainers on two real daemons: DDP with two processes, and an adapter, which other tests run on fakes."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from e2e import ddp_rank
from e2e.ddp_rank import RANKS, SAMPLES, STEPS, TARGET
from e2e.swarm import ChildProcess, DaemonProcess
from e2e.threads import begin, settle, together
from equipoise.peer import connect
from oracles.training import batch_of, difference, joined, loss_of, network

pytestmark = pytest.mark.timeout(240)

PEERS = 2


def test_two_processes_under_ddp_are_one_peer(places: list[DaemonProcess], tmp_path: Path) -> None:
    script = [sys.executable, str(ddp_rank.__file__)]
    ranks = [
        ChildProcess([*script, str(rank), str(tmp_path), str(places[0].home)], tmp_path / f"of-{rank}", {})
        for rank in range(RANKS)
    ]

    def other() -> nn.Module:
        model = network()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with connect(places[1].home) as peer, peer.join("machine", model, codec="fp32") as run:
            optimizer = run.optimizer(sgd, target_batch_size=TARGET, batch_size=SAMPLES, wait_for=1)
            while optimizer.epoch < STEPS:
                optimizer.zero_grad()
                loss_of(model, batch_of(RANKS, optimizer.epoch, SAMPLES)).backward()
                optimizer.step()
        return model

    for rank in ranks:
        rank.spawn()
    try:
        end = begin(other)
        for rank in ranks:
            assert rank.wait(120) == 0, rank.errors[-3000:]
        settle([end], 60)
        told = [rank.output for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert told[0] == "ConnectionError: the daemon has gone\n"
    assert told[1].startswith("RankZeroFailed: rank 0 could not step")
    expected = network()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(STEPS):
        sgd.zero_grad()
        loss_of(expected, joined([batch_of(at, step, SAMPLES) for at in range(RANKS + 1)])).backward()
        sgd.step()
    found = [load_file(tmp_path / f"rank-{at}.safetensors") for at in range(RANKS)]
    for state in (*found, dict(end.result().state_dict())):
        assert difference(state, dict(expected.state_dict())) <= 1e-5


@pytest.mark.slow
def test_trainers_of_hugging_face_equal_one_trainer(places: list[DaemonProcess], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra `adapters`")
    real: Any = importlib.import_module("fakes.huggingface")

    with contextlib.ExitStack() as stack:
        trainings, callbacks = [], []
        for at, place in enumerate(places):  # One after another: Accelerate keeps one state for a process.
            run = stack.enter_context(
                stack.enter_context(connect(place.home)).join("text", model := real.model(), codec="fp32")
            )
            trainings.append(real.trainer(tmp_path / str(at), model, real.data(at)))
            callbacks.append(real.SwarmCallback(run, target_batch_size=TARGET, wait_for=1))
            trainings[-1].add_callback(callbacks[-1])
        together(lambda training: training.train(), trainings)
        assert [callback.optimizer.epoch for callback in callbacks] == [real.EPOCHS] * PEERS
    first, second = (real.flat(training.model) for training in trainings)
    pairs = zip(*(torch.utils.data.DataLoader(real.data(at), real.BATCH) for at in range(PEERS)), strict=True)
    both = [
        {name: one[name][at] for name in one} for pair in pairs for one in pair for at in range(real.BATCH)
    ]
    alone = real.trainer(tmp_path, real.model(), both, per_device_train_batch_size=PEERS * real.BATCH)
    alone.train()
    assert torch.equal(first, second)
    assert (first - real.flat(alone.model)).abs().max() < 1e-4
