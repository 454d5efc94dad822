"""Who has fallen silent: a failure detector for the members of a round."""

from __future__ import annotations

from collections.abc import Iterable

HEARTBEAT_SECONDS = 0.4
"""Between two signs of life; a few must be lost before anyone is taken for dead."""

SILENCE_SECONDS = 2.0
"""A member not heard of for this long is taken for dead, until it is heard again."""


class Liveness:
    """Tells apart the members that are heard and those that are not.

    If this process itself was stopped, nobody was silent: the pause shows as a gap between two checks and is taken out.
    """

    def __init__(self, members: Iterable[int], now: float, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence
        self._heard = dict.fromkeys(members, now)
        self._silent: set[int] = set()
        self._checked = now

    def heard(self, member: int, now: float) -> bool:
        """A sign of life; returns whether the member had been taken for dead."""
        self._heard[member] = now
        returned = member in self._silent
        self._silent.discard(member)
        return returned

    def lose(self, member: int) -> None:
        """Its connection broke: it counts as silent until it is heard again."""
        self._silent.add(member)

    def check(self, now: float) -> list[int]:
        """The members that have fallen silent since the last check; to be called every `HEARTBEAT_SECONDS`."""
        gap = now - self._checked
        self._checked = now
        if gap > self._silence / 2:
            self._heard = {member: at + gap for member, at in self._heard.items()}
        fallen = [
            member
            for member, at in self._heard.items()
            if member not in self._silent and now - at > self._silence
        ]
        self._silent.update(fallen)
        return fallen
