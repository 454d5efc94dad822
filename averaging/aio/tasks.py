"""A set of tasks and a timer, as every driver needs them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)


class TaskSet:
    """The tasks of one owner, which the log names. The set holds a task while it runs, and logs a failure."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` in a task of its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Cancel all of them, and wait until they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Only a bug of ours ends a task by an exception.
            log.error("%s: a background task failed", self._owner, exc_info=task.exception())


class Alarm:
    """The timer of one machine: `wake` is called at its deadline."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline: float) -> None:
        """Wake at `deadline`, of the loop's clock, and no earlier; an infinite one is never."""
        self.cancel()
        if deadline != float("inf"):
            self._timer = asyncio.get_running_loop().call_at(deadline, self._wake)

    def cancel(self) -> None:
        """Do not wake."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
