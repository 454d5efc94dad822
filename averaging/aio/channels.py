"""One peer's channels, the session that they carry, and what waits to be sent to the peer."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Container

from equipoise.averaging.aio.fair_queue import Frame, SendQueue
from equipoise.averaging.ports import Buffer, Channel
from equipoise.averaging.session import SESSION_BYTES, Hello, Session, SessionFault

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""Shortest and longest time until a direct channel that could not be opened is tried again; it doubles each time."""

HELLO = b"H"
"""First byte of the first frame of each end on a channel."""

FRAME = b"N"
"""First byte of every other frame of a session; its number and an acknowledgement follow, then the header."""

FAREWELL = b"F"
"""First byte of the last frame of each end on a channel that is closed as idle; an acknowledgement follows."""

_HELLO = struct.Struct(f"<c{SESSION_BYTES}s{SESSION_BYTES}sQ")
_ENVELOPE = struct.Struct("<cQQ")

ENVELOPE_BYTES = _ENVELOPE.size


def encode_hello(hello: Hello) -> bytes:
    """Return the header of a hello."""
    return _HELLO.pack(HELLO, hello.session, hello.partner, hello.delivered)


def decode_hello(header: bytes) -> Hello:
    """Parse the header of a hello.

    Raises:
        SessionFault: It is none.
    """
    if header[:1] != HELLO or len(header) != _HELLO.size:
        raise SessionFault(
            f"expected a hello of {_HELLO.size} bytes, got {header[:1]!r} in {len(header)} bytes"
        )
    _, session, partner, delivered = _HELLO.unpack(header)
    return Hello(session, b"" if partner == bytes(SESSION_BYTES) else partner, delivered)


def encode_envelope(kind: bytes, number: int, acknowledged: int) -> bytes:
    """Return what goes before the header of a frame."""
    return _ENVELOPE.pack(kind, number, acknowledged)


def decode_envelope(header: bytes) -> tuple[bytes, int, int]:
    """Parse the envelope of a frame: its kind, its number, and what it acknowledges.

    Raises:
        SessionFault: It is none.
    """
    if len(header) < ENVELOPE_BYTES or header[:1] not in (FRAME, FAREWELL):
        raise SessionFault(f"expected a frame of a session, got {header[:1]!r} in {len(header)} bytes")
    kind, number, acknowledged = _ENVELOPE.unpack_from(header)
    return kind, number, acknowledged


class PeerChannels:
    """One peer's channels, of each kind the newest last, and what waits to be sent through them.

    Attributes:
        streams: Open channels of the transport.
        direct: Open direct channels.
        greeted: Those of them on which both ends have said hello; only they are written to.
        session: The session with the peer.
        queue: What waits to be sent for the first time.
        beats: Headers that are sent once, without a number, as soon as a channel is open.
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
        self.session = _new_session()
        self.queue = SendQueue()
        self.beats: dict[bytes, None] = {}
        self.writer: asyncio.Task[None] | None = None
        self.dialling: asyncio.Task[None] | None = None
        self.patience = 0.0
        self.redials = False
        self.news = asyncio.Event()
        self._writes_to: Channel | None = None
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
        """Whether the writer has something to do."""
        return bool(
            self.queue or self.beats or self.redials or self.session.behind or self.session.acknowledges
        )

    @property
    def awaits_direct(self) -> bool:
        """Whether a direct channel may soon be there: it is being opened, or both ends have not said hello yet."""
        return self.dialling is not None or not self.greeted.issuperset(self.direct)

    # ---- channels ----

    def dials(self, now: float, seconds: float) -> bool:
        """Whether a direct channel is to be opened now; frames wait for it so long, if the last one did not fail."""
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
        if channel is self._writes_to:
            self._writes_to = None
            self.session.rewind()
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

    # ---- frames ----

    def next_frame(self, channel: Channel) -> Frame | None:
        """Return the next frame to write to a channel: beats, what is written again, control frames, then bulk."""
        session = self.session
        if channel is not self._writes_to:
            self._writes_to = channel
            session.rewind()
        if self.beats:
            header = next(iter(self.beats))
            del self.beats[header]
            return self._sealed(0, header)
        if again := session.again():
            number, frame = again
            return self._sealed(number, *(frame or (b"",)))
        if self.queue.control:
            flow, header = self.queue.control.popleft()
            return self._sealed(session.number(flow, lambda: (header, b"")), header)
        if bulk := self.queue.next_bulk():
            frame, flow, make = bulk
            return self._sealed(session.number(flow, make, bulk=True), *frame)
        return self._sealed(0) if session.acknowledges else None

    def farewell(self) -> bytes:
        """Return the header of a farewell."""
        return encode_envelope(FAREWELL, 0, self.session.acknowledgement())

    def begin_anew(self) -> bool:
        """Begin another session; return whether frames of this one may be lost."""
        lost = self.session.unacknowledged > 0
        self.session = _new_session()
        self._writes_to = None
        self.greeted.clear()
        return lost

    def drop_all_but(self, flows: Container[bytes]) -> None:
        """Forget all frames of other flows."""
        self.queue.drop_all_but(flows)
        self.session.forget_all_but(flows)

    def drop_bulk(self, flow: bytes) -> None:
        """Forget the bulk frames of a flow."""
        self.queue.drop_bulk(flow)
        self.session.forget(flow)

    def _sealed(self, number: int, header: bytes = b"", body: Buffer = b"") -> Frame:
        return encode_envelope(FRAME, number, self.session.acknowledgement()) + header, body


def _new_session() -> Session[Frame]:
    return Session(os.urandom(SESSION_BYTES))
