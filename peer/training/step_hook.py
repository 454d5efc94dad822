"""Who is told of the steps of this process's optimizers: what exchanges now and then what local steps have led to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

_watching: list[StepHook] = []
_hook: list[RemovableHandle] = []
_lock = threading.Lock()


class StepHook:
    """Calls back after each step of the optimizer that holds some parameters; of several such the first one counts.

    Args:
        parameters: Some of them must be the optimizer's.
        stepped: Called with the optimizer, in the thread that made the step.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], stepped: Callable[[torch.optim.Optimizer], None]
    ) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._stepped = stepped
        self._counted: weakref.ref[torch.optim.Optimizer] | None = None

    def start(self) -> None:
        """Begin: one hook serves all, for torch may be calling its hooks in another thread."""
        with _lock:
            _watching.append(self)
            if not _hook:
                _hook.append(register_optimizer_step_post_hook(_tell))

    def stop(self) -> None:
        """Call back no more."""
        with _lock:
            _watching.remove(self)
            if not _watching:
                _hook.pop().remove()

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of this process has made a step."""
        if self._counted is None or self._counted() is None:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not held & self._parameters:
                return
            self._counted = weakref.ref(optimizer)
        if self._counted() is optimizer:
            self._stepped(optimizer)


def _tell(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watching in tuple(_watching):
        watching.tell(optimizer)
