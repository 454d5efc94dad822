"""The downloads of one peer that lacks a mean, or the group's state: at most one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.state import StateId
from equipoise.peer.client.futures import Download
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.errors import Refused
from equipoise.peer.training import events
from equipoise.peer.training.image import Image, TrainingState
from equipoise.peer.training.safetensors_io import ImageError

FETCH_SECONDS = 600.0
"""Longest time for one snapshot: a gigabyte at 16 Mbit/s. Within it, a download resumes from other donors."""

RECOVER_SECONDS = 60.0
"""Longest time for one mean: a tenth of a snapshot's. If no peer has the mean, the peer knows that in a moment."""

MAX_BARRED = 256
"""Most peers that are left out; see `Run.fetch`."""


class Downloads:
    """At most one download, and the result of the last one.

    Attributes:
        image: The snapshot that has just come, checked, until the next download begins.
        mean: The mean that has just come, encoded, and the outcome of its round, until the next download begins.
        behind: Number of peers that were not as far as this one, by the answers to its last question for a mean.
        unheard: Number of peers that did not answer that question.
    """

    def __init__(self, run: JoinedRun, state: TrainingState) -> None:
        self.image: Image | None = None
        self.mean: tuple[memoryview, Outcome] | None = None
        self.behind = self.unheard = 0
        self._barred: tuple[str, ...] = ()
        self._run = run
        self._state = state
        self._going: Download | None = None
        self._failed: type[events.FetchFailed | events.RecoveryFailed] = events.FetchFailed
        self._refused: events.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether a download goes on, or its end has not been taken by `ended`."""
        return self._going is not None or self._refused is not None

    @property
    def recovering(self) -> bool:
        """Whether a mean is being fetched."""
        return self._going is not None and self._failed is events.RecoveryFailed

    def fetch(self, at_least: int, limit: int, among: tuple[str, ...] = ()) -> None:
        """Begin to fetch a snapshot of an epoch or a later one, of at most `limit` bytes; see `Run.fetch`."""
        # The donors of an image that did not fit are left out until no other donor has one either.
        barred = {"barred": self._barred} if self._barred else {}
        self._begin(
            events.FetchFailed, partial(self._run.fetch, at_least, limit, FETCH_SECONDS, among, **barred)
        )

    def recover(
        self, after: StateId, circle: tuple[str, ...], timeout: float, proved: bool, patient: bool
    ) -> None:
        """Begin to fetch the mean that the group applied to the state `after`; see `Run.recover`."""
        self._begin(
            events.RecoveryFailed, partial(self._run.recover, after, timeout, circle, proved, patient)
        )

    def _begin(
        self,
        failed: type[events.FetchFailed | events.RecoveryFailed],
        start: Callable[[], Download],
    ) -> None:
        self.stop()
        self._failed = failed
        try:
            self._going = start()
        except Refused as error:
            self._refused = failed(str(error))

    def stop(self) -> None:
        """Stop the download, and drop the last result."""
        going = self._going
        self._going = self._refused = self.image = self.mean = None
        if going is not None:
            going.cancel()

    def stop_snapshot(self) -> None:
        """Stop the download of a snapshot; a mean's download goes on."""
        if self._going is not None and not self.recovering:
            self.stop()

    def wait(self, seconds: float) -> bool:
        """Wait for the download, at most `seconds`; returns whether it has ended, or none was going on."""
        return self._going is None or self._going.wait(seconds)

    def ended(self) -> events.Event | None:
        """Return the download's end as an event, if it has just ended."""
        if self._going is None or not self._going.done():
            refused, self._refused = self._refused, None
            return refused
        going, self._going = self._going, None
        try:
            take = self._recovered if self._failed is events.RecoveryFailed else self._fetched
            return take(going.result(), going.content)
        except (ImageError, Refused) as error:  # Another donor may have a better image, now or later.
            return self._failed(str(error))

    def _fetched(self, found: FetchOutcome, content: memoryview) -> events.Event:
        barred, self._barred = self._barred, ()
        if not found.ok:
            return events.FetchFailed(found.reason)
        try:
            image = self._state.read(torch.frombuffer(content, dtype=torch.uint8), foreign=True)
            if image.id != found.state:
                raise ImageError(f"donors offered {found.state}, the image says {image.id}")
        except ImageError:
            self._barred = (*barred, *found.sources)[-MAX_BARRED:]
            raise
        self.image = image
        return events.ImageFetched(image.id, found.voters)

    def _recovered(self, found: FetchOutcome, content: memoryview) -> events.Event:
        outcome, self.behind, self.unheard = found.round, found.behind, found.unheard
        if outcome is None or outcome.state is None:
            return events.RecoveryFailed(found.reason, decided=not found.unheard, beyond=found.beyond)
        self.mean = content, outcome
        makers = tuple(one for one in outcome.contributors if outcome.states.get(one) == outcome.state)
        return events.MeanFetched(outcome.state, outcome.digest, outcome.counted(self._run.peer), makers)
