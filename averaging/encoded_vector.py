"""A run's encoded vector in memory, as a script and its daemon share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from equipoise.averaging.layout import Layout
from equipoise.averaging.partition import Part


class EncodedVector:
    """Joins the slices of a part to its payload, and takes payloads apart.

    Args:
        layout: Where the planes lie.
        memory: u8 [`layout.stored_size`].
    """

    def __init__(self, layout: Layout, memory: memoryview) -> None:
        self._layout = layout
        self._memory = memory

    def read(self, part: Part, payload: memoryview) -> None:
        """Copy the encoded values of a part, which begins at a granule and is of one region, to `payload`."""
        for place, piece in self._pieces(part, payload):
            piece[:] = self._memory[place]

    def write(self, part: Part, payload: memoryview) -> None:
        """Copy the payload of such a part to its places."""
        for place, piece in self._pieces(part, payload):
            self._memory[place] = piece

    def clear(self, start: int, stop: int) -> None:
        """Make zeros of the padding from `start`, behind a tensor, to `stop`, the next granule."""
        for place in self._layout.slices(start, stop):
            self._memory[place] = bytes(place.stop - place.start)

    def _pieces(self, part: Part, payload: memoryview) -> Iterator[tuple[slice, memoryview]]:
        """The places of a part's encoded values, each with the piece of the payload that belongs there."""
        at = 0
        for place in self._layout.slices(part.start, part.stop):
            end = at + place.stop - place.start
            yield place, payload[at:end]
            at = end


class Vectors(NamedTuple):
    """The two encoded vectors of a round, u8 [`Layout.stored_size`] each.

    Attributes:
        contribution: This peer's. It may be memory of another process, which may write at any time: what is used of it
            is copied first, and then checked.
        mean: Takes the mean, part by part as it comes: undefined until the round has succeeded.
        clamped: How many values of the contribution were clamped when it was encoded.
    """

    contribution: memoryview
    mean: memoryview
    clamped: int = 0
