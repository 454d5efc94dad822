"""The channels with one peer: which of them to write to, which are idle, and what has moved through them."""

from __future__ import annotations

import asyncio

from equipoise.averaging.ports import Channel
from equipoise.averaging.session.outbox import Outbox

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""Shortest and longest time until a direct channel that could not be opened is tried again; it doubles each time."""

IDLE_SECONDS = 60.0
"""Longest time that a channel is kept on which nothing moves. Rounds are seconds apart."""

PUNCHED_SECONDS = 600.0
"""The same for a channel through a hole in both NATs, which takes seconds to punch. Some rounds are minutes apart."""


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
        redials: True if the last channel broke, and another is to be opened though nothing waits to be sent.
        met: Whether a round with the peer has begun.
        news: Set when a channel was opened, greeted or removed, or when no direct one will be open for now.
    """

    def __init__(self, session: bytes) -> None:
        self.streams: list[Channel] = []
        self.direct: list[Channel] = []
        self.greeted: set[Channel] = set()
        self.outbox = Outbox(session)
        self.writer: asyncio.Task[None] | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.patience = 0.0
        self.redials = False
        self.met = False
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
        """Bytes delivered to the peer by direct channels so far, closed ones included. Libp2p tells of no delivery."""
        return self._delivered + sum(channel.delivered for channel in self.direct)

    @property
    def received(self) -> int:
        """Bytes that have come from the peer so far, those of a frame that is not complete included."""
        return self._received + sum(channel.received for channel in self.channels)

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

    def remove(self, channel: Channel) -> None:
        """Note that a channel is of no more use; what it carried still counts."""
        if channel in self.direct:
            self.direct.remove(channel)
            self._delivered += channel.delivered
        else:
            self.streams.remove(channel)
        self.greeted.discard(channel)
        self._moved.pop(channel, None)
        self.outbox.lose(channel)
        self._received += channel.received
        self.news.set()

    def best(self) -> Channel | None:
        """Return the channel to write to: the newest direct one, else the newest one of the transport."""
        newest_first = [*reversed(self.direct), *reversed(self.streams)]
        return next((channel for channel in newest_first if channel in self.greeted), None)

    def idle(self, now: float) -> list[Channel]:
        """Return the channels on which no byte has moved for too long, as far as these calls could see."""
        found = []
        for channel in self.channels:
            moved = channel.delivered + channel.received
            before, since = self._moved.get(channel, (-1, now))
            if moved != before:
                self._moved[channel] = (moved, now)
            elif now - since >= (PUNCHED_SECONDS if channel.punched else IDLE_SECONDS):
                found.append(channel)
        return found
