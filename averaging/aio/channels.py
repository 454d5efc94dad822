"""One peer's channels, and what goes through them."""

from __future__ import annotations

import asyncio
import os

from equipoise.averaging.ports import Channel
from equipoise.averaging.session.machine import SESSION_BYTES
from equipoise.averaging.session.outbox import Outbox

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""Shortest and longest time until a direct channel that could not be opened is tried again; it doubles each time."""


class PeerChannels:
    """One peer's channels, of each kind the newest last, and what goes through them.

    Attributes:
        streams: Open channels of the transport.
        direct: Open direct channels.
        greeted: Those of them on which both ends have said hello; only they are written to.
        outbox: The session with the peer, and what waits to be sent in it.
        writer: The task that sends, while there is something.
        dialling: The task that opens a direct channel.
        patience: Until when frames wait for that, in the loop's time.
        redials: Whether the last channel broke, and another is to be opened though nothing waits to be sent.
        news: Set when a channel was opened, greeted or removed, or when no direct one will be open for now.
    """

    def __init__(self) -> None:
        self.streams: list[Channel] = []
        self.direct: list[Channel] = []
        self.greeted: set[Channel] = set()
        self.outbox = Outbox(os.urandom(SESSION_BYTES))
        self.writer: asyncio.Task[None] | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.patience = 0.0
        self.redials = False
        self.news = asyncio.Event()
        self._retry_in = 0.0
        self._retry_at = 0.0
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

    @property
    def has_work(self) -> bool:
        """True if the writer has something to do."""
        return bool(self.redials or self.outbox)

    @property
    def awaits_direct(self) -> bool:
        """True if a direct channel may soon be there: it is being opened, or both ends have not said hello yet."""
        return self.dialling is not None or not self.greeted.issuperset(self.direct)

    # ---- channels ----

    def dials(self, now: float, seconds: float) -> bool:
        """True if a direct channel is to be opened now; frames wait for it so long, unless the last one failed."""
        if self.direct or self.dialling is not None or now < self._retry_at:
            return False
        self.patience = now if self._retry_in else now + seconds
        return True

    def dialled_in_vain(self, now: float) -> None:
        """Note that a direct channel could not be opened."""
        self._retry_in = min(2 * self._retry_in, MAX_RETRY_SECONDS) or RETRY_SECONDS
        self._retry_at = now + self._retry_in

    def add(self, channel: Channel, direct: bool) -> None:
        """Note that a channel was opened."""
        (self.direct if direct else self.streams).append(channel)
        self.redials = False
        if direct:
            self._retry_in = self._retry_at = 0.0
        self.news.set()

    def greet(self, channel: Channel) -> None:
        """Note that both ends have said hello on a channel."""
        self.greeted.add(channel)
        self.news.set()

    def remove(self, channel: Channel) -> None:
        """Note that a channel is of no more use; what it carried still counts."""
        (self.direct if channel in self.direct else self.streams).remove(channel)
        self.greeted.discard(channel)
        self._moved.pop(channel, None)
        self.outbox.lose(channel)
        self._delivered += channel.delivered
        self._received += channel.received
        self.news.set()

    def best(self) -> Channel | None:
        """Return the channel to write to: the newest direct one, else the newest one of the transport."""
        for channel in [*reversed(self.direct), *reversed(self.streams)]:
            if channel in self.greeted:
                return channel
        return None

    def idle(self, now: float, seconds: float) -> list[Channel]:
        """Return the channels on which no byte has moved for so long, as far as these calls could see."""
        found = []
        for channel in self.channels:
            moved = channel.delivered + channel.received
            before, since = self._moved.get(channel, (-1, now))
            if moved != before:
                self._moved[channel] = (moved, now)
            elif now - since >= seconds:
                found.append(channel)
        return found

    def begin_anew(self) -> bool:
        """Begin another session with the peer; return whether frames of this one may be lost."""
        self.greeted.clear()
        return self.outbox.begin_anew(os.urandom(SESSION_BYTES))
