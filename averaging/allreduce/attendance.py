"""Who takes part in a round at this moment, who is waited for, and for how long nothing has moved."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.allreduce.patience import Patience

STALL_SECONDS = 2.0
"""Without any progress for this long, a step is retried another way. Pauses of healthy processes stay below 1 s."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """Whose delivery the next step waits for.

    Attributes:
        members: Bitmask of those who have not delivered yet.
        of: Bitmask of all who deliver in this step.
        dispensable: Whether those that stall are late: the round can try to go on without them.
    """

    members: int
    of: int
    dispensable: bool = False


class Attendance:
    """Who can be reached, who is waited for, and how long it has been since the last progress.

    Args:
        group: The round.
        now: Monotonic seconds.
        stall: Seconds without progress that make the level rise by one.

    Attributes:
        lost: Bitmask of the members that are out of reach now.
        gone: Bitmask of those that have left for good.
        returned: Bitmask of those that were out of reach, and came back.
        late: Bitmask of those that are not waited for any more.
        level: Stalls since the last progress.
    """

    def __init__(self, group: Group, now: float, stall: float = STALL_SECONDS) -> None:
        self.group = group
        self.lost = 0
        self.gone = 0
        self.returned = 0
        self.late = 0
        self.level = 0
        self._stall = stall
        self._lost_at = now
        self._progress_at = now
        self._patience = Patience(stall, now)

    @property
    def deadline(self) -> float:
        """When `stall` is to be asked next, in monotonic seconds."""
        return min(self._progress_at + (self.level + 1) * self._stall, self._patience.ends_at)

    @property
    def waited(self) -> float:
        """Seconds without progress until the last stall."""
        return self.level * self._stall

    @property
    def here(self) -> int:
        """Bitmask of the members that can be reached."""
        return self.group.everyone & ~self.lost

    @property
    def hoped_for(self) -> int:
        """Bitmask of the members that may still take part: until a stall has passed, a broken connection says little.

        It may be opened again at once, or be one of several. In a group of two, each would else be the round's end.
        """
        return self.group.everyone & ~(self.lost if self.level else self.gone)

    @property
    def given_up_at(self) -> float:
        """When the members that are lost now have been for a stall at least, in monotonic seconds."""
        return self._lost_at + self._stall

    def lose(self, member: int, now: float) -> bool:
        """A member is out of reach; returns whether that is news."""
        news = not self.lost >> member & 1
        self._lost_at = now if news else self._lost_at
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
        self.returned |= 1 << member
        return True

    def begin(self, step: Hashable, now: float) -> None:
        """The round may have come to another step."""
        self._patience.begin(step, now)

    def progress(self, now: float) -> None:
        """Something moved."""
        self._progress_at = now
        self.level = 0
        self._patience.open_window(now)

    def arrived(self, sender: int, now: float) -> bool:
        """A part has come: progress, unless its sender has had all the time that there is for it.

        Returns:
            Whether more has changed than clocks: a stall is over, or the sender is late no more.
        """
        late = bool(self.late >> sender & 1)
        if late and self._patience.spent:
            return False
        changed = late or self.level > 0
        self.late &= ~(1 << sender)
        self.progress(now)
        return changed

    def received(self, sender: int, count: int, awaited: Awaited, now: float) -> bool:
        """Bytes have come; returns whether they are of a member that is waited for."""
        self._patience.count(sender, count)
        self._patience.look(awaited.members, awaited.of, now)
        return bool(awaited.members >> sender & 1)

    def stall(self, awaited: Awaited, now: float) -> bool:
        """Let the level rise if it is time; returns whether it was.

        While some of the awaited still deliver, only those that do not are taken for late.
        """
        self._patience.look(awaited.members, awaited.of, now)
        if now < self.deadline:
            return False
        slow = self._patience.delivering(awaited.members, now)
        if now >= self._patience.ends_at:
            self._patience.end()
        if awaited.dispensable:
            self.late |= awaited.members & ~slow
        if slow:
            self.progress(now)
            return False
        self.level += 1
        return True
