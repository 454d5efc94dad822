"""Hugging Face Transformers: a callback for `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from equipoise.peer.run import Run
from equipoise.peer.training.adapters.accelerate import take_over
from equipoise.peer.training.adapters.schedule import paced
from equipoise.peer.training.optimizer import SwarmOptimizer


class SwarmCallback(TrainerCallback):  # type: ignore[misc]
    """Has a `Trainer` step with the swarm: `callbacks=[SwarmCallback(run, target_batch_size=4096)]`.

    It takes over at the start of training: the optimizer steps when the swarm has its target batch, the learning rate
    follows the swarm's epochs (so `max_steps` and warm-up count those), and `max_grad_norm` applies to the averaged
    gradient. What Trainer counts and logs as steps are its own micro-batches. Each peer must see other data: give each
    another `data_seed`, or another part of the data.

    Attributes:
        optimizer: The swarm's optimizer, from the start of training on: its `epoch`, `reason`, `last`.
    """

    def __init__(
        self, run: Run, *, target_batch_size: float, epochs: int | None = None, **options: Any
    ) -> None:
        """Say how the swarm steps.

        Args:
            run: Joined with the model that is given to the Trainer.
            target_batch_size: Samples, of all peers together, that make an update.
            epochs: The swarm's epoch at which training stops; None leaves the end to the Trainer.
            **options: `checkpoints`, and other fields of `equipoise.peer.training.Options`: by default the Trainer's
                `batch_size`, `clip` and `scheduler`.
        """
        self.optimizer: SwarmOptimizer | None = None
        self._run = run
        self._epochs = epochs
        self._options = {"target_batch_size": target_batch_size, **options}

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
            "scheduler": paced(kwargs["lr_scheduler"]),
        }
        self.optimizer = take_over(kwargs["optimizer"], self._run, **{**options, **self._options})
        args.max_grad_norm = 0.0  # It would clip by this peer's own norm, before the average.

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop where the swarm has made its epochs."""
        if self._epochs is not None and self.optimizer is not None and self.optimizer.epoch >= self._epochs:
            control.should_training_stop = True
