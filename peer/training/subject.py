"""What a member trains and how: what it is given when it begins, and what it says when it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from equipoise.peer.training.image import ModelPart, TrainingState
from equipoise.peer.training.ports import TrainingRun
from equipoise.peer.training.replica import Alone
from equipoise.peer.training.trust import Trust

WAIT_SECONDS = 60.0
"""Sixteen processes that import torch on two cores take half of it."""

LOOK_SECONDS = 0.1
"""For one more look, where that time is over."""

FINISH_SECONDS = 10.0
"""How long one that ends stays at most: a round's stall, and some snapshot of a small model, fit in. Where all are as
far, it goes at once."""

log = logging.getLogger(__name__)

Update = Callable[[Mapping[str, torch.Tensor]], None]
"""Takes the mean, fp32, by name, and makes the update that all peers make alike."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What this peer decides for itself.

    Attributes:
        alone: What to do where nobody else is known: `train` or `wait`.
        patience: Seconds without company after which it trains alone.
        timeout: Seconds for one round.
        clock: Seconds on a steady clock.
        attends_always: Whether it attends rounds while it fetches means that it missed: that it has them does not tell
            at which of its own steps the others are, the end of a round does.
        trust: Whose word for the group's state it takes: of those it has trained with (`known`), or of all (`heads`).
        target: Samples, of all peers together, that make an update; None where something else does.
    """

    alone: Alone = "train"
    patience: float = 10.0
    timeout: float = 30.0
    clock: Callable[[], float] = time.monotonic
    attends_always: bool = False
    trust: Trust = "known"
    target: float | None = None


def wait_for(runs: Sequence[TrainingRun], peers: int) -> None:
    """Wait until so many others have joined each of these on equal terms; who does not come in time is met later.

    Raises:
        ValueError: That is no number of peers.
    """
    if isinstance(peers, bool) or not isinstance(peers, int) or peers < 0:
        raise ValueError(f"wait_for: expected a whole number of peers >= 0, got {peers!r}")
    deadline = time.monotonic() + WAIT_SECONDS
    for run in runs if peers else ():
        if not run.wait_for(peers, max(deadline - time.monotonic(), LOOK_SECONDS)):
            log.warning("run %s: not all of %d others came within %g s", run.name, peers, WAIT_SECONDS)


class Subject(NamedTuple):
    """What is trained.

    Attributes:
        tensors: What gradients, or differences, are exchanged of, by name.
        buffers: Those that travel with them.
        model: The part of the state that holds both.
        state: All of it.
        update: Makes an update.
    """

    tensors: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    model: ModelPart
    state: TrainingState
    update: Update


class Finished(NamedTuple):
    """What it came to.

    Attributes:
        in_step: Whether this peer ends with the group's last state, as far as it knows.
        reason: Why, or why not, one line.
    """

    in_step: bool
    reason: str
