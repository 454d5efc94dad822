"""One rank of a machine that is one peer of a real daemon: `python ddp_rank.py RANK FOLDER HOME`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equipoise.peer import connect
from equipoise.peer.training.ddp import RankZeroFailed, SharedOptimizer
from oracles.training import batch_of, loss_of, network

RANKS, SAMPLES, STEPS = 2, 4, 3

TARGET = 1.0
"""Samples of an update: each step of a peer is due at once, so that each update has one batch of every process."""


def main() -> None:
    """Train with DDP; only rank 0 has a client of the daemon."""
    rank, folder, home = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = network(seed=rank)  # Rank 1 takes the parameters of rank 0.
    ddp = DistributedDataParallel(model)
    if rank == 0:
        with connect(home) as peer, peer.join("machine", model, codec="fp32") as run:
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            samples = float(RANKS * SAMPLES)
            swarm = run.optimizer(sgd, target_batch_size=TARGET, batch_size=samples, wait_for=1)
            train(SharedOptimizer(swarm, ddp), ddp, rank)
    else:
        train(SharedOptimizer(None, ddp), ddp, rank)
    save_file(model.state_dict(), folder / f"rank-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def train(optimizer: SharedOptimizer, model: DistributedDataParallel, rank: int) -> None:
    """Make all updates, each of a batch of its own on every rank; the step after them raises on rank 0."""
    while optimizer.epoch < STEPS:
        optimizer.zero_grad()
        loss_of(model, batch_of(rank, optimizer.epoch, SAMPLES)).backward()
        optimizer.step()
    if optimizer.optimizer is not None:
        optimizer.optimizer.step = daemon_has_gone  # type: ignore[method-assign]
    try:
        optimizer.step()
    except (ConnectionError, RankZeroFailed) as error:
        print(f"{type(error).__name__}: {error}", flush=True)


def daemon_has_gone(closure: object = None, *, samples: object = None) -> None:
    raise ConnectionError("the daemon has gone")


if __name__ == "__main__":
    main()
