"""What the mesh keeps of one peer."""

from __future__ import annotations

import asyncio
from collections import deque

from equipoise.averaging.aio.sendqueue import SendQueue
from equipoise.averaging.ports import Channel

MAX_REMEMBERED = 64
"""Frames written to a channel last that are remembered; a round's members say fewer to each other in two seconds."""


class Link:
    """One peer's channels, of each kind the newest last, and what waits to be sent to it.

    Attributes:
        streams: Open channels of the transport.
        direct: Open direct channels.
        queue: What waits to be sent.
        writer: The task that sends it, while there is something.
        dialling: The task that opens a direct channel.
        patience: Until when frames wait for that, in the loop's time.
        retry_at: When a direct channel may be tried again.
        arrived: Set while a channel is open.
    """

    def __init__(self) -> None:
        self.streams: list[Channel] = []
        self.direct: list[Channel] = []
        self.queue = SendQueue()
        self.writer: asyncio.Task[None] | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.patience = 0.0
        self.retry_at = 0.0
        self.arrived = asyncio.Event()
        self._written: dict[Channel, deque[tuple[float, bytes | None]]] = {}
        self._moved: dict[Channel, tuple[int, float]] = {}
        self._delivered = 0
        self._received = 0

    @property
    def channels(self) -> list[Channel]:
        """All that are open."""
        return [*self.streams, *self.direct]

    @property
    def delivered(self) -> int:
        """Bytes delivered to the peer so far, by channels that have closed too."""
        return self._delivered + sum(channel.delivered for channel in self.channels)

    @property
    def received(self) -> int:
        """Bytes that have come from the peer so far, those of a frame that is not complete included."""
        return self._received + sum(channel.received for channel in self.channels)

    def add(self, channel: Channel, direct: bool) -> None:
        """A channel was opened."""
        (self.direct if direct else self.streams).append(channel)
        self.arrived.set()

    def remove(self, channel: Channel) -> None:
        """A channel broke; what it carried still counts."""
        (self.direct if channel in self.direct else self.streams).remove(channel)
        self._moved.pop(channel, None)
        self._written.pop(channel, None)
        self._delivered += channel.delivered
        self._received += channel.received
        if not self.channels:
            self.arrived.clear()

    def wrote(self, channel: Channel, now: float, control: bytes | None) -> None:
        """A frame is being written to a channel: a control frame, or bulk."""
        self._written.setdefault(channel, deque(maxlen=MAX_REMEMBERED)).append((now, control))

    def unsettled(self, channel: Channel, since: float) -> list[bytes] | None:
        """The control frames that may be lost with a channel that breaks beside another: those written since then.

        None if more may be lost: the channel is the one in use, or bulk was written to it, or more than is remembered.
        """
        written = self._written.get(channel, deque())
        forgotten = len(written) == MAX_REMEMBERED and written[0][0] >= since
        if forgotten or channel is self.channels[-1]:
            return None
        recent = [control for at, control in written if at >= since]
        return None if None in recent else [control for control in recent if control is not None]

    def idle(self, now: float, seconds: float) -> list[Channel]:
        """The channels on which no byte has moved for so long, as far as these calls could see."""
        found = []
        for channel in self.channels:
            moved = channel.delivered + channel.received
            before, since = self._moved.get(channel, (-1, now))
            if moved != before:
                self._moved[channel] = (moved, now)
            elif now - since >= seconds:
                found.append(channel)
        return found
