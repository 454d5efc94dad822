"""In which order a donor sends what was asked of it, and how much of its time rounds leave for that.

Newcomers take turns, chunk by chunk. While a round goes on at this donor one body is on its way at most, and after each
the donor pauses for some times as long as it took: whatever the link's speed, rounds keep most of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from equipoise.averaging.statesync.messages import Bulk

MAX_QUEUED = 32
"""Bodies that one newcomer may have asked for and not received; an honest one asks for 8 at once."""

MAX_SENDING = 2
"""Bodies on their way from this donor, of all newcomers: one is written while the next is made."""

PAUSE_FACTOR = 3.0
"""During rounds a donor pauses for so many times as long as the last body took: newcomers have a quarter of a link."""

MAX_PAUSE_SECONDS = 60.0
"""What three times a body's time comes to on a link of 0.4 Mbit/s. Long before, the newcomer asks others for the same,
which is as well: whoever has a faster link should give it."""

LOOK_SECONDS = 0.5
"""How often a donor that pauses looks whether the round is over."""

STUCK_SECONDS, STUCK_IN_ROUND_SECONDS = 2.0, 20.0
"""A body that has not left for so long takes nobody else's turn: its newcomer does not read. During rounds it rather is
the link that is slow, and a second body would take from the round."""


@dataclass
class _Line:
    """What one newcomer has asked for.

    Attributes:
        waiting: Not sent yet.
        sending: Those on their way, and when each was sent.
        took: Seconds that the last of them took; 0 before.
        resumes_at: When it may be sent more during rounds.
    """

    waiting: deque[Bulk] = field(default_factory=deque)
    sending: deque[tuple[Bulk, float]] = field(default_factory=deque)
    took: float = 0.0
    resumes_at: float = float("-inf")

    def add(self, body: Bulk) -> bool:
        """Whether there is room for it, and it neither waits nor is on its way already."""
        full = len(self.waiting) + len(self.sending) >= MAX_QUEUED
        if full or body in self.waiting or any(body == one for one, _ in self.sending):
            return False
        self.waiting.append(body)
        return True


class Serving:
    """Bodies to be sent, by newcomer."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._sent_at = float("-inf")
        self._busy = False

    @property
    def readers(self) -> int:
        """Newcomers that something is sent to, or waits for."""
        return len(self._lines)

    def add(self, peer: str, bodies: list[Bulk]) -> int:
        """`peer` asks for these; what it has asked for already is not sent twice, and too much not at all.

        Returns:
            How many of them will be sent.
        """
        line = self._lines.setdefault(peer, _Line())
        return sum(map(line.add, bodies))

    def sent(self, peer: str, busy: bool, now: float) -> None:
        """A body has left for `peer`; `busy` says whether a round exchanges here."""
        self._busy = busy
        line = self._lines.get(peer)
        if line is not None and line.sending:
            line.took = now - line.sending.popleft()[1]
            if busy:
                self._sent_at, line.resumes_at = now, now + _pause(line.took)

    def see_rounds(self, busy: bool) -> None:
        """Whether a round exchanges here now."""
        self._busy = busy

    def drop(self, peer: str) -> None:
        """Send `peer` nothing more."""
        self._lines.pop(peer, None)

    def next(self, now: float) -> tuple[str, Bulk] | None:
        """What to send now, and to whom."""
        limit = 1 if self._busy else MAX_SENDING
        sending = sum(now < at + self._stuck for line in self._lines.values() for _, at in line.sending)
        if sending >= limit or (self._busy and now < self._resumes_at):
            return None
        for peer, line in list(self._lines.items()):
            rests = self._busy and now < line.resumes_at
            if line.waiting and len(line.sending) < limit and not rests:
                self._lines.move_to_end(peer)
                body = line.waiting.popleft()
                line.sending.append((body, now))
                return peer, body
            if not line.waiting and not line.sending:
                del self._lines[peer]
        return None

    @property
    def _resumes_at(self) -> float:
        """When the link has rested: as the quickest says, for the others may have slow links of their own."""
        quickest = min((line.took for line in self._lines.values() if line.waiting), default=0.0)
        return self._sent_at + _pause(quickest)

    @property
    def _stuck(self) -> float:
        return STUCK_IN_ROUND_SECONDS if self._busy else STUCK_SECONDS

    def deadline(self, now: float) -> float:
        """When something may be sent that may not be sent yet."""
        if not any(line.waiting for line in self._lines.values()):
            return float("inf")
        times = [at + self._stuck for line in self._lines.values() for _, at in line.sending]
        if self._busy:
            times += [
                now + LOOK_SECONDS,
                self._resumes_at,
                *(line.resumes_at for line in self._lines.values()),
            ]
        return min((time for time in times if time > now), default=float("inf"))


def _pause(took: float) -> float:
    return min(PAUSE_FACTOR * took, MAX_PAUSE_SECONDS)
