"""What a script gets of a download: `Fetched`, and `PendingFetch` while it goes on."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from dataclasses import dataclass, field

from equipoise.averaging.state import StateId
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.images import SharedImage
from equipoise.peer.link import Link
from equipoise.peer.messages import Done, ReplyBody, StateFetched, StopFetch

GRACE = 10.0
"""Seconds past its timeout in which the daemon must have answered; it may just then be busy with an image."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a download came to.

    Attributes:
        ok: Whether there is an image, every byte of it proved by the digest that the donors agreed on.
        reason: Why it ended so, in one line.
        state: Which state the image is of; None if not ok.
        image: u8 [bytes] in shared memory, of this process alone from now on; None if not ok.
        sources: PeerID -> bytes that came from it.
        seconds: From the first question to the last byte.
    """

    ok: bool
    reason: str
    state: StateId | None = None
    image: memoryview | None = None
    sources: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class PendingFetch:
    """A download that goes on in the daemon."""

    def __init__(
        self,
        link: Link,
        run: str,
        reply: concurrent.futures.Future[ReplyBody],
        deadline: float,
        memory: SharedImage,
    ) -> None:
        """`deadline` is on the monotonic clock; `memory` is where the daemon puts the image, and taken over."""
        self._link = link
        self._run = run
        self._reply = reply
        self._deadline = deadline
        self._memory = memory
        self._lock = threading.Lock()
        self._ended: Fetched | EquipoiseError | None = None

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self._reply.done()

    def wait(self, timeout: float) -> bool:
        """Wait until `done` or for `timeout` seconds; returns whether it is done."""
        return bool(concurrent.futures.wait([self._reply], timeout).done)

    def cancel(self) -> None:
        """End it; `result` then says that it was cancelled, unless it had ended before.

        Raises:
            DaemonLost: The daemon has gone.
        """
        if not self.done():
            self._link.ask(StopFetch(self._run), Done)

    def result(self, timeout: float | None = None) -> Fetched:
        """Wait for the end.

        Args:
            timeout: Seconds to wait here; by default until the download's own timeout, which always ends it.

        Raises:
            TimeoutError: It is still going on; call again later.
            Refused: The daemon did not begin it; says why.
            DaemonLost: The daemon has gone.
        """
        limit = max(self._deadline + GRACE - time.monotonic(), 0.0)
        if timeout is not None and timeout < limit and not self.wait(timeout):
            raise TimeoutError(f"the download has not ended within {timeout:g} s; call result() again")
        with self._lock:
            if self._ended is None:
                self._ended = self._collect(limit)
        if isinstance(self._ended, EquipoiseError):
            raise self._ended
        return self._ended

    def _collect(self, limit: float) -> Fetched | EquipoiseError:
        try:
            outcome = self._link.wait(self._reply, StateFetched, limit).outcome
            image = self._memory.view(outcome.size, writable=True) if outcome.ok else None
        except EquipoiseError as error:
            return error
        finally:
            self._memory.close()
        return Fetched(
            outcome.ok, outcome.reason, outcome.state, image, dict(outcome.sources), outcome.seconds
        )
