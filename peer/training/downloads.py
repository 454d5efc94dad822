"""What a member is fetching from others, a snapshot or a mean that it missed: one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from equipoise.averaging.state import StateId
from equipoise.peer.errors import Refused
from equipoise.peer.futures import Fetched, PendingFetch, PendingMean, Recovered
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
        self._going: PendingFetch | PendingMean | None = None
        self._failed: type[events.FetchFailed | events.RecoveryFailed] = events.FetchFailed
        self._refused: events.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether something is being fetched."""
        return self._going is not None or self._refused is not None

    @property
    def recovering(self) -> bool:
        """Whether a mean is being fetched."""
        return self._going is not None and self._failed is events.RecoveryFailed

    def fetch(self, at_least: int, limit: int, among: tuple[str, ...] = ()) -> None:
        """Begin to fetch a snapshot of an epoch or a later one, of at most `limit` bytes; see `Run.fetch`."""
        self._begin(
            lambda: self._run.fetch(at_least, limit, FETCH_SECONDS, wait=False, among=among),
            events.FetchFailed,
        )

    def recover(
        self, after: StateId, timeout: float = RECOVER_SECONDS, proved: bool = False, patient: bool = False
    ) -> None:
        """Begin to fetch the mean that leads on from a state; see `Run.recover`."""
        self._begin(lambda: self._run.recover(after, timeout, proved, patient), events.RecoveryFailed)

    def _begin(
        self,
        start: Callable[[], PendingFetch | PendingMean],
        failed: type[events.FetchFailed | events.RecoveryFailed],
    ) -> None:
        self.stop()
        self._failed = failed
        try:
            self._going = start()
        except Refused as error:
            self._refused = failed(str(error))

    def stop(self) -> None:
        """Fetch nothing more, and let go of what has come."""
        going = self._going
        self._going = self._refused = self.image = self.mean = None
        if going is not None:
            going.cancel()

    def stop_snapshot(self) -> None:
        """Fetch no snapshot any more; a mean may be on its way."""
        if self._going is not None and not self.recovering:
            self.stop()

    def wait(self, seconds: float) -> bool:
        """Wait for what is being fetched, at most so long; returns whether nothing is, or it has ended."""
        return self._going is None or self._going.wait(seconds)

    def ended(self) -> events.Event | None:
        """What the download came to, if it has ended just now."""
        if self._going is None or not self._going.done():
            refused, self._refused = self._refused, None
            return refused
        going, self._going = self._going, None
        try:
            found = going.result()
            return self._fetched(found) if isinstance(found, Fetched) else self._recovered(found)
        except (ImageError, Refused) as error:  # Another donor, or another moment, may have a better one.
            return self._failed(str(error))

    def _fetched(self, fetched: Fetched) -> events.Event:
        if not fetched.ok or fetched.image is None:
            return events.FetchFailed(fetched.reason)
        image = self._state.read(torch.frombuffer(fetched.image, dtype=torch.uint8), foreign=True)
        if image.id != fetched.state:
            raise ImageError(f"donors offered {fetched.state}, the image says {image.id}")
        self.image = image
        return events.ImageFetched(image.id)

    def _recovered(self, found: Recovered) -> events.Event:
        outcome, self.behind, self.unheard = found.round, found.behind, found.unheard
        if not outcome.ok or outcome.state is None:
            return events.RecoveryFailed(outcome.reason, decided=not found.unheard)
        self.mean = found
        return events.MeanFetched(outcome.state, outcome.digest, outcome.counted(self._run.peer))
