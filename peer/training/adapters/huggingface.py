"""Hugging Face Transformers: a callback for `Trainer`."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.hooks import RemovableHandle
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from equipoise.peer.training.adapters.accelerate import take_over
from equipoise.peer.training.adapters.schedule import SwarmSteps, paced
from equipoise.peer.training.adapters.sharing import share
from equipoise.peer.training.counting import watch_batches


class SwarmCallback(SwarmSteps, TrainerCallback):  # type: ignore[misc]
    """Has a `Trainer` step with the swarm: `callbacks=[SwarmCallback(run, target_batch_size=4096)]`.

    It takes over at the start of training: the optimizer steps when the swarm has its target batch, and `max_grad_norm`
    applies to the averaged gradient. The end, the scheduler and the warm-up count the swarm's epochs: with
    `max_steps=100`, all peers end at epoch 100, with the last learning rate. Without `max_steps`, it is the number that
    the Trainer makes of `num_train_epochs`, and all peers must have it alike. Each goes through its data as often as
    that takes. `logging_steps`, `save_steps`, `eval_steps` and the Trainer's progress bar count this peer's own
    micro-batches. Peers with equal data sets draw a share each; peers that do not shuffle must have other data.
    """

    _batches: RemovableHandle | None = None
    _left = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over the Trainer's optimizer, its scheduler and its clipping.

        Raises:
            Refused: There is more than one process, or the run was joined with another model.
            TypeError: The scheduler wants a metric.
        """
        options: dict[str, Any] = {
            "batch_size": args.train_batch_size * args.gradient_accumulation_steps,
            "clip": args.max_grad_norm or None,
            "scheduler": paced(kwargs["lr_scheduler"], steps=state.max_steps),
        }
        self._end, self._planned = self._epochs or state.max_steps, state.max_steps
        self.optimizer = take_over(kwargs["optimizer"], self._run, **{**options, **self._options})
        if self._count is not None:
            self._batches = watch_batches(kwargs["model"], self._count, self.optimizer.count)
        share(self._run, [kwargs["train_dataloader"]], self._shares)
        args.max_grad_norm = 0.0  # It would clip by this peer's own norm, before the average.

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to count the samples of this pass over the data."""
        dataset = kwargs["train_dataloader"].dataset
        self._left = len(dataset) if has_length(dataset) else sys.maxsize

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say how many samples the micro-batch has: the last one of a pass may be short."""
        size = args.train_batch_size * args.gradient_accumulation_steps
        if self.optimizer is not None and "batch_size" not in self._options:
            self.optimizer.batch_size = max(min(size, self._left), 1)
        self._left -= size

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report the loss that the Trainer logs with this peer's next contributions."""
        if "loss" in (logs := kwargs.get("logs") or {}):
            self._run.report(loss=logs["loss"])

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move the Trainer's own end, which counts micro-batches, to where the swarm has made its epochs."""
        state.max_steps = state.global_step + (1 if self._is_over else 2)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count no more batches."""
        if self._batches is not None:
            self._batches.remove()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the Trainer's numbers as they were, for its report."""
        state.max_steps = self._planned


_plan = Trainer.set_initial_training_values


def _endless(trainer: Trainer, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The Trainer's plan; where a `SwarmCallback` says when training ends, with as many passes over the data."""
    passes, *others = _plan(trainer, *args, **kwargs)
    swarm = any(isinstance(one, SwarmCallback) for one in trainer.callback_handler.callbacks)
    return (sys.maxsize if swarm else passes, *others)


Trainer.set_initial_training_values = _endless  # It fixes the number of passes before it calls any callback.
