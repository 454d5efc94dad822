"""Peers on a GPU and on a CPU in one group."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from contracts.run import together
from e2e.fleet import Fleet, normal
from e2e.swarm import DaemonProcess, Swarm
from equipoise.peer import connect
from equipoise.peer.training import DiLoCo, SparseLoCo
from oracles.training import Batch, batch_of, loss_of, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OUTER_STEPS = 20


def trained(home: Path, index: int, device: str, codec: str) -> str:
    """The SHA-256 of the parameters that a peer ends with."""
    model = network(64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        connect(home) as peer,
        peer.join("mixed", model, codec=codec) as run,
        (SparseLoCo if codec == "sparse" else DiLoCo)(run, every=5, wait_for=1) as group,
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


@pytest.mark.parametrize("codec", ["int8", "nf4", "sparse"])
def test_both_end_with_the_same_parameters(swarm: Swarm, codec: str) -> None:
    homes = [daemon.home for daemon in swarm.daemons(2, args=["--listen", "/ip4/127.0.0.1/tcp/0"])]
    devices = ("cuda", "cpu")
    ends = together(
        *(lambda index=index: trained(homes[index], index, devices[index], codec) for index in (0, 1))
    )
    assert ends[0] == ends[1]


def test_groups_of_a_gpu_and_all_kernels_of_a_cpu_make_equal_bits(swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "numba.py").write_text("raise ImportError('numba is left out by the test')\n")
    bare = os.pathsep.join(filter(None, (str(tmp_path / "bare"), os.environ.get("PYTHONPATH"))))
    daemons: list[DaemonProcess] = []
    for variable in ("EQUIPOISE_DEVICE=cuda:0", "EQUIPOISE_NAME=numba", f"PYTHONPATH={bare}"):
        joins = [daemon.address for daemon in daemons[:1]]
        args = ["--listen", "/ip4/127.0.0.1/tcp/0"]
        daemons.append(swarm.daemon(join=joins, args=args, prefix=["env", variable]))
    with Fleet(daemons, normal(3, 3_000_000), codec="int8") as fleet:
        for _ in range(3):
            outcomes = [pending.result() for pending in fleet.start([1.0, 2.5, 0.3])]
            assert all(len(outcome.contributors) == 3 for outcome in outcomes), outcomes
            fleet.check(dict(enumerate(outcomes)), 0.010)
            for tensor, value in zip(fleet.tensors, fleet.values, strict=True):
                tensor.copy_(value)
    kernels = [daemon.json("status")["kernels"]["name"] for daemon in daemons]
    assert kernels == ["numba; triton on cuda:0", "numba", "numpy"]
    assert not daemons[0].json("status")["warnings"]
