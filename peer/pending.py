"""What has been started and goes on in the daemon: what `wait=False` returns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from equipoise.averaging.outcome import Outcome
from equipoise.peer.errors import DaemonLost, EquipoiseError
from equipoise.peer.link import Link
from equipoise.peer.messages import Done, ReplyBody, RoundEnded, StartRound, StopRound

Ended = TypeVar("Ended")

MAX_TIMEOUT = 86_400.0
"""A day; a longer wait is a mistake in the unit."""

GRACE = 0.8
"""Seconds past its timeout in which the daemon must have answered; with the copying, a call ends within a second."""


class Pending(ABC, Generic[Ended]):
    """What the daemon is working on for this client; collected once, by the first thread that calls `result`."""

    what: ClassVar[str]
    """What it is, in messages."""

    grace: ClassVar[float]
    """Seconds past its deadline in which the daemon must have answered."""

    def __init__(self, link: Link, reply: concurrent.futures.Future[ReplyBody], deadline: float) -> None:
        """`deadline` is on the monotonic clock."""
        self._link = link
        self._reply = reply
        self._deadline = deadline
        self._lock = threading.Lock()
        self._ended: Ended | EquipoiseError | None = None

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._reply.done()

    def wait(self, timeout: float) -> bool:
        """Wait, collecting nothing, until `done` or for `timeout` seconds; returns whether it is done."""
        return bool(concurrent.futures.wait([self._reply], timeout).done)

    def result(self, timeout: float | None = None) -> Ended:
        """Wait for the end.

        Args:
            timeout: Seconds to wait here; by default until its own timeout, which always ends it.

        Raises:
            TimeoutError: It is still going on; call again later.
            Refused: The daemon did not begin it; says why.
        """
        limit = max(self._deadline + self.grace - time.monotonic(), 0.0)
        if timeout is not None and timeout < limit and not self.wait(timeout):
            raise TimeoutError(f"the {self.what} has not ended within {timeout:g} s; call result() again")
        with self._lock:
            if self._ended is None:
                self._ended = self._collect(limit)
        if isinstance(self._ended, EquipoiseError):
            raise self._ended
        return self._ended

    @abstractmethod
    def _collect(self, limit: float) -> Ended | EquipoiseError:
        """Wait `limit` seconds for the daemon's answer, and do what follows from it."""


class PendingRound(Pending[Outcome]):
    """The outcome of a round, and the tensors' new values, once the daemon has it.

    Tensors are written by the thread that calls `result`, the first time that it returns, and never before: the script
    that trains meanwhile decides when they change. If the daemon has gone, the outcome is not ok and says so, and they
    are untouched.
    """

    what = "round"
    grace = GRACE

    def __init__(
        self,
        link: Link,
        request: StartRound,
        deadline: float,
        settle: Callable[[Outcome | None], None],
    ) -> None:
        """Begin it; `settle` is called once, with None if the daemon refused the round."""
        super().__init__(link, link.start(request), deadline)
        self._run = request.run
        self._settle = settle
        self._started = time.time()

    def stop_search(self, why: str) -> None:
        """End the search for a group, if none has formed yet; `result` is then not ok, and says `why`."""
        if not self.done():
            with contextlib.suppress(DaemonLost):  # That ends it as well.
                self._link.ask(StopRound(self._run, why), Done)

    def _collect(self, limit: float) -> Outcome | EquipoiseError:
        try:
            outcome = self._link.wait(self._reply, RoundEnded, limit).outcome
        except DaemonLost as error:
            outcome = Outcome(ok=False, reason=str(error), run=self._run, started=self._started)
        except EquipoiseError as error:
            self._settle(None)
            return error
        self._settle(outcome)
        return outcome


def check_timeout(timeout: float) -> float:
    """A timeout in seconds that a round may have.

    Raises:
        ValueError: It is none.
    """
    valid = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
    if not valid or not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(
            f"expected a timeout of more than 0 and at most {MAX_TIMEOUT:g} seconds, got {timeout!r}"
        )
    return float(timeout)
