"""The downloads of one peer that lacks a mean, or the group's state: at most one at a time."""

from __future__ import annotations

import torch
from msgspec import structs

from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication import events
from equipoise.averaging.replication.answers import Wish
from equipoise.peer.client.futures import Download
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.errors import Refused
from equipoise.peer.training.image import Image, TrainingState

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
        behind: Number of peers that were not as far as this one, by the answers to its last question for a mean.
        unheard: Number of peers that did not answer that question.
        recovering: Whether a mean is being fetched.
    """

    def __init__(self, run: JoinedRun, state: TrainingState) -> None:
        self.image: Image | None = None
        self.behind = self.unheard = 0
        self._barred: tuple[str, ...] = ()
        self._run = run
        self._state = state
        self._going: Download | None = None
        self.recovering = False
        self._refused: events.Fetched | None = None

    @property
    def busy(self) -> bool:
        """Whether a download goes on, or its end has not been taken by `ended`."""
        return self._going is not None or self._refused is not None

    def begin(self, wish: Wish, timeout: float) -> None:
        """Begin a download; see `Run.fetch`. It leaves out the donors of an image that did not fit, once."""
        self.stop()
        self.recovering = wish.after is not None
        try:
            barred = frozenset(() if self.recovering else self._barred)
            self._going = self._run.core.fetch(structs.replace(wish, barred=barred), timeout)
        except Refused as error:
            self._refused = _failed(error)

    def stop(self) -> None:
        """Stop the download, and drop the last result."""
        going = self._going
        self._going = self._refused = self.image = None
        self.recovering = False
        if going is not None:
            going.cancel()

    def wait(self, seconds: float) -> bool:
        """Wait for the download, at most `seconds`; returns whether it has ended, or none was going on."""
        return self._going is None or self._going.wait(seconds)

    def ended(self) -> events.Fetched | None:
        """Return the download's end as an event, if it has just ended."""
        if self._going is None or not self._going.done():
            refused, self._refused = self._refused, None
            return refused
        going, self._going = self._going, None
        recovered, self.recovering = self.recovering, False
        try:
            found = going.result()
            if recovered:
                self.behind, self.unheard = found.behind, found.unheard
            else:
                self._read(found, going.content)
        except (ImageError, Refused) as error:  # Another donor may have a better image, now or later.
            return _failed(error)
        return events.Fetched(found, going.content)

    def _read(self, found: FetchOutcome, content: memoryview) -> None:
        barred, self._barred = self._barred, ()
        if not found.ok:
            return
        try:
            image = self._state.read(torch.frombuffer(content, dtype=torch.uint8), foreign=True)
            if image.id != found.state:
                raise ImageError(f"donors offered {found.state}, the image says {image.id}")
        except ImageError:
            self._barred = (*barred, *found.sources)[-MAX_BARRED:]
            raise
        self.image = image


def _failed(error: Exception) -> events.Fetched:
    return events.Fetched(FetchOutcome(ok=False, reason=str(error)))
