"""Curves of a run: TensorBoard, and Weights & Biases. Each writes `run.metrics()` after each round that made a mean."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from equipoise.peer.client.run import JoinedRun

log = logging.getLogger(__name__)


class _Curves:
    """Follows the rounds of a run. A writer that fails is told of once, and costs the training nothing."""

    def __init__(self, run: JoinedRun, write: Callable[[dict[str, float], int], object]) -> None:
        self._run, self._write, self._failed = run, write, False
        run.core.listeners.append(self._ended)

    def _ended(self) -> None:
        metrics = self._run.metrics()
        numbers = {f"{self._run.name}/{name}": value for name, value in metrics.items()}
        try:
            self._write(numbers, int(metrics["round"]))
        except Exception as error:
            if not self._failed:
                log.warning("run %s: its curves cannot be written: %s", self._run.name, error)
            self._failed = True


class TensorBoard(_Curves):
    """Writes curves for TensorBoard, from the next round on: `TensorBoard(run, SummaryWriter("logs"))`.

    The writer is torch's, or any object with its `add_scalar`. The step is the number of the round.
    """

    def __init__(self, run: JoinedRun, writer: Any) -> None:
        super().__init__(run, lambda numbers, at: [writer.add_scalar(*one, at) for one in numbers.items()])


class WandB(_Curves):
    """Logs curves to the script's run of Weights & Biases; starts one where `wandb.init` was not called.

    Raises ImportError without the package wandb.
    """

    def __init__(self, run: JoinedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        tracked = wandb.run or wandb.init(project=run.name)
        super().__init__(run, lambda numbers, _: tracked.log(numbers))
