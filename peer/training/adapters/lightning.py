"""Lightning: a callback for `Trainer`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_leaves

from equipoise.peer.client.run import JoinedRun
from equipoise.peer.errors import Refused
from equipoise.peer.training.adapters.schedule import SwarmSteps, paced
from equipoise.peer.training.adapters.sharing import share
from equipoise.peer.training.optimizer import swarm_optimizer


class SwarmCallback(SwarmSteps, Callback):  # type: ignore[misc]
    """Has a `Trainer` step with the swarm: `callbacks=[SwarmCallback(run, target_batch_size=4096, batch_size=32)]`.

    It takes over when training starts: the optimizer steps when the swarm has its target batch, and `gradient_clip_val`
    applies to the average. The end and the scheduler count the swarm's epochs: with `max_steps=100`, all peers end at
    epoch 100. Without `max_steps`, it is the number of steps that the Trainer makes of `max_epochs`. Each peer goes
    through its data as often as that takes. In all other places, Lightning's steps are this peer's micro-batches.
    """

    def __init__(self, run: JoinedRun, *, batch_size: float, **options: Any) -> None:
        """See `SwarmSteps`; `batch_size` is the samples in one batch.

        `accumulate_grad_batches` is counted in, and a shorter batch as it is.
        """
        super().__init__(run, **options)
        self._batch_size = batch_size

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the Trainer's end.

        Raises:
            Refused: There is more than one process or optimizer, or clipping by value.
        """
        _check(trainer, pl_module)
        self._end = self._epochs or trainer.estimated_stepping_batches
        # Both count this peer's own batches.
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the module's optimizer, as a checkpoint has left it, its scheduler, the clipping, and the data.

        Raises:
            Refused: The run has another module.
            TypeError: The scheduler wants a metric.
        """
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        options: dict[str, Any] = {
            "batch_size": self._batch_size * trainer.accumulate_grad_batches,
            "clip": trainer.gradient_clip_val or None,
            "scheduler": paced(schedulers[0] if schedulers else None),
        }
        self.optimizer = swarm_optimizer(self._run, trainer.optimizers[0], **{**options, **self._options})
        trainer.strategy.optimizers = [self.optimizer]
        trainer.gradient_clip_val = None  # It would clip by this peer's own norm, before the average.
        share(self._run, tree_leaves(trainer.train_dataloader), self._shares)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        if self.optimizer is not None:
            self.optimizer.count(self._size(batch) if self._count is None else self._count(batch))

    def _size(self, batch: Any) -> float:
        tensors = (one for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.ndim)
        return min(next(map(len, tensors), self._batch_size), self._batch_size)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss of the batch, and stop where the swarm has made its epochs."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._run.report(loss=loss)
        if self._is_over:
            trainer.should_stop = True


def _check(trainer: Trainer, module: LightningModule) -> None:
    if trainer.world_size > 1:
        told = f"expected one process, got {trainer.world_size}: they would be as many peers with one batch"
        raise Refused(told, "see equipoise.peer.training.ddp for a machine with several GPUs")
    if len(trainer.optimizers) != 1 or not module.automatic_optimization:
        told = f"expected automatic optimization with one optimizer, got {len(trainer.optimizers)}"
        hint = "with manual optimization, wrap each in configure_optimizers with a run of its own"
        raise Refused(told, hint)
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        hint = "set gradient_clip_algorithm='norm'"
        raise Refused("expected clipping by norm, got clipping by value", hint)
