"""Curves of a run: TensorBoard, and Weights & Biases. Each writes `run.metrics()` after each round that made a mean."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Protocol

from equipoise.peer.client.run import JoinedRun

log = logging.getLogger(__name__)


class Writer(Protocol):
    """A `torch.utils.tensorboard.SummaryWriter`, or another object with its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number."""


class _Curves:
    """Follows the rounds of a run. A writer that fails is told of once, and costs the training nothing."""

    def __init__(self, run: JoinedRun) -> None:
        self._run = run
        self._failed = False
        run.core.listeners.append(self._ended)

    def _ended(self) -> None:
        try:
            self._write(self._run.metrics())
        except Exception as error:
            if not self._failed:
                log.warning("run %s: its curves cannot be written: %s", self._run.name, error)
            self._failed = True

    def _write(self, metrics: dict[str, float]) -> None:
        raise NotImplementedError


class TensorBoard(_Curves):
    """Writes curves for TensorBoard: `TensorBoard(run, SummaryWriter("logs"))`; the step is the number of the round."""

    def __init__(self, run: JoinedRun, writer: Writer) -> None:
        """Write from the next round on."""
        super().__init__(run)
        self._writer = writer

    def _write(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{self._run.name}/{name}", value, int(metrics["round"]))


class WandB(_Curves):
    """Logs curves to the script's run of Weights & Biases, and starts one where `wandb.init` was not called."""

    def __init__(self, run: JoinedRun) -> None:
        """Log from the next round on.

        Raises:
            ImportError: The package wandb is not installed.
        """
        super().__init__(run)
        wandb: Any = importlib.import_module("wandb")
        self._log = (wandb.run or wandb.init(project=run.name)).log

    def _write(self, metrics: dict[str, float]) -> None:
        self._log({f"{self._run.name}/{name}": value for name, value in metrics.items()})
