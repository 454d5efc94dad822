"""The best checkpoint of a run, by a metric of the group's evaluations."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch

from equipoise.averaging.state import StateId
from equipoise.peer.training.checkpoint_files import (
    Damaged,
    Subject,
    read_manifest,
    remove_checkpoint,
    write_checkpoint,
)

BEST = "best"
"""Name of the directory of the best checkpoint; no resume starts from it."""

NEW_BEST = ".new-best"
"""Name of a directory that is whole, and is about to take the place of the best one."""

Mode = Literal["max", "min"]
"""Whether the best value of a metric is the highest or the lowest."""


class Best:
    """Keeps one checkpoint beside the others of its directory: that of the state with the best value of a metric.

    Attributes:
        metric: The metric's name; empty if no checkpoint is the best.
    """

    def __init__(
        self, path: Path, subject: Subject, metric: str, mode: Mode, say: Callable[[int, str], None]
    ) -> None:
        """`path` is the run's directory; `say` takes the level and the text of a line of the log."""
        self.metric = metric
        self._path = path
        self._subject = subject
        self._mode = mode
        self._say = say
        self._held: tuple[StateId, torch.Tensor] | None = None
        self._thread: threading.Thread | None = None
        self._put_best()
        self._best = self._best_so_far() if metric else None

    def hold(self, held: tuple[StateId, torch.Tensor] | None) -> None:
        """Hold a state's image, u8 [bytes], until the next call: its score comes later."""
        self._held = held if self.metric else None

    def settle(self) -> None:
        """Wait until the thread has written its checkpoint."""
        if self._thread is not None:
            self._thread.join()

    def score(self, state: StateId, evaluation: Mapping[str, float]) -> None:
        """Note the group's evaluation of a state, as `Outcome.state` and `Outcome.evaluation` tell it.

        If its value of the metric is better than all values before, a thread writes the state as the best one. Call
        this before the call between steps that follows: only the state of the last such call is still held here.
        """
        value, before = evaluation.get(self.metric), self._best
        if self._held is None or self._held[0] != state or value is None:
            return
        if before is not None and (value <= before if self._mode == "max" else value >= before):
            return
        self.settle()
        self._best = value
        self._thread = threading.Thread(
            target=self._write_best, args=(*self._held, value), name="best checkpoint"
        )
        self._thread.start()

    def _write_best(self, state: StateId, image: torch.Tensor, value: float) -> None:
        """Write the best checkpoint so far, in place of the one before."""
        named = f"with the {'highest' if self._mode == 'max' else 'lowest'} {self.metric} so far, {value:g}"
        new = self._path / NEW_BEST
        try:
            write_checkpoint(new, self._subject, state, image.numpy().data, {self.metric: value})
            self._put_best()
        except Exception as error:
            self._say(logging.ERROR, f"epoch {state.epoch}, {named}, could not be written: {error}")
            return
        self._say(logging.INFO, f"epoch {state.epoch}, {named}, is at {self._path / BEST}")

    def _best_so_far(self) -> float | None:
        """Value of the metric of the best checkpoint that is there; None without one of this training.

        It counts for a training that starts anew, too: a user may have forgotten to resume.
        """
        with contextlib.suppress(Damaged):
            manifest = read_manifest(self._path / BEST)
            return manifest.scores.get(self.metric) if manifest.subject == self._subject else None
        return None

    def _put_best(self) -> None:
        """Put a new best checkpoint, which is whole, into its place; after a crash the next start does."""
        new, best = self._path / NEW_BEST, self._path / BEST
        if new.exists():
            if best.exists():
                remove_checkpoint(best)
            new.rename(best)
