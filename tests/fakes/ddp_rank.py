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

from equipoise.peer.training.ddp import Machine, RankZeroFailed, SharedOptimizer, swarm_hook
from fakes.training import FakeSwarm
from oracles.training import INPUTS, OUTPUTS, batch_of, loss_of, network

RANKS, SAMPLES, STEPS = 2, 4, 4

OTHERS_WEIGHT = 6.0

OTHER = 7
"""Which batches the other peer has."""


class Branched(nn.Module):
    """A network, and a layer that no rank of this machine uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = network()
        self.unused = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.used(inputs))


def others_gradient(name: str, step: int, like: torch.Tensor) -> torch.Tensor:
    """What the other peer contributes."""
    chance = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(like.shape, generator=chance)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def exchange_in_backward(rank: int, folder: Path, fails: int = 0, breaks: int = 0) -> dict[str, torch.Tensor]:
    """Some steps with the hook: the gradients that backward leaves; round `fails` fails, or rank 0 in call `breaks`."""
    torch.manual_seed(0)
    model = Branched()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, find_unused_parameters=True)
    fake, left = FakeSwarm(), {}
    fake.fails = lambda number, peer: number == fails and peer == "machine"
    run = fake.join("machine", "text", model) if rank == 0 else None
    machine = Machine(run, ddp, batch_size=SAMPLES)
    calls: list[int] = []

    def counted(state: Machine, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        if rank == 0 and len(calls) == breaks:
            raise_in_round(machine)
        return swarm_hook(state, bucket)

    counted.__annotations__.clear()  # DDP would compare them, which are strings here.
    ddp.register_comm_hook(machine, counted)

    def work() -> None:
        for step in range(STEPS):
            ddp.zero_grad()
            if rank == 0:
                fake.compute(0.5)
            loss_of(ddp, batch_of(rank, step, SAMPLES)).backward()
            for name, one in named(model).items():
                # None where a round failed: nobody has used it.
                left[f"{step} {name}"] = torch.zeros_like(one) if one.grad is None else one.grad.clone()
                with torch.no_grad():
                    one.sub_(0.1 * left[f"{step} {name}"])

    def other() -> None:
        run = fake.join("other", "text", Branched())
        for step in range(STEPS):
            fake.compute(0.5)
            gradients = {name: others_gradient(name, step, one) for name, one in named(Branched()).items()}
            run.accumulate(gradients, OTHERS_WEIGHT)
            run.step()

    alongside(rank, fake, work, other)
    return {**left, "buckets": torch.tensor(len(calls) / STEPS), "rounds": torch.tensor(float(fake.rounds))}


def raise_in_round(machine: Any) -> None:
    def broken(*_: object) -> None:
        raise ConnectionError("the daemon has gone")

    machine._run.accumulate = broken


def share_an_optimizer(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Some epochs with the swarm's optimizer on rank 0: the parameters that all end with."""
    model, others = network(), network()
    fake = FakeSwarm()
    options: dict[str, Any] = {"target_batch_size": (RANKS + 1) * SAMPLES, "clock": fake.clock}

    def optimizer(peer: str, what: nn.Module, samples: int) -> Any:
        run = fake.join(peer, "text", what)
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
                fake.compute(0.5)
            shared.zero_grad()
            loss_of(ddp, batch_of(rank, count, SAMPLES)).backward()
            shared.step()
            count += 1

    def other() -> None:
        swarm, count = optimizer("other", others, SAMPLES), 0
        while swarm.epoch < STEPS:
            fake.compute(0.5)
            others.zero_grad()
            loss_of(others, batch_of(OTHER, count, SAMPLES)).backward()
            swarm.step()
            count += 1

    alongside(rank, fake, work, other)
    ended = {name: one.detach().clone() for name, one in named(model).items()}
    theirs = {f"other {name}": one.detach().clone() for name, one in named(others).items()}
    return {**ended, **theirs} if rank == 0 else ended


def alongside(rank: int, fake: FakeSwarm, work: Callable[[], None], other: Callable[[], None]) -> None:
    if rank:
        work()
        return
    fake.peer("machine", work)
    fake.peer("other", other)
    fake.run()


SCENARIOS: dict[str, Callable[[int, Path], dict[str, torch.Tensor]]] = {
    "hook": exchange_in_backward,
    "failed": lambda rank, folder: exchange_in_backward(rank, folder, fails=2),
    "broken": lambda rank, folder: exchange_in_backward(rank, folder, breaks=1),
    "shared": share_an_optimizer,
}


def main() -> None:
    rank, folder, scenarios = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    try:
        for scenario in scenarios:
            save_file(SCENARIOS[scenario](rank, folder), folder / f"{scenario}-{rank}.safetensors")
            # One that leaves while the other's last sum is on its way takes gloo's threads down with it.
            dist.barrier()
    except (ConnectionError, RankZeroFailed) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
