"""Background tasks of one owner: none is forgotten while it runs, fails unseen, or outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class TaskSet:
    """Tasks that run until they end, or `stop`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run `work` in a task of its own."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def stop(self) -> None:
        """Cancel all, and wait until they have ended; idempotent."""
        await end(set(self._tasks))

    async def join(self) -> None:
        """Wait until all have ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Only a bug of ours ends a task by an exception.
            _log.error("a task failed", exc_info=task.exception())


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel `tasks`, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def sleep_until(event: asyncio.Event, seconds: float) -> None:
    """Wait until `event` is set, for at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
