"""Frames over direct streams, and the bounds on how many are open; who uses them closes those that are idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from equipoise.dht.direct.streams import PlainStream
from equipoise.dht.transport import FramedChannel

MAX_CHANNELS_PER_PEER = 8
"""Two if both sides dial at once, one otherwise, for all runs: the rest is room for those that the other end has
given up already."""
MAX_CHANNELS = 512
"""A group has at most 64 members; several groups at once stay below. Each costs a descriptor and up to 1.3 MB."""
MAX_FAILURES = 1024
"""Peers remembered with the reason for which they could not be dialled: as many as are admitted."""


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
    def received(self) -> int:
        """Bytes that have come in so far, those of a record that is not complete included."""
        return self._direct.arrived


class OpenChannels:
    """The direct channels that are open, and why those are not that could not be."""

    def __init__(self) -> None:
        self._failures: dict[str, str] = {}
        self._channels: set[FramedChannel] = set()
        self._per_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._channels)

    def has(self, peer: str) -> bool:
        """Whether one with `peer` is open."""
        return self._per_peer[peer] > 0

    def failed(self, peer: str, reason: str) -> None:
        """Remember why none to `peer` could be opened, until one is."""
        self._failures.pop(peer, None)
        self._failures[peer] = reason
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def failure(self, peer: str) -> str:
        """Return what the last dial of `peer` failed for; empty if a channel was opened since, by either side."""
        return self._failures.get(peer, "")

    def check_room(self, peer: str) -> None:
        """Check that one more channel with `peer` stays within bounds.

        Raises:
            ConnectionError: It does not.
        """
        if self._per_peer[peer] >= MAX_CHANNELS_PER_PEER:
            raise ConnectionError(
                f"{MAX_CHANNELS_PER_PEER} direct channels with {peer} are open already, the maximum"
            )
        if len(self._channels) >= MAX_CHANNELS:
            raise ConnectionError(f"{MAX_CHANNELS} direct channels are open already, the maximum")

    def enter(self, peer: str, stream: PlainStream) -> DirectChannel:
        """Make a stream a channel, counted until it is closed."""
        channel = DirectChannel(peer, stream, self._leave)
        self._failures.pop(peer, None)
        self._channels.add(channel)
        self._per_peer[peer] += 1
        return channel

    def close(self) -> None:
        """Close all of them."""
        for channel in list(self._channels):
            channel.close()

    def _leave(self, channel: FramedChannel) -> None:
        self._channels.discard(channel)
        self._per_peer[channel.peer] -= 1
        if self._per_peer[channel.peer] <= 0:
            del self._per_peer[channel.peer]
