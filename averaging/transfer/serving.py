"""In which order a donor sends what was asked of it, and how much of its time rounds leave for that.

Newcomers take turns, chunk by chunk. While a round goes on at this donor one body is on its way at most, and after each
the donor pauses for some times as long as it took: whatever the link's speed, rounds keep most of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from equipoise.averaging.transfer.messages import Bulk

MAX_QUEUED = 32
"""Bodies that one newcomer may have asked for and not received; an honest one asks for 8 at once."""

MAX_SENDING = 2
"""Bodies on their way from this donor, of all newcomers: one is written while the next is made."""

PAUSE_FACTOR = 3.0
"""During rounds a donor pauses for so many times as long as the last body took: newcomers have a quarter of a link."""

MAX_PAUSE_SECONDS = 0.5
"""A quarter of what makes a newcomer believe that its donor has stalled."""

STUCK_SECONDS = 2.0
"""A body that has not left for so long takes nobody else's turn: its newcomer does not read."""


@dataclass
class _Line:
    """What one newcomer has asked for.

    Attributes:
        waiting: Not sent yet.
        sent_at: When each of those was sent that are on their way.
    """

    waiting: deque[Bulk] = field(default_factory=deque)
    sent_at: deque[float] = field(default_factory=deque)


class Serving:
    """Bodies to be sent, by newcomer."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._resumes_at = 0.0
        self._busy = False

    @property
    def readers(self) -> int:
        """Newcomers that something is sent to, or waits for."""
        return len(self._lines)

    def add(self, peer: str, bodies: list[Bulk]) -> None:
        """`peer` asks for these; what it has asked for already is not sent twice, and too much not at all."""
        line = self._lines.setdefault(peer, _Line())
        for body in bodies:
            if body not in line.waiting and len(line.waiting) + len(line.sent_at) < MAX_QUEUED:
                line.waiting.append(body)

    def sent(self, peer: str, busy: bool, now: float) -> None:
        """A body has left for `peer`; `busy` says whether a round exchanges here."""
        self._busy = busy
        line = self._lines.get(peer)
        if line is not None and line.sent_at:
            took = now - line.sent_at.popleft()
            if busy:
                self._resumes_at = now + min(PAUSE_FACTOR * took, MAX_PAUSE_SECONDS)

    def drop(self, peer: str) -> None:
        """Send `peer` nothing more."""
        self._lines.pop(peer, None)

    def next(self, now: float) -> tuple[str, Bulk] | None:
        """What to send now, and to whom."""
        limit = 1 if self._busy else MAX_SENDING
        sending = sum(now < at + STUCK_SECONDS for line in self._lines.values() for at in line.sent_at)
        if sending >= limit or (self._busy and now < self._resumes_at):
            return None
        for peer, line in list(self._lines.items()):
            if line.waiting and len(line.sent_at) < limit:
                self._lines.move_to_end(peer)
                line.sent_at.append(now)
                return peer, line.waiting.popleft()
            if not line.waiting and not line.sent_at:
                del self._lines[peer]
        return None

    def deadline(self, now: float) -> float:
        """When something may be sent that may not be sent yet."""
        if not any(line.waiting for line in self._lines.values()):
            return float("inf")
        times = [at + STUCK_SECONDS for line in self._lines.values() for at in line.sent_at]
        times.append(self._resumes_at)
        return min((time for time in times if time > now), default=float("inf"))
