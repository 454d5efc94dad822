"""The order in which a donor sends bodies, and its pauses during rounds.

Newcomers take turns, chunk by chunk. While a round goes on at this donor, at most one body is on its way. After each
body the donor pauses for a multiple of the body's time, so rounds keep most of the link at any speed. A newcomer that
asks for the same bodies again and again takes only its turns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from equipoise.averaging.replication.messages import Item

MAX_QUEUED = 32
"""Most bodies that one newcomer may have asked for and not received; an honest newcomer asks for 8 at once."""

MAX_SENDING = 2
"""Most bodies on their way from this donor, to all newcomers: one is written while the next is made."""

PAUSE_FACTOR = 3.0
"""Length of a donor's pause after a body during rounds, in times of the body: newcomers get a quarter of the link."""

MAX_PAUSE_SECONDS = 60.0
"""Longest pause: three times a body's time on a link of 0.4 Mbit/s. Long before that, the newcomer asks other donors
for the chunk, as it should: a donor with a faster link should send it."""

LOOK_SECONDS = 0.5
"""Time between two looks of a donor that pauses: the round may be over."""

STUCK_SECONDS, STUCK_IN_ROUND_SECONDS = 2.0, 20.0
"""Longest time for which an unsent body holds back other newcomers: after that, its newcomer does not read. During
rounds the link is more likely slow, and a second body would take bandwidth from the round."""


@dataclass
class _Line:
    """The bodies that one newcomer has asked for.

    Attributes:
        waiting: Bodies not sent yet.
        sending: Bodies on their way, each with the time when it was sent.
        took: Seconds that the last body took; 0 before.
        resumes_at: When the donor may send it more during rounds.
    """

    waiting: deque[Item] = field(default_factory=deque)
    sending: deque[tuple[Item, float]] = field(default_factory=deque)
    took: float = 0.0
    resumes_at: float = float("-inf")


class Serving:
    """Bodies to be sent, by newcomer.

    Attributes:
        busy: Whether a round exchanges here now.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._sent_at = float("-inf")
        self.busy = False

    @property
    def readers(self) -> int:
        """Number of newcomers with bodies that wait or are on their way."""
        return len(self._lines)

    def add(self, peer: str, bodies: Iterable[Item]) -> None:
        """Queue bodies for `peer`, except those that it has asked for already and those beyond `MAX_QUEUED`."""
        line = self._lines.setdefault(peer, _Line())
        for body in bodies:
            full = len(line.waiting) + len(line.sending) >= MAX_QUEUED
            if not full and body not in line.waiting and all(body != one for one, _ in line.sending):
                line.waiting.append(body)

    def sent(self, peer: str, busy: bool, now: float) -> None:
        """Note that a body has left for `peer`; `busy` says whether a round exchanges here."""
        self.busy = busy
        line = self._lines.get(peer)
        if line is not None and line.sending:
            line.took = now - line.sending.popleft()[1]
            if busy:
                self._sent_at, line.resumes_at = now, now + _pause(line.took)

    def drop(self, peer: str) -> None:
        """Send `peer` nothing more."""
        self._lines.pop(peer, None)

    def next(self, now: float) -> tuple[str, Item] | None:
        """Return the next newcomer and the body to send it now; None if nothing may be sent."""
        limit = 1 if self.busy else MAX_SENDING
        sending = sum(now < at + self._stuck for line in self._lines.values() for _, at in line.sending)
        if sending >= limit or (self.busy and now < self._resumes_at):
            return None
        for peer, line in list(self._lines.items()):
            rests = self.busy and now < line.resumes_at
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
        """When the link has rested, by the quickest newcomer's time: the others may have slow links of their own."""
        quickest = min((line.took for line in self._lines.values() if line.waiting), default=0.0)
        return self._sent_at + _pause(quickest)

    @property
    def _stuck(self) -> float:
        return STUCK_IN_ROUND_SECONDS if self.busy else STUCK_SECONDS

    def deadline(self, now: float) -> float:
        """When the next waiting body may be sent, or must be looked at again; infinity if none waits."""
        if not any(line.waiting for line in self._lines.values()):
            return float("inf")
        times = [at + self._stuck for line in self._lines.values() for _, at in line.sending]
        if self.busy:
            times += [now + LOOK_SECONDS, self._resumes_at]
            times += [line.resumes_at for line in self._lines.values()]
        return min((time for time in times if time > now), default=float("inf"))


def _pause(took: float) -> float:
    return min(PAUSE_FACTOR * took, MAX_PAUSE_SECONDS)
