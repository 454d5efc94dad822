"""The frames that wait for one peer: beats go first, then frames that are written again, control frames, bulk.

Bulk of all rounds takes turns; late bulk, of downloads, comes last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container

from equipoise.averaging.ports import Buffer
from equipoise.averaging.session.machine import Session
from equipoise.averaging.session.messages import FAREWELL, FRAME, encode_envelope

Frame = tuple[bytes, Buffer]
"""Header and body."""

Bulk = Callable[[], Frame | None]
"""Makes a bulk frame when its turn has come; None if it is no longer wanted."""


class _Lane:
    """Flows that share alike: the flow with the fewest bytes served is next (as in SFQ: Goyal, Vin and Cheng, 1996).

    Attributes:
        waiting: The frames of each flow that waits.
    """

    def __init__(self) -> None:
        self.waiting: dict[bytes, deque[Bulk]] = {}
        self._had: dict[bytes, int] = {}
        self._reached = 0

    def add(self, flow: bytes, make: Bulk) -> None:
        """Queue a frame. A flow that had none to send has saved nothing up; what it had before still counts."""
        if not self.waiting:
            self._had, self._reached = {}, 0
        if flow not in self.waiting:
            self._had[flow] = max(self._had.get(flow, 0), self._reached)
            self.waiting[flow] = deque()
        self.waiting[flow].append(make)

    def take(self) -> tuple[Frame, bytes, Bulk] | None:
        """Take the next frame that is still wanted, with its flow and what made it."""
        while self.waiting:
            flow = min(self.waiting, key=self._had.__getitem__)
            self._reached = self._had[flow]
            frames = self.waiting[flow]
            make = frames.popleft()
            if not frames:
                del self.waiting[flow]
            if frame := make():
                if flow in self._had:
                    self._had[flow] += len(frame[0]) + len(frame[1])
                return frame, flow, make
        return None

    def drop(self, flow: bytes) -> None:
        """Forget a flow."""
        self.waiting.pop(flow, None)
        self._had.pop(flow, None)


class Outbox:
    """The session with one peer, and what waits to be sent in it.

    A heartbeat waits behind no part, a round behind no more than it must, a download behind both.

    Attributes:
        session: The session.
        beats: Headers that are sent once, without a number, as soon as a channel is open.
        control: Flow and header of each control frame, in order.
    """

    def __init__(self, id: bytes) -> None:
        self.session: Session[Frame] = Session(id)
        self.beats: dict[bytes, None] = {}
        self.control: deque[tuple[bytes, bytes]] = deque()
        self._rounds, self._late = _Lane(), _Lane()
        self._writes_to: object = None

    def __bool__(self) -> bool:
        waiting = self._rounds.waiting or self.control or self.beats or self._late.waiting
        return bool(waiting or self.session.behind or self.session.acknowledges)

    @property
    def has_bulk(self) -> bool:
        """True if a bulk frame waits."""
        return bool(self._rounds.waiting or self._late.waiting)

    def add_bulk(self, flow: bytes, make: Bulk, late: bool = False) -> None:
        """Queue a bulk frame; those of a flow (a round's id) stay in order, flows share alike, late ones come last."""
        (self._late if late else self._rounds).add(flow, make)

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
        if self.control:
            flow, header = self.control.popleft()
            return self._sealed(session.number(flow, lambda: (header, b"")), header)
        if bulk := self._rounds.take() or self._late.take():
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

    def begin_anew(self, id: bytes) -> None:
        """Begin another session, with what was not sent yet; frames of this one may be lost."""
        self.session = Session(id)
        self._writes_to = None

    def drop_all_but(self, flows: Container[bytes]) -> None:
        """Forget all frames of other flows."""
        self.control = deque(one for one in self.control if one[0] in flows)
        for lane in (self._rounds, self._late):
            for flow in [flow for flow in lane.waiting if flow not in flows]:
                lane.drop(flow)
        self.session.forget_all_but(flows)

    def drop_bulk(self, flow: bytes) -> None:
        """Forget the bulk frames of a flow."""
        self._rounds.drop(flow)
        self._late.drop(flow)
        self.session.forget(flow)

    def _sealed(self, number: int, header: bytes = b"", body: Buffer = b"") -> Frame:
        return encode_envelope(FRAME, number, self.session.acknowledgement()) + header, body
