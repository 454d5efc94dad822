"""A trainer of two processes under DDP beside another peer, on two real daemons."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from e2e import ddp_rank
from e2e.ddp_rank import RANKS, SAMPLES, STEPS, TARGET
from e2e.forked import environment
from e2e.swarm import ChildProcess, DaemonProcess
from e2e.threads import begin, settle
from equipoise.peer import connect
from oracles.training import batch_of, difference, joined, loss_of, network

PEERS = 2


def test_two_processes_under_ddp_are_one_peer(places: list[DaemonProcess], tmp_path: Path) -> None:
    script = [sys.executable, str(ddp_rank.__file__)]
    ranks = [
        ChildProcess(
            [*script, str(rank), str(tmp_path), str(places[0].home)],
            tmp_path / f"of-{rank}",
            environment(),
            script=True,
        )
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
