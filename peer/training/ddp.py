"""One machine with several GPUs, a process each under DistributedDataParallel, is one peer: rank 0 talks to the daemon.

DDP averages gradients within the machine. `SharedOptimizer` makes the swarm's step on rank 0, with everything that
`Run.optimizer` does (target batches, newcomers, checkpoints), and hands the parameters to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from equipoise.averaging.state import StateId
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.training.optimizer import SwarmOptimizer

LEADER = 0
"""The rank that talks to the daemon."""

FAILED = -1
"""The epoch of a rank 0 that has raised."""


class RankZeroFailed(EquipoiseError, RuntimeError):
    """Rank 0 has raised; its own error says why."""


class SharedOptimizer:
    """An optimizer of the swarm on rank 0, whose parameters all ranks of a machine share.

    DDP averages gradients within the machine, and rank 0 steps. The other ranks get changed parameters: as many bytes
    as gradients, and no optimizer state on their GPUs.

        swarm = run.optimizer(AdamW(...), target_batch_size=4096, batch_size=32 * world_size) if rank == 0 else None
        optimizer = SharedOptimizer(swarm, model)   # on every rank; then zero_grad, backward, step as ever

    Attributes:
        epoch: The swarm's epoch, on every rank.
    """

    def __init__(
        self,
        optimizer: SwarmOptimizer | None,
        model: DistributedDataParallel,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Begin with rank 0's parameters, which may be those of a checkpoint.

        Args:
            optimizer: The swarm's optimizer on rank 0; on others None.
            model: The wrapped model.
            group: DDP's process group; None: the default one.

        Raises:
            ValueError: Rank 0 has no optimizer, or another has one.
        """
        rank = dist.get_rank(group)
        if (optimizer is None) == (rank == LEADER):
            got = "None" if optimizer is None else "an optimizer"
            raise ValueError(
                f"expected an optimizer on rank {LEADER} and None on others, got {got} on rank {rank}"
            )
        self.optimizer = optimizer
        self.epoch = -1
        self._shared: StateId | None = None
        self._model = model
        self._parameters = list(model.module.parameters())
        self._group = group
        self._share(lambda: None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any optimizer's."""
        self._model.zero_grad(set_to_none)

    def step(self, samples: float | None = None) -> None:
        """`SwarmOptimizer.step` on rank 0; then all ranks have its parameters. All ranks call it, equally often.

        Args:
            samples: Those of all ranks together, on rank 0; by default the optimizer's `batch_size`.

        Raises:
            RankZeroFailed: On the other ranks, if rank 0 raised.
        """
        self._share(lambda: self.optimizer and self.optimizer.step(samples=samples))

    def _share(self, act: Callable[[], Any]) -> None:
        """Have rank 0 `act`, and all ranks take its epoch and parameters; if it raises, all raise: no rank waits."""
        told = torch.tensor([FAILED, 0], device=self._parameters[0].device)
        try:
            if self.optimizer is not None:
                act()
                # After a resynchronisation, rank 0 may hold another state of the same epoch.
                before, self._shared = self._shared, self.optimizer.id
                told[0], told[1] = self._shared.epoch, self._shared != before
        finally:
            _broadcast(told, self._group)
        epoch, changed = told.tolist()
        if epoch == FAILED:
            raise RankZeroFailed("rank 0 could not step", "its own error says why")
        self.epoch = epoch
        for parameter in self._parameters if changed else ():
            _broadcast(parameter.detach(), self._group)


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.broadcast(tensor, LEADER if group is None else dist.get_global_rank(group, LEADER), group)
