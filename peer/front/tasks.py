"""Background tasks, timers, and the driver of every machine of the program."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

from equipoise.limits import backoff

_T = TypeVar("_T")
_Event = TypeVar("_Event", contravariant=True)
_Action = TypeVar("_Action", covariant=True)

FIRST_RESTART_SECONDS = 0.5
MAX_RESTART_SECONDS = 30.0
"""Longest pause before a task that fails again and again is started again."""
MAX_CHARACTERS = 200
"""Longest text of an error in `status`."""
SHOWN_SECONDS = 600.0
"""Time for which `status` shows that a task has failed; the log keeps it."""

_log = logging.getLogger(__name__)


class Failures:
    """The tasks of one daemon that an error has ended of late, for `status`; the log has the tracebacks."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, str]] = {}

    def note(self, name: str, error: BaseException) -> None:
        """Note that the task `name` has failed; of the errors of a task, the first is shown."""
        why = f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
        _, first = self._noted.get(name, (0.0, f"the task {name} failed ({why}); see the log"))
        self._noted[name] = time.monotonic(), first

    def warnings(self) -> tuple[str, ...]:
        """Return a line for each."""
        since = time.monotonic() - SHOWN_SECONDS
        self._noted = {name: one for name, one in self._noted.items() if one[0] >= since}
        return tuple(text for _, text in self._noted.values())


failures: ContextVar[Failures] = ContextVar("failures", default=Failures())  # noqa: B039, of programs without daemons
"""Those of the daemon in whose context a task was started: a process may have several."""


class TaskSet:
    """The tasks of one owner: none is forgotten while it runs, fails unseen, or outlives its owner."""

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

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run `work()` in a task of its own, and again each time that an error ends it, until cancelled."""
        return self.spawn(_kept(work))

    def cancel(self) -> None:
        """Cancel all of them."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Cancel all of them, and wait until they have ended; idempotent."""
        await end(set(self._tasks))

    async def join(self) -> None:
        """Wait until all have ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Only a bug of ours, or a machine that has run out of something, ends a task by an exception.
            _failed(task.get_coro(), error)


async def _kept(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop, pause = asyncio.get_running_loop(), 0.0
    while True:
        began, running = loop.time(), work()
        try:
            return await running
        except Exception as error:
            _failed(running, error)
            if loop.time() - began > MAX_RESTART_SECONDS:
                pause = 0.0
        pause = backoff(pause, FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS)
        await asyncio.sleep(pause)


def _failed(work: object, error: BaseException) -> None:
    name = str(getattr(work, "__qualname__", work))
    _log.error("the task %s failed", name, exc_info=error)
    failures.get().note(name, error)


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


class Machine(Protocol[_Event, _Action]):
    """A state machine that does no input or output itself."""

    @property
    def deadline(self) -> float:
        """When the machine is to be woken, in seconds of its driver's clock; infinite for never."""

    def handle(self, event: _Event, now: float) -> Sequence[_Action]:
        """Take in an event; return the actions that it leads to, in order."""


class Driver(Generic[_Event, _Action]):
    """Feeds a machine its events, performs its actions, and wakes it at its deadline.

    Args:
        machine: Decides.
        perform: Performs one action. It may feed the machine another event, whose actions then come first.
        wake: Returns the event that says that the machine's deadline has come. A machine without deadlines needs none.
        clock: Tells the time in seconds; that of the running loop if the machine has deadlines.
    """

    def __init__(
        self,
        machine: Machine[_Event, _Action],
        perform: Callable[[_Action], None],
        wake: Callable[[], _Event] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._machine = machine
        self._perform: Callable[[_Action], None] | None = perform
        self._wake = wake
        self._clock = clock or asyncio.get_running_loop().time
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = math.inf

    def tell(self, event: _Event) -> None:
        """Feed the machine an event; do nothing once the driver has stopped."""
        if self._perform is not None:
            self.perform(self._machine.handle(event, self._clock()))

    def perform(self, actions: Sequence[_Action]) -> None:
        """Perform actions that the machine has returned."""
        perform = self._perform
        for action in actions:
            if perform is not None:
                perform(action)
        self._arm()

    def stop(self) -> None:
        """Feed the machine nothing any more, and let go of its owner, whose memory is free at once then.

        Actions that the machine has returned already are still performed.
        """
        self._perform = self._wake = None
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        # Most events move the deadline later. To wake early is harmless, and to set a timer is not free.
        if self._wake is None or (deadline := self._machine.deadline) >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = deadline
        self._timer = asyncio.get_running_loop().call_at(deadline, self._woken)

    def _woken(self) -> None:
        self._wakes_at = math.inf
        if self._wake is not None and self._clock() >= self._machine.deadline:
            self.tell(self._wake())
        self._arm()
