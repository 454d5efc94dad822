"""A session between two daemons: it numbers frames, and delivers each of them once and in order.

A session outlives the channels that carry it. Each end numbers its frames in the order in which it writes them, and
keeps every frame until the other end has acknowledged it. Acknowledgements are cumulative, and ride on every frame that
goes the other way. When a channel takes the place of another, the sender writes all unacknowledged frames again, and
the receiver passes over those that it has had. So two channels may be open at once, and a break loses nothing.

Both ends begin every channel with a `Hello`, which names their session and says what has arrived. An end that has lost
its memory (its process was started again) names another session. Then the other end's session is over: nobody can say
which unacknowledged frames the first process has seen, so they are dropped and counted as lost.

The session is sans-IO. `aio.sessions` runs it on real channels, `tests/simulator` on simulated ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from equipoise.averaging.ports import FrameRefused

SESSION_BYTES = 8
"""Length of a session's id. It is random, so that two sessions of one pair of daemons never share one."""

ACKNOWLEDGE_EVERY = 32
"""Most frames that an end takes before it acknowledges them by a frame of its own, if nothing else goes that way."""

F = TypeVar("F")


class Hello(NamedTuple):
    """The first frame of each end on a channel.

    Attributes:
        session: The sender's session.
        partner: The receiver's session as far as the sender knows; empty if it knows none.
        delivered: Number of the last frame that the sender has had of `partner`.
    """

    session: bytes
    partner: bytes
    delivered: int


@dataclass(slots=True)
class _Sent(Generic[F]):
    """A frame that has a number and no acknowledgement yet; `make` makes it again, and is None once nobody wants it."""

    flow: bytes
    make: Callable[[], F | None] | None
    bulk: bool


class Session(Generic[F]):
    """One end of a session.

    Attributes:
        id: Its name: random bytes.
        partner: The other end's session; empty until its first hello.
        delivered: Number of the last frame of the other end that was delivered here; 0 before the first.
        numbered: Frames that were given a number, acknowledged or not.
    """

    def __init__(self, id: bytes) -> None:
        self.id = id
        self.partner = b""
        self.delivered = 0
        self.numbered = 0
        self._acknowledged = 0
        self._sent: deque[_Sent[F]] = deque()
        self._written = 0
        self._told = 0

    @property
    def unacknowledged(self) -> int:
        """Frames that were numbered and not acknowledged."""
        return len(self._sent)

    @property
    def behind(self) -> bool:
        """True if frames are to be written again."""
        return self._written < self.numbered

    @property
    def acknowledges(self) -> bool:
        """True if an acknowledgement is due by itself."""
        return self.delivered - self._told >= ACKNOWLEDGE_EVERY

    def hello(self) -> Hello:
        """Return what to begin a channel with."""
        self._told = self.delivered
        return Hello(self.id, self.partner, self.delivered)

    def greet(self, hello: Hello) -> bool:
        """Take in the other end's hello; return whether the session goes on.

        If the session is over, the caller begins another one. The frames that this session still keeps are lost.

        Raises:
            FrameRefused: It acknowledges frames that were never sent.
        """
        if hello.session != self.partner:
            if self._acknowledged or self._sent or self.delivered:
                return False
            self.partner = hello.session
        if hello.partner == self.id:
            self._acknowledge(hello.delivered)
        return True

    def number(self, flow: bytes, make: Callable[[], F | None], bulk: bool = False) -> int:
        """Number the next frame, which the caller writes now.

        Args:
            flow: What the frame belongs to: a round's id, or empty.
            make: Makes it again should it have to be written again, or None if nobody wants it any more.
            bulk: Whether `forget` drops it with its flow.
        """
        assert not self.behind, "frames are written in the order of their numbers"
        self._sent.append(_Sent(flow, make, bulk))
        self.numbered = self._written = self._written + 1
        return self.numbered

    def rewind(self) -> None:
        """Have all unacknowledged frames written again: another channel carries the session from now on."""
        self._written = self._acknowledged

    def again(self) -> tuple[int, F | None] | None:
        """Return the next frame to be written again, with its number; a frame that nobody wants is None.

        It returns None once every frame has been written. The caller writes an unwanted frame without content, because
        the receiver waits for its number.
        """
        if not self.behind:
            return None
        sent = self._sent[self._written - self._acknowledged]
        self._written += 1
        return self._written, None if sent.make is None else sent.make()

    def acknowledgement(self) -> int:
        """Return the acknowledgement for a frame that is written now."""
        self._told = self.delivered
        return self.delivered

    def take(self, number: int, acknowledged: int) -> bool:
        """Take in the envelope of a frame; return whether to deliver the frame. Number 0 stands for "not numbered".

        Raises:
            FrameRefused: It acknowledges what was never sent, or a frame before it is missing.
        """
        self._acknowledge(acknowledged)
        if number > self.delivered + 1:
            raise FrameRefused(f"expected frame {self.delivered + 1} of the session, got {number}")
        if number == self.delivered + 1:
            self.delivered = number
            return True
        return number == 0

    def forget(self, flow: bytes) -> None:
        """Drop the bulk of a flow, and with it what its makers hold on to."""
        for sent in self._sent:
            if sent.bulk and sent.flow == flow:
                sent.make = None

    def forget_all_but(self, flows: Container[bytes]) -> None:
        """Keep no frame of another flow any longer."""
        for sent in self._sent:
            if sent.flow not in flows:
                sent.make = None

    def _acknowledge(self, number: int) -> None:
        if number > self.numbered:
            raise FrameRefused(f"expected an acknowledgement of at most {self.numbered} frames, got {number}")
        while self._acknowledged < number:
            self._sent.popleft()
            self._acknowledged += 1
        self._written = max(self._written, number)
