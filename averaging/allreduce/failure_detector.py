"""Who has fallen silent: a failure detector for the members of a round, exact to its deadline.

Heartbeats come at a fixed pace, so what a link does to them shows in the gaps between signs of life. A member is
taken for dead after `SILENCE_SECONDS`, or after `GAPS` times the longest gap that it has been heard after, if that is
more: a link or a machine that lets signs of life through in bursts is not taken for dead at every burst's end (the
idea of the phi accrual detector, Hayashibara et al. 2004, with the largest gap in place of a distribution, which a
round is too short to learn).
"""

from __future__ import annotations

from collections.abc import Iterable

from equipoise.averaging.allreduce.patience import MIN_BYTES_PER_SECOND

HEARTBEAT_SECONDS = 0.25
"""Between two signs of life; eight in a row must be missing before anyone is taken for dead."""

SILENCE_SECONDS = 2.0
"""A member not heard of for this long is taken for dead, until it is heard again. Not less however regular it was:
with eight daemons on two busy cores, healthy ones pause for up to 1 s."""

GAPS = 2
"""Longest gaps so far that make a silence."""

ROUND_TRIPS = 4
"""Round-trip times by which a member may be silent for longer: what opens a channel takes that many, and where one is
long, packets are held up for longer too."""

MAX_SILENCE_SECONDS = 6.0
"""Longest silence of a living member, whatever its gaps and its round-trip time: no member stretches by pauses of its
own how long its death goes unnoticed."""


class FailureDetector:
    """Tells apart the members that are heard and those that are not.

    If this process itself was stopped, nobody was silent: the pause shows as a gap between two checks and is taken out.

    Args:
        members: Whom to watch.
        now: Monotonic seconds.
        silence: Seconds of silence that are always allowed.
    """

    def __init__(self, members: Iterable[int], now: float, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence
        self._heard = dict.fromkeys(members, now)
        self._allowed = dict.fromkeys(self._heard, silence)
        self._silent: set[int] = set()
        self._checked = now

    @property
    def deadline(self) -> float:
        """When the next member falls silent unless it is heard, in monotonic seconds; infinite if all have."""
        awake = (member for member in self._heard if member not in self._silent)
        return min((self._heard[member] + self._allowed[member] for member in awake), default=float("inf"))

    def heard(self, member: int, now: float) -> bool:
        """A sign of life; returns whether the member had been taken for dead."""
        gap = now - self._heard[member]
        if GAPS * gap > self._allowed[member] and now - self._checked <= self._silence / 2:  # else we paused
            self._allowed[member] = max(self._allowed[member], min(GAPS * gap, MAX_SILENCE_SECONDS))
        self._heard[member] = now
        if member not in self._silent:
            return False
        self._silent.remove(member)
        return True

    def allow(self, member: int, rtt: float) -> None:
        """Allow a member with this round-trip time, in seconds, a longer silence."""
        longer = min(self._silence + ROUND_TRIPS * rtt, MAX_SILENCE_SECONDS)
        self._allowed[member] = max(self._allowed[member], longer)

    def received(self, member: int, count: int, now: float) -> bool:
        """Bytes came since the last heartbeat's time: a sign of life if they are no trickle; returns as `heard`.

        On a slow link, a member's signs of life wait behind the part that it is sending.
        """
        return count >= MIN_BYTES_PER_SECOND * HEARTBEAT_SECONDS and self.heard(member, now)

    def lose(self, member: int) -> None:
        """Its connection broke: it counts as silent until it is heard again."""
        self._silent.add(member)

    def check(self, now: float) -> list[int]:
        """The members that have fallen silent since the last check.

        To be called every `HEARTBEAT_SECONDS`, and at the deadline.
        """
        gap = now - self._checked
        self._checked = now
        if gap > self._silence / 2:
            # Nor longer: who was heard since we go on counts from then.
            self._heard = {member: min(at + gap, now) for member, at in self._heard.items()}
        fallen = [
            member
            for member, at in self._heard.items()
            if member not in self._silent and now >= at + self._allowed[member]
        ]
        self._silent.update(fallen)
        return fallen
