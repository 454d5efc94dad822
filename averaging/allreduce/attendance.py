"""Who takes part in a round at this moment, and for how long nothing has moved."""

from __future__ import annotations

from equipoise.averaging.allreduce.events import Group

STALL_SECONDS = 2.0
"""Without any progress for this long, a step is retried another way. Pauses of healthy processes stay below 1 s."""


class Attendance:
    """Who can be reached, who is waited for, and how long it has been since the last progress.

    Args:
        group: The round.
        now: Monotonic seconds.
        stall: Seconds without progress that make the level rise by one.

    Attributes:
        lost: Bitmask of the members that are out of reach now.
        gone: Bitmask of those that have left for good.
        late: Bitmask of the contributors that are not waited for any more.
        level: Stalls since the last progress.
    """

    def __init__(self, group: Group, now: float, stall: float = STALL_SECONDS) -> None:
        self.group = group
        self.lost = 0
        self.gone = 0
        self.late = 0
        self.level = 0
        self._stall = stall
        self._progress_at = now

    @property
    def stalls_at(self) -> float:
        """When the next stall is due, in monotonic seconds."""
        return self._progress_at + (self.level + 1) * self._stall

    @property
    def waited(self) -> float:
        """Seconds without progress until the last stall."""
        return self.level * self._stall

    @property
    def here(self) -> int:
        """Bitmask of the members that can be reached."""
        return self.group.everyone & ~self.lost

    def lose(self, member: int) -> bool:
        """A member is out of reach; returns whether that is news."""
        news = not self.lost >> member & 1
        self.lost |= 1 << member
        return news

    def leave(self, member: int) -> None:
        """A member has left the round for good."""
        self.gone |= 1 << member

    def come_back(self, member: int) -> bool:
        """A member is heard again; returns whether it takes part again."""
        if not self.lost >> member & 1 or self.gone >> member & 1:
            return False
        self.lost &= ~(1 << member)
        return True

    def progress(self, now: float) -> None:
        """Something moved."""
        self._progress_at = now
        self.level = 0

    def stall(self, now: float) -> bool:
        """Let the level rise if a stall is due; returns whether one was."""
        if now < self.stalls_at:
            return False
        self.level += 1
        return True
