"""What a script gets of a download: `Fetched` or `Recovered`, and a `Pending` while it goes on."""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId
from equipoise.peer.errors import DaemonLost, EquipoiseError
from equipoise.peer.images import SharedImage
from equipoise.peer.link import Link
from equipoise.peer.messages import (
    Done,
    FetchMean,
    FetchState,
    MeanFetched,
    RequestBody,
    StateFetched,
    StopFetch,
)
from equipoise.peer.pending import Pending, check_timeout

Ended = TypeVar("Ended")

Named = Mapping[str, torch.Tensor]

Reader = Callable[[torch.Tensor], tuple[Named, Named]]
"""Takes a mean, f32 [D]; returns its values, and its buffers, by name."""

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


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of a mean that this peer missed.

    Attributes:
        outcome: What its round came to for those who did not; not ok if the mean is not to be had.
        values: By name, fp32, in shared memory: what `Run.mean` would hold. Empty if not ok.
        buffers: By name, fp32: what the module's buffers would become.
        sources: PeerID -> bytes that came from it.
        behind: If not ok: how many peers are not as far as this one.
        unheard: If not ok: how many have not said whether they have it: a round may still be going on there.
    """

    outcome: Outcome
    values: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    behind: int = 0
    unheard: int = 0


class _Download(Pending[Ended]):
    """Something that the daemon downloads into memory of this process."""

    what = "download"
    grace = GRACE

    def __init__(
        self, link: Link, run: str, request: RequestBody, timeout: float, memory: SharedImage
    ) -> None:
        """Begin; `memory` is where it goes, and taken over."""
        deadline = time.monotonic() + check_timeout(timeout)
        try:
            super().__init__(link, link.start(request, [memory.fd]), deadline)
        except BaseException:
            memory.close()
            raise
        self._run = run
        self._memory = memory

    def cancel(self) -> None:
        """End it; `result` then says that it was cancelled, unless it had ended before."""
        if not self.done():
            with contextlib.suppress(DaemonLost):  # That ends it as well.
                self._link.ask(StopFetch(self._run), Done)

    def _collect(self, limit: float) -> Ended | EquipoiseError:
        try:
            return self._take(limit)
        except DaemonLost as error:
            return self._failed(str(error))
        except EquipoiseError as error:
            return error
        finally:
            self._memory.close()

    @abstractmethod
    def _take(self, limit: float) -> Ended:
        """The end of the download, once the daemon says it."""

    @abstractmethod
    def _failed(self, reason: str) -> Ended:
        """The end of a download whose daemon has gone."""


class PendingFetch(_Download[Fetched]):
    """The download of a state; see `Run.fetch`."""

    def __init__(
        self, link: Link, run: str, at_least: int, limit: int, timeout: float, among: tuple[str, ...] = ()
    ) -> None:
        request = FetchState(run, at_least, limit, check_timeout(timeout), among)
        super().__init__(link, run, request, timeout, SharedImage.reserve(limit))

    def _take(self, limit: float) -> Fetched:
        outcome = self._link.wait(self._reply, StateFetched, limit).outcome
        image = self._memory.view(outcome.size, writable=True) if outcome.ok else None
        return Fetched(
            outcome.ok, outcome.reason, outcome.state, image, dict(outcome.sources), outcome.seconds
        )

    def _failed(self, reason: str) -> Fetched:
        return Fetched(False, reason)


class PendingMean(_Download[Recovered]):
    """The download of a mean; see `Run.recover`."""

    def __init__(self, link: Link, request: FetchMean, read: Reader) -> None:
        super().__init__(link, request.run, request, request.timeout, SharedImage.reserve(request.size))
        self._read = read

    def _take(self, limit: float) -> Recovered:
        found = self._link.wait(self._reply, MeanFetched, limit).outcome
        if not found.round.ok:
            return Recovered(found.round, behind=found.behind, unheard=found.unheard)
        memory = self._memory.view(self._memory.capacity, writable=True)
        values, buffers = self._read(torch.frombuffer(memory, dtype=torch.float32))
        return Recovered(found.round, values, buffers, dict(found.sources))

    def _failed(self, reason: str) -> Recovered:
        return Recovered(Outcome(ok=False, reason=reason, run=self._run, started=time.time()))
