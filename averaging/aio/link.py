"""What the mesh keeps of one peer."""

from __future__ import annotations

import asyncio
from collections import deque

from equipoise.averaging.aio.fair_queue import SendQueue
from equipoise.averaging.ports import Channel

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""After a direct channel could not be opened, until it is tried again: twice as long each time, up to a maximum."""

SETTLED_SECONDS = 4.0
"""What was written so long ago has arrived, or the channel would have been found broken: more than what direct channels
need for that (`dht.direct.sockets.USER_TIMEOUT_MS`, checked by a test)."""

MAX_REMEMBERED = 128
"""Frames written to a channel last that are remembered; a round's members say fewer to each other in that time."""


class Once(bytes):
    """The header of a control frame that must not come twice; a type of its own, so that it can be told from others."""


class Link:
    """One peer's channels, of each kind the newest last, and what waits to be sent to it.

    Attributes:
        streams: Open channels of the transport.
        direct: Open direct channels.
        queue: What waits to be sent.
        writer: The task that sends it, while there is something.
        dialling: The task that opens a direct channel.
        patience: Until when frames wait for that, in the loop's time.
        arrived: Set while a channel is open.
        news: Set when a direct channel is open, or will not be for now.
        under_way: What is being written, and where to: a control frame, or None for bulk.
    """

    def __init__(self) -> None:
        self.streams: list[Channel] = []
        self.direct: list[Channel] = []
        self.queue = SendQueue()
        self.writer: asyncio.Task[None] | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.patience = 0.0
        self.arrived = asyncio.Event()
        self.news = asyncio.Event()
        self.under_way: tuple[Channel, bytes | None] | None = None
        self._retry_in = 0.0
        self._retry_at = 0.0
        self._laden: set[Channel] = set()
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

    def dials(self, now: float, seconds: float) -> bool:
        """Whether a direct channel is to be opened now; frames wait for it so long, if the last one did not fail."""
        if self.direct or self.dialling is not None or now < self._retry_at:
            return False
        self.patience = now if self._retry_in else now + seconds
        return True

    def dialled_in_vain(self, now: float) -> None:
        """A direct channel could not be opened."""
        self._retry_in = min(2 * self._retry_in, MAX_RETRY_SECONDS) or RETRY_SECONDS
        self._retry_at = now + self._retry_in

    def add(self, channel: Channel, direct: bool) -> None:
        """A channel was opened."""
        (self.direct if direct else self.streams).append(channel)
        self.arrived.set()
        if direct:
            self._retry_in = self._retry_at = 0.0
            self.news.set()

    def remove(self, channel: Channel) -> None:
        """A channel broke; what it carried still counts."""
        (self.direct if channel in self.direct else self.streams).remove(channel)
        self._moved.pop(channel, None)
        self._written.pop(channel, None)
        self._laden.discard(channel)
        self._delivered += channel.delivered
        self._received += channel.received
        if not self.channels:
            self.arrived.clear()

    def begin(self, channel: Channel, control: bytes | None) -> None:
        """A frame is being written to a channel: a control frame, or bulk."""
        self.under_way = channel, control
        if control is None:
            self._laden.add(channel)

    def wrote(self, channel: Channel, control: bytes | None, now: float) -> None:
        """It has been written."""
        self.under_way = None
        if channel not in self.channels:
            return
        if isinstance(control, Once):
            self._laden.add(channel)
            control = None
        written = self._written.setdefault(channel, deque(maxlen=MAX_REMEMBERED))
        while written and written[0][0] < now - SETTLED_SECONDS:
            written.popleft()
        written.append((now, control))

    def unsettled(self, channel: Channel, now: float) -> tuple[list[bytes], bool]:
        """What may be lost with a channel that breaks: control frames to be sent again, and whether more may be.

        More may if more was written than is remembered, or what cannot be sent again, or if the channel is the one in
        use. What was being written has not arrived.
        """
        written = self._written.get(channel, deque())
        recent = [control for at, control in written if at >= now - SETTLED_SECONDS]
        again = [control for control in recent if control is not None]
        more = len(again) < len(recent) or len(recent) == MAX_REMEMBERED
        if self.under_way is not None and self.under_way[0] is channel:
            control, self.under_way = self.under_way[1], None
            again += [] if control is None else [control]
            more = more or control is None
        if len(self.channels) > 1:
            more = more or channel is self.channels[-1]
        else:
            # What takes its place is not open yet, so nothing but words may be missing: links hold bulk for long.
            more = more or now >= self.patience or self.dialling is None or channel in self._laden
        return again, more

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
