"""The frames that wait for one peer: beats go first, then frames that are written again, control frames, bulk."""

from __future__ import annotations

from collections.abc import Container

from equipoise.averaging.ports import Buffer
from equipoise.averaging.session.fair_queue import Frame, SendQueue
from equipoise.averaging.session.machine import Session
from equipoise.averaging.session.messages import FAREWELL, FRAME, encode_envelope


class Outbox:
    """The session with one peer, and what waits to be sent in it.

    Args:
        id: Random bytes that name the session.

    Attributes:
        session: The session.
        queue: What waits to be sent for the first time.
        beats: Headers that are sent once, without a number, as soon as a channel is open.
    """

    def __init__(self, id: bytes) -> None:
        self.session: Session[Frame] = Session(id)
        self.queue = SendQueue()
        self.beats: dict[bytes, None] = {}
        self._writes_to: object = None

    def __bool__(self) -> bool:
        return bool(self.queue or self.beats or self.session.behind or self.session.acknowledges)

    def next_frame(self, channel: object) -> Frame | None:
        """Return the next frame to write to a channel; another channel gets what is not acknowledged first."""
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

    def lose(self, channel: object) -> None:
        """Note that a channel is of no more use."""
        if channel is self._writes_to:
            self._writes_to = None
            self.session.rewind()

    def farewell(self) -> bytes:
        """Return the header of a farewell."""
        return encode_envelope(FAREWELL, 0, self.session.acknowledgement())

    def begin_anew(self, id: bytes) -> bool:
        """Begin another session, with what was not sent yet; return whether frames of this one may be lost."""
        lost = self.session.unacknowledged > 0
        self.session = Session(id)
        self._writes_to = None
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
