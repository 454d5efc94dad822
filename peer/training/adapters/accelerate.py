"""Hugging Face Accelerate: a prepared optimizer that steps with the swarm."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from torch.utils.data import RandomSampler

from equipoise.peer.client.run import JoinedRun
from equipoise.peer.errors import Refused
from equipoise.peer.training.adapters.schedule import paced
from equipoise.peer.training.adapters.sharing import sampling_of, share
from equipoise.peer.training.optimizer import SwarmOptimizer, swarm_optimizer


def step_with_swarm(
    accelerator: Accelerator,
    run: JoinedRun,
    optimizer: AcceleratedOptimizer,
    scheduler: AcceleratedScheduler | None = None,
    *,
    batch_size: float,
    shares: bool = True,
    **options: Any,
) -> SwarmOptimizer:
    """Have what `accelerator.prepare` returned step with the swarm; the loop stays as it is.

    The scheduler counts the swarm's epochs, so let the loop count them too: `while swarm.epoch < 100`, where `swarm` is
    what this returns. Batches are counted differently by each peer, and peers that count those do not end together.
    Leave out `accelerator.clip_grad_norm_`, which would clip by this peer's own norm, and give `clip` here.

    Args:
        accelerator: Of one process: a machine with several GPUs is one peer, see `equipoise.peer.training.ddp`.
        run: Joined with the model.
        optimizer: A prepared optimizer.
        scheduler: A prepared scheduler; it then follows the swarm's epochs, and stepping it in the loop does nothing.
        batch_size: Samples in one backward pass; gradient accumulation is counted in. Of batches that differ, tell
            `count` of what this returns the number before each step.
        shares: Whether the prepared loaders that shuffle draw this peer's share of a data set that others have too:
            `Shares` takes the place of that. Peers whose data differ draw all of theirs anyway.
        **options: Fields of `equipoise.peer.training.Options`, and `checkpoints`; `target_batch_size` is required.

    Returns:
        What steps now, inside `optimizer`: its `epoch`, `reason`, `last`.

    Raises:
        Refused: There is more than one process, or the optimizer holds other parameters than the run.
        TypeError: The optimizer or the scheduler has not been prepared, or the scheduler wants a metric.
    """
    for given, kind in ((optimizer, AcceleratedOptimizer), (scheduler, AcceleratedScheduler | None)):
        if not isinstance(given, kind):
            raise TypeError(f"expected what accelerator.prepare returns, got {type(given).__name__}")
    size = batch_size * accelerator.gradient_accumulation_steps
    if scheduler is not None:
        options["scheduler"] = paced(scheduler.scheduler)
    swarm = take_over(optimizer, run, batch_size=size, **options)
    samplers = ((one, getattr(sampling_of(one), "sampler", None)) for one in accelerator._dataloaders)
    share(
        run, [one for one, sampler in samplers if isinstance(sampler, RandomSampler)], shares
    )  # Others evaluate.
    return swarm


def take_over(optimizer: AcceleratedOptimizer, run: JoinedRun, **options: Any) -> SwarmOptimizer:
    """Put the swarm's optimizer between a prepared one and what it wraps."""
    processes = AcceleratorState().num_processes
    if processes > 1:
        told = f"expected one process, got {processes}: they would be {processes} peers with one batch"
        raise Refused(told, "see equipoise.peer.training.ddp for a machine with several GPUs")
    swarm = swarm_optimizer(run, optimizer.optimizer, **options)
    # A new start, in place, since others hold it: it keeps bound methods of what it wraps.
    optimizer.__init__(swarm, device_placement=optimizer.device_placement, scaler=optimizer.scaler)
    return swarm
