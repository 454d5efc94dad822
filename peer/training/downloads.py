"""What a member is fetching from others, a snapshot or a mean that it missed: one at a time."""

from __future__ import annotations

import torch

from equipoise.averaging.state import StateId
from equipoise.peer.errors import Refused
from equipoise.peer.futures import PendingFetch, PendingMean, Recovered
from equipoise.peer.run import Run
from equipoise.peer.training import events
from equipoise.peer.training.image import Image, TrainingState
from equipoise.peer.training.safetensors_io import ImageError

FETCH_SECONDS = 600.0
"""For one snapshot; a gigabyte at 16 Mbit/s. It resumes from other donors within that."""

RECOVER_SECONDS = 60.0
"""For one mean, a tenth of a snapshot. That nobody has it is known in a moment."""


class Downloads:
    """At most one download, and what the last one brought.

    Attributes:
        image: The snapshot that has just come, checked, until the next begins.
        mean: The mean that has just come, until the next begins.
        behind: How many peers are not as far as this one, when it was last asked what came next.
        unheard: How many did not say then what they have.
    """

    def __init__(self, run: Run, state: TrainingState) -> None:
        self.image: Image | None = None
        self.mean: Recovered | None = None
        self.behind = self.unheard = 0
        self._run = run
        self._state = state
        self._fetch: PendingFetch | None = None
        self._recovery: PendingMean | None = None
        self._refused: events.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether something is being fetched."""
        return any(one is not None for one in (self._recovery, self._fetch, self._refused))

    @property
    def recovering(self) -> bool:
        """Whether a mean is being fetched."""
        return self._recovery is not None

    def fetch(self, at_least: int, limit: int, among: tuple[str, ...] = ()) -> None:
        """Begin to fetch a snapshot of an epoch or a later one, of at most `limit` bytes; see `Run.fetch`."""
        self.stop()
        try:
            self._fetch = self._run.fetch(at_least, limit, FETCH_SECONDS, wait=False, among=among)
        except Refused as error:
            self._refused = events.FetchFailed(str(error))

    def recover(
        self, after: StateId, timeout: float = RECOVER_SECONDS, proved: bool = False, patient: bool = False
    ) -> None:
        """Begin to fetch the mean that leads on from a state; see `Run.recover`."""
        self.stop()
        try:
            self._recovery = self._run.recover(after, timeout, proved, patient)
        except Refused as error:
            self._refused = events.RecoveryFailed(str(error))

    def stop(self) -> None:
        """Fetch nothing more, and let go of what has come."""
        going = self._fetch or self._recovery
        self._fetch = self._recovery = self._refused = self.image = self.mean = None
        if going is not None:
            going.cancel()

    def stop_snapshot(self) -> None:
        """Fetch no snapshot any more; a mean may be on its way."""
        if self._fetch is not None:
            self.stop()

    def wait(self, seconds: float) -> bool:
        """Wait for what is being fetched, at most so long; returns whether nothing is, or it has ended."""
        going = self._fetch or self._recovery
        return going is None or going.wait(seconds)

    def ended(self) -> events.Event | None:
        """What the download came to, if it has ended just now."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            return refused
        if self._recovery is not None and self._recovery.done():
            recovery, self._recovery = self._recovery, None
            return self._recovered(recovery)
        if self._fetch is not None and self._fetch.done():
            fetch, self._fetch = self._fetch, None
            return self._fetched(fetch)
        return None

    def _fetched(self, ended: PendingFetch) -> events.Event:
        try:
            fetched = ended.result()
            if not fetched.ok or fetched.image is None:
                return events.FetchFailed(fetched.reason)
            image = self._state.read(torch.frombuffer(fetched.image, dtype=torch.uint8), foreign=True)
            if image.id != fetched.state:
                raise ImageError(f"donors offered {fetched.state}, the image says {image.id}")
        except (ImageError, Refused) as error:  # Another donor, or another moment, may have a better one.
            return events.FetchFailed(str(error))
        self.image = image
        return events.ImageFetched(image.id)

    def _recovered(self, ended: PendingMean) -> events.Event:
        try:
            found = ended.result()
        except Refused as error:
            return events.RecoveryFailed(str(error))
        outcome, self.behind, self.unheard = found.round, found.behind, found.unheard
        if not outcome.ok or outcome.state is None:
            return events.RecoveryFailed(outcome.reason, decided=not found.unheard)
        self.mean = found
        return events.MeanFetched(outcome.state, outcome.digest, outcome.counted(self._run.peer))
