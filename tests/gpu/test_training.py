"""A peer on a GPU and a peer on a CPU train one model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from contracts.run import together
from e2e.swarm import Swarm
from equipoise.peer import connect
from equipoise.peer.training import DiLoCo
from oracles.training import Batch, batch_of, loss_of, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OUTER_STEPS = 20


def trained(home: Path, index: int, device: str) -> str:
    """The SHA-256 of the parameters that a peer ends with."""
    model = network(64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        connect(home) as peer,
        peer.join("mixed", model, codec="int8") as run,
        DiLoCo(run, every=5, wait_for=1) as group,
    ):
        number = 0
        while group.epoch < OUTER_STEPS:
            optimizer.zero_grad()
            batch = Batch(*(values.to(device) for values in batch_of(index, number, 8)))
            loss_of(model, batch).backward()
            optimizer.step()
            number += 1
    values = (one.detach().cpu().numpy().tobytes() for one in model.parameters())
    return hashlib.sha256(b"".join(values)).hexdigest()


def test_both_end_with_the_same_parameters(swarm: Swarm) -> None:
    homes = [daemon.home for daemon in swarm.daemons(2, args=["--listen", "/ip4/127.0.0.1/tcp/0"])]
    devices = ("cuda", "cpu")
    ends = together(*(lambda index=index: trained(homes[index], index, devices[index]) for index in (0, 1)))
    assert ends[0] == ends[1]
