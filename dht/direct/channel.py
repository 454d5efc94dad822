"""Frames over a direct stream."""

from __future__ import annotations

from collections.abc import Callable

from equipoise.dht.direct.streams import PlainStream
from equipoise.dht.transport import FramedChannel


class DirectChannel(FramedChannel):
    """A channel of frames on a connection of its own (`averaging.ports.Channel`)."""

    def __init__(self, peer: str, stream: PlainStream, closed: Callable[[FramedChannel], None]) -> None:
        super().__init__(peer, stream, closed)
        self._direct = stream

    @property
    def delivered(self) -> int:
        """Bytes that the other end's kernel has acknowledged so far; where that cannot be told, that left here."""
        return self._direct.delivered

    @property
    def moved(self) -> int:
        """Bytes sent and received so far."""
        return self._direct.sent + self._direct.received

    def abandon(self, why: str) -> None:
        """Close the stream for a reason that whoever uses it is told."""
        self._close(why)
