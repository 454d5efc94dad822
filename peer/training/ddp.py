"""One machine with several GPUs, a process each under DistributedDataParallel, is one peer: rank 0 talks to the daemon.

Two ways. `SharedOptimizer` steps on rank 0, with everything that `Run.optimizer` does (target batches, newcomers,
checkpoints), and hands the parameters to the other ranks. `swarm_hook` is a communication hook for a plain optimizer on
every rank: what `backward` leaves in `.grad` is the swarm's mean.

**Buckets.** DDP calls a hook once for each bucket, about 25 MB of gradients, while it still computes others. A round is
an agreement of the group, so a round for each bucket would cost a round's latency each. Worse, buckets differ between
machines: DDP rebuilds them after the first iteration, in the order in which gradients came, so the buckets of two
machines need not hold the same parameters. And a machine that dies between two rounds would leave half a step. So the
hook only sums each bucket within the machine, as DDP itself would. When the last bucket is there, it exchanges all of
them in one round as one vector, in the run's own order. So the exchange does not overlap with this backward pass.

**Unused parameters.** Without `find_unused_parameters=True`, DDP never calls the hook for a bucket with a parameter
without a gradient, hence never for the last bucket: it raises in the next forward pass, as usual. With it, the bucket
holds zeros for such parameters. DDP then writes nothing into the `.grad` of a parameter that no rank used, though other
peers may have used it. The hook writes it itself, on every rank, so that ranks and peers do not differ.
"""

# Annotations are not postponed here: DDP compares those of a hook with its own types.

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId
from equipoise.peer.accumulate import NotFinite
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.run import Run
from equipoise.peer.training.optimizer import SwarmOptimizer

LEADER = 0
"""The rank that talks to the daemon."""

OWN, MEAN, FAILED = range(3)
"""Messages of rank 0: the gradients stay the machine's own, or are the swarm's mean, or rank 0 has raised."""


class RankZeroFailed(EquipoiseError, RuntimeError):
    """Rank 0 has raised; its own error says why."""


class Bucket(NamedTuple):
    """A bucket that waits for the last one."""

    buffer: torch.Tensor
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]
    summed: dist.Work
    result: Future[torch.Tensor]


class Machine:
    """The state of `swarm_hook` on one rank: `ddp.register_comm_hook(Machine(run, ddp, batch_size=32), swarm_hook)`.

    A failed round leaves the machine's own mean in the gradients, and `outcome` says so. After a step with that mean,
    this machine's parameters differ from the other peers'. `SharedOptimizer` notices and repairs that.

    Attributes:
        outcome: On rank 0, the last round's outcome.
    """

    def __init__(
        self,
        run: Run | None,
        model: DistributedDataParallel,
        *,
        batch_size: float,
        timeout: float = 30.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Set up one rank; rank 0 talks to the swarm.

        Args:
            run: On rank 0, joined with `model.module`; on others None.
            model: The module with which the hook is registered.
            batch_size: Samples of each rank between two exchanges, passes in `model.no_sync()` included.
            timeout: Seconds for one round.
            group: DDP's process group; None: the default one.

        Raises:
            ValueError: Rank 0 has no run, or another has one.
        """
        _require_on_leader("a run", run, dist.get_rank(group))
        self.outcome: Outcome | None = None
        self._run = run
        self._group = group
        self._weight = batch_size * dist.get_world_size(group)
        self._timeout = timeout
        self._names = {id(one): name for name, one in model.module.named_parameters() if one.requires_grad}
        self._buckets: list[Bucket] = []

    def take(self, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
        """Sum one bucket within the machine; with the last one, exchange them all."""
        buffer = bucket.buffer()
        summed = dist.all_reduce(buffer, group=self._group, async_op=True)
        result: Future[torch.Tensor] = Future()
        self._buckets.append(Bucket(buffer, bucket.gradients(), bucket.parameters(), summed, result))
        if bucket.is_last():
            buckets, self._buckets = self._buckets, []
            self._exchange(buckets)
        return result

    def _exchange(self, buckets: list[Bucket]) -> None:
        size = dist.get_world_size(self._group)
        for bucket in buckets:
            bucket.summed.wait()
            bucket.buffer.div_(size)
        told = _together(lambda: self._round(buckets), buckets[0].buffer.device, self._group)
        for bucket in buckets:
            if told == MEAN:
                _broadcast(bucket.buffer, self._group)
                _write_unused(bucket)
            bucket.result.set_result(bucket.buffer)

    def _round(self, buckets: list[Bucket]) -> int:
        """Rank 0's part: the mean of all peers into the buffers."""
        assert self._run is not None, "rank 0 has one"
        gradients = {
            self._names[id(parameter)]: gradient
            for bucket in buckets
            for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True)
        }
        # If they are not finite, this machine only receives: without the round, its parameters would differ.
        with contextlib.suppress(NotFinite):
            self._run.accumulate(gradients, self._weight)
        self.outcome = self._run.step(self._timeout)
        if not self.outcome.ok:
            self._run.take()
            return OWN
        for name, gradient in gradients.items():
            gradient.copy_(self._run.mean[name])
        return MEAN


def swarm_hook(machine: Machine, bucket: dist.GradBucket) -> Future[torch.Tensor]:  # type: ignore[name-defined]
    """Makes the gradients that `backward` leaves the mean of all peers; see `Machine` and the top of this file."""
    return machine.take(bucket)


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
        _require_on_leader("an optimizer", optimizer, dist.get_rank(group))
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

    def step(self) -> None:
        """`SwarmOptimizer.step` on rank 0; then all ranks have its parameters. All ranks call it, equally often.

        Raises:
            RankZeroFailed: On the other ranks, if rank 0 raised.
        """
        self._share(lambda: self.optimizer and self.optimizer.step())

    def _share(self, act: Callable[[], Any]) -> None:
        def lead() -> int:
            act()
            assert self.optimizer is not None, "rank 0 has one"
            # After a resynchronisation, rank 0 may hold another state of the same epoch.
            before, self._shared = self._shared, self.optimizer.id
            return 2 * self._shared.epoch + (self._shared != before) + FAILED + 1

        told = _together(lead, self._parameters[0].device, self._group)
        self.epoch, changed = divmod(told - FAILED - 1, 2)
        if changed:
            for parameter in self._parameters:
                _broadcast(parameter.detach(), self._group)


def _together(lead: Callable[[], int], device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Return on every rank the result of `lead` on rank 0; if it raises, all raise, so that no rank waits for ever."""
    told = torch.full((), FAILED, dtype=torch.int64, device=device)
    try:
        if dist.get_rank(group) == LEADER:
            told.fill_(lead())
    finally:
        _broadcast(told, group)
    if int(told) == FAILED:
        raise RankZeroFailed("rank 0 could not step", "its own error says why")
    return int(told)


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.broadcast(tensor, LEADER if group is None else dist.get_global_rank(group, LEADER), group)


def _write_unused(bucket: Bucket) -> None:
    """Write every parameter's gradient, because DDP skips parameters that no rank has used."""
    for parameter, gradient in zip(bucket.parameters, bucket.gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        elif parameter.grad.data_ptr() != gradient.data_ptr():
            parameter.grad.copy_(gradient)


def _require_on_leader(what: str, given: object, rank: int) -> None:
    if (given is None) == (rank == LEADER):
        got = "None" if given is None else what
        raise ValueError(f"expected {what} on rank {LEADER} and None on others, got {got} on rank {rank}")
