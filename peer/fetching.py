"""What a script gets of a download: `Fetched`, and `PendingFetch` while it goes on."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field

from equipoise.averaging.state import StateId
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.images import SharedImage
from equipoise.peer.link import Link
from equipoise.peer.messages import Done, ReplyBody, StateFetched, StopFetch
from equipoise.peer.pending import Pending

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


class PendingFetch(Pending[Fetched]):
    """A download that goes on in the daemon."""

    what = "download"
    grace = GRACE

    def __init__(
        self,
        link: Link,
        run: str,
        reply: concurrent.futures.Future[ReplyBody],
        deadline: float,
        memory: SharedImage,
    ) -> None:
        """`memory` is where the daemon puts the image, and taken over."""
        super().__init__(link, reply, deadline)
        self._run = run
        self._memory = memory

    def cancel(self) -> None:
        """End it; `result` then says that it was cancelled, unless it had ended before.

        Raises:
            DaemonLost: The daemon has gone.
        """
        if not self.done():
            self._link.ask(StopFetch(self._run), Done)

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
