"""Training by local steps: a `with` block around the user's loop that is called after each step of its optimizer."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Self, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

End = TypeVar("End")

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


class LocalTraining(ABC, Generic[End]):
    """A `with` block in which the steps of the loop's optimizer are followed. It ends with `finish`, unless it fails.

    Attributes:
        steps: Steps of the loop's optimizer.
        finished: What `finish` has returned.
    """

    _hook: StepHook

    def __init__(self) -> None:
        self.steps = 0
        self.finished: End | None = None

    @abstractmethod
    def finish(self) -> End:
        """End together with the others."""

    def __enter__(self) -> Self:
        self._hook.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hook.stop()
        if kind is None and self.finished is None:
            self.finish()


def _tell(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watching in tuple(_watching):
        watching.tell(optimizer)
