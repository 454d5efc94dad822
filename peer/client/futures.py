"""Rounds and downloads that go on in the daemon, and their results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import structs

from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.peer.client.interrupts import uninterrupted
from equipoise.peer.control import messages
from equipoise.peer.control.client import ANSWER_SECONDS, Connection
from equipoise.peer.errors import DaemonLost
from equipoise.peer.shared_memory import SharedMemory

Ended = TypeVar("Ended")

GRACE = 0.8
"""Seconds past its timeout in which the daemon must have answered; with the copying, a call ends within a second."""

HUNG_SECONDS = 10.0
"""Grace in seconds beyond the timeout for downloads and polls. A daemon that digests an image on a crowded machine
answers seconds late."""


LEAST_SECONDS = 1.0
"""Least time for the answer of a daemon that should have answered before, and may be about to."""


class Pending(ABC, Generic[Ended]):
    """Work of the daemon for this client; collected once, by the first thread that calls `result`."""

    what: ClassVar[str]
    """Name of the work in messages."""

    grace: ClassVar[float]
    """Seconds past its deadline in which the daemon must have answered."""

    def __init__(self, link: Connection, reply: concurrent.futures.Future[Any], deadline: float) -> None:
        """`deadline` is on the clock of `link`."""
        self._link = link
        self._reply = reply
        self._deadline = deadline
        self._lock = threading.Lock()
        self._ended: Ended | Exception | None = None

    def _left(self, grace: float) -> float:
        """Seconds until the daemon must have answered, with some beyond its timeout."""
        return max(self._deadline + grace - self._link.clock(), 0.0)

    def done(self) -> bool:
        """Return whether `result` returns at once."""
        return self.wait(0.0)

    def wait(self, timeout: float) -> bool:
        """Wait, collecting nothing, until `done` or for `timeout` seconds; returns whether it is done.

        It is done, too, once the daemon must be taken for hung; `result` says so.
        """
        left = self._left(HUNG_SECONDS)
        return self._link.settled(self._reply, min(timeout, left)) or timeout >= left

    def result(self, timeout: float | None = None) -> Ended:
        """Wait for the end.

        Args:
            timeout: Seconds to wait here; by default until its own timeout, which always ends it.

        Raises:
            TimeoutError: It is still going on; call again later.
            Refused: The daemon did not begin it.
        """
        limit = max(self._left(self.grace), LEAST_SECONDS)
        if timeout is not None and timeout < limit and not self.wait(timeout):
            raise TimeoutError(f"the {self.what} has not ended within {timeout:g} s; call result() again")
        with self._lock:
            if self._ended is None:
                answer = self._answer(limit)
                with uninterrupted():
                    try:
                        self._ended = self._collect(answer)
                    except Exception as error:
                        self._ended = error  # The next round may have the memory by now.
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def _answer(self, limit: float) -> Any:
        """The daemon's answer, or an error, after `limit` seconds; later while it lives, see `Connection.wait`."""
        try:
            self._link.settled(self._reply, max(limit - ANSWER_SECONDS, 0.0))
            return self._link.wait(self._reply, min(limit, ANSWER_SECONDS))
        except Exception as error:
            return error

    @abstractmethod
    def _collect(self, answer: Any) -> Ended:
        """Make the result of the daemon's answer, or raise the error that came in its place; called once."""


class PendingRound(Pending[Outcome]):
    """The outcome of a round, and the tensors' new values, once the daemon has it.

    Tensors are written by the thread that calls `result`, the first time that it returns, and never before: the script
    that trains meanwhile decides when they change. If the daemon has gone, the outcome says so, and they do not change.

    Attributes:
        cancelled: Whether the script has withdrawn from it.
        stopped: Whether the search for its group was ended.
    """

    what = "round"
    grace = GRACE

    def __init__(
        self,
        link: Connection,
        request: messages.StartRound,
        deadline: float,
        settle: Callable[[Outcome | None], None],
        encoding: float,
    ) -> None:
        """Begin it; `settle` is called once, with None if the daemon refused the round.

        To encode the contribution has taken `encoding` seconds.
        """
        self._begun = link.lost is None
        super().__init__(link, link.start(request), deadline)
        self._run = request.run
        self._settle = settle
        self._encoding = encoding
        self._started = time.time()
        self.cancelled = self.stopped = False

    def stop_search(self, why: str) -> None:
        """End the search for a group, if none has formed yet; `result` is then not ok, and says `why`."""
        self.stopped = True
        if not self.done():
            with contextlib.suppress(DaemonLost):  # That ends it as well.
                self._link.ask(messages.StopRound(self._run, why))

    def cancel(self) -> None:
        """Withdraw from the round: it ends as soon as it can, and the tensors stay as they are.

        A round that has begun goes on without this script, for some seconds; the next round waits for its end.
        """
        self.cancelled = True
        if not self.done():
            self._link.start(messages.StopRound(self._run, "cancelled by the script"))
            self.wait(LEAST_SECONDS)
        if self.done():
            self.result()

    def _collect(self, answer: Any) -> Outcome:
        if isinstance(answer, DaemonLost):
            # A daemon that got the request may have voted for a mean that the others hold by now.
            answer = Outcome(
                ok=False, reason=str(answer), run=self._run, started=self._started, in_doubt=self._begun
            )
        elif isinstance(answer, Exception):
            self._settle(None)
            raise answer
        outcome: Outcome = answer
        if self.cancelled and outcome.ok:
            why = "cancelled by the script after the group had the mean"
            outcome = structs.replace(outcome, ok=False, reason=why)
        began = self._link.clock()
        self._settle(outcome)
        decoding = {"decode": self._link.clock() - began} if outcome.ok else {}
        return structs.replace(outcome, seconds={"encode": self._encoding, **outcome.seconds, **decoding})


class Download(Pending[FetchOutcome]):
    """A download by the daemon into memory of this process; see `Run.fetch`.

    Attributes:
        content: After an ok `result`: the image, or the encoded mean for `Run.decode`, u8 [`size`] in shared memory,
            of this process alone from then on. Empty before, and if not ok.
    """

    what = "download"
    grace = HUNG_SECONDS

    def __init__(self, link: Connection, request: messages.Fetch) -> None:
        """Begin."""
        deadline = link.clock() + check_timeout(request.timeout)
        self._run = request.run
        self.content = memoryview(b"")
        self._memory = SharedMemory.reserve(
            request.size
        )  # It closes itself where the request cannot be sent.
        super().__init__(link, link.start(request, [self._memory.fd]), deadline)

    def cancel(self) -> None:
        """End it; `result` then says that it was cancelled, unless it had ended before."""
        if not self.done():
            with contextlib.suppress(DaemonLost):  # That ends it as well.
                self._link.ask(messages.StopFetch(self._run))

    def _collect(self, answer: Any) -> FetchOutcome:
        try:
            if isinstance(answer, DaemonLost):
                return FetchOutcome(ok=False, reason=str(answer))
            if isinstance(answer, Exception):
                raise answer
            outcome: FetchOutcome = answer
            if outcome.ok:
                self.content = self._memory.view(outcome.size, writable=True)
            return outcome
        finally:
            self._memory.close()


def check_timeout(timeout: float) -> float:
    """A timeout in seconds that a round may have.

    Raises:
        ValueError: It is not a number above 0, or too large.
    """
    valid = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
    if not valid or not 0 < timeout <= messages.MAX_TIMEOUT:
        raise ValueError(
            f"expected a timeout of more than 0 and at most {messages.MAX_TIMEOUT:g} seconds, got {timeout!r}"
        )
    return float(timeout)
