"""One rank of a machine that is one peer: `python ddp_rank.py RANK FOLDER SCENARIO...`; saves each scenario's result.

The swarm lives in rank 0: another peer, whose gradients are known, trains in a thread of that process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equipoise.peer.training.ddp import RankZeroFailed, SharedOptimizer
from fakes.world import World
from oracles.training import batch_of, loss_of, network

RANKS, SAMPLES, STEPS = 2, 4, 4

OTHER = 7
"""Which batches the other peer has."""


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def share_an_optimizer(rank: int, breaks: bool = False) -> dict[str, torch.Tensor]:
    """Some epochs with the swarm's optimizer on rank 0, whose first step may raise; returns all parameters."""
    model, others = network(), network()
    world = World()
    options: dict[str, Any] = {"target_batch_size": (RANKS + 1) * SAMPLES, "clock": world.clock}

    def optimizer(peer: str, what: nn.Module, samples: int) -> Any:
        run = world.join(peer, "text", what)
        return run.optimizer(torch.optim.AdamW(what.parameters(), lr=1e-2), batch_size=samples, **options)

    own = optimizer("machine", model, RANKS * SAMPLES) if rank == 0 else None
    if rank:
        with torch.no_grad():
            next(model.parameters()).zero_()  # It takes rank 0's.
    ddp = DistributedDataParallel(model)

    def work() -> None:
        shared, count = SharedOptimizer(own, ddp), 0
        while shared.epoch < STEPS:
            if rank == 0:
                world.compute(0.5)
            shared.zero_grad()
            loss_of(ddp, batch_of(rank, count, SAMPLES)).backward()
            if own is not None and breaks:
                own.step = daemon_has_gone
            shared.step()
            count += 1

    def other() -> None:
        swarm, count = optimizer("other", others, SAMPLES), 0
        while swarm.epoch < STEPS:
            world.compute(0.5)
            others.zero_grad()
            loss_of(others, batch_of(OTHER, count, SAMPLES)).backward()
            swarm.step()
            count += 1

    alongside(rank, world, work, other)
    ended = {name: one.detach().clone() for name, one in named(model).items()}
    theirs = {f"other {name}": one.detach().clone() for name, one in named(others).items()}
    return {**ended, **theirs} if rank == 0 else ended


def alongside(rank: int, world: World, work: Callable[[], None], other: Callable[[], None]) -> None:
    if rank:
        work()
        return
    world.peer("machine", work)
    world.peer("other", other)
    world.run()


def daemon_has_gone() -> None:
    raise ConnectionError("the daemon has gone")


SCENARIOS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "broken": lambda rank: share_an_optimizer(rank, breaks=True),
    "shared": share_an_optimizer,
}


def main() -> None:
    rank, folder, scenarios = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    try:
        for scenario in scenarios:
            save_file(SCENARIOS[scenario](rank), folder / f"{scenario}-{rank}.safetensors")
            # One that leaves while the other's last sum is on its way takes gloo's threads down with it.
            dist.barrier()
    except (ConnectionError, RankZeroFailed) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
