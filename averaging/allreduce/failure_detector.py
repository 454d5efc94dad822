"""The members that can be reached, those that have fallen silent, and those that are slow.

Heartbeats are sent at a fixed pace, so the gaps between signs of life show the delays of a link. A member is taken for
dead after `timing.silence`, or after `GAPS` times the longest gap between its signs of life so far, if that is longer.
So a link or a machine that passes signs of life in bursts is not taken for dead after each burst. (This is the idea of
the phi accrual detector, Hayashibara et al. 2004. The largest gap replaces its distribution: a round is too short to
learn one.)

A slow member that delivers is judged by its bytes and by the pace of the others. On a slow link one part may take
longer than a stall, so counting whole parts is too coarse. The round waits for a member that delivers
`MIN_BYTES_PER_SECOND`; a member that sends less has stalled. A slow member, honest or not, must not hold the others
until the round's timeout either. Once at least half of the awaited members are through with a step, after a time T, the
rest have a limit: `SLOWNESS` times T more, and `GRACE_SECONDS` for differences that the link does not cause. If a
vector takes longer than that over `SLOWEST_LINK`, they have that time, within the first half of the round's time. So a
home uplink counts beside fast links, and a hostile minority, which can neither delay that half nor make it look slower,
leaves the others half of their time. Where more than half are slow, the round waits for all members that deliver.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from equipoise.averaging import timing
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.timing import HEARTBEAT_SECONDS, MAX_SILENCE_SECONDS, STALL_SECONDS

GAPS = 2
"""Longest silence of a member, in multiples of the longest gap between its signs of life so far."""

SLOWEST_LINK = 50e3
"""Rate of the slowest uplink for which a round waits beside fast links, in bytes per second: what is left of 1 Mbit/s
where packets are lost."""

MIN_BYTES_PER_SECOND = 3_000
"""Least rate of a member that counts as delivering: what each other member of a group of 16 gets of such an uplink. The
heartbeats of a few runs take less."""

SLOWNESS = 8
"""Largest ratio between the links of one group: 50 Mbit/s beside 200 is 4, and two rounds that share a link make 8."""

GRACE_SECONDS = 2 * STALL_SECONDS
"""Time that a slow member has beyond that. It may have begun later, or been paused, where the others needed hardly
any time."""


class FailureDetector:
    """Tells the members that are heard from the members that are silent.

    A pause of this process itself shows as a gap between two checks. It is subtracted from every member's silence.
    Times are monotonic seconds.
    """

    def __init__(self, members: Iterable[int], now: float) -> None:
        self._heard = dict.fromkeys(members, now)
        self._allowed = dict.fromkeys(self._heard, timing.SILENCE_SECONDS)
        self._silent: set[int] = set()
        self._checked = now

    @property
    def deadline(self) -> float:
        """When the next member falls silent unless it is heard, in monotonic seconds; infinite if all are silent."""
        awake = (member for member in self._heard if member not in self._silent)
        return min((self._heard[member] + self._allowed[member] for member in awake), default=float("inf"))

    def heard(self, member: int, now: float) -> bool:
        """A sign of life; returns whether the member had been taken for dead."""
        gap = now - self._heard[member]
        if GAPS * gap > self._allowed[member] and now - self._checked <= timing.SILENCE_SECONDS / 2:
            self._allowed[member] = min(GAPS * gap, MAX_SILENCE_SECONDS)  # Else this process has paused.
        self._heard[member] = now
        if member not in self._silent:
            return False
        self._silent.remove(member)
        return True

    def allow(self, member: int, rtt: float) -> None:
        """Allow a member with this round-trip time, in seconds, a longer silence."""
        self._allowed[member] = max(self._allowed[member], timing.silence(rtt))

    def received(self, member: int, count: int) -> bool:
        """Count bytes since the last check as a sign of life, if there are enough of them; returns as `heard`.

        On a slow link, a member's signs of life wait behind the part that it is sending. When the bytes came is not
        known. They count from the check before, so that a member that stopped within a part is not noticed later.
        """
        enough = count >= MIN_BYTES_PER_SECOND * HEARTBEAT_SECONDS
        return enough and self.heard(member, max(self._heard[member], self._checked))

    def lose(self, member: int) -> None:
        """The member's connection broke: the member counts as silent until it is heard again."""
        self._silent.add(member)

    def check(self, now: float) -> list[int]:
        """The members that have fallen silent since the last check.

        To be called every `HEARTBEAT_SECONDS`, and at the deadline.
        """
        gap = now - self._checked
        self._checked = now
        if gap > timing.SILENCE_SECONDS / 2:
            # Not beyond `now`: a member heard since this process went on counts from that moment.
            self._heard = {member: min(at + gap, now) for member, at in self._heard.items()}
        over = (member for member, at in self._heard.items() if now >= at + self._allowed[member])
        fallen = [member for member in over if member not in self._silent]
        self._silent.update(fallen)
        return fallen


@dataclass(frozen=True, slots=True)
class Awaited:
    """The members whose delivery the next step waits for.

    Attributes:
        members: Bitmask of the members that have not delivered yet.
        of: Bitmask of all members that deliver in this step.
        dispensable: Whether a member that stalls is late: the round can try to go on without it.
    """

    members: int
    of: int
    dispensable: bool = False


class Attendance:
    """The members that can be reached or are waited for, and the time that one member gives them in each step.

    Times are monotonic seconds.

    Attributes:
        lost: Bitmask of the members that are out of reach now.
        gone: Bitmask of the members that have left for good.
        silent: Bitmask of the lost members that have given no sign of life for the longest silence.
        returned: Bitmask of the members that were out of reach, and came back.
        late: Bitmask of the members for which the round no longer waits.
        level: Stalls since the last progress.
        patient_until: Until when members may ask for patience: no member holds a round longer by words or a slow link.
        ends_at: When the members still awaited in this step have had enough time; infinite while that is not known.
    """

    def __init__(self, group: Group, now: float, timeout: float) -> None:
        self.group = group
        self.patient_until = now + timeout / 2
        self.lost = 0
        self.gone = 0
        self.silent = 0
        self.returned = 0
        self.late = 0
        self.level = 0
        self.ends_at = float("inf")
        self._lost_at = now
        self._progress_at = now
        self._step: Hashable = None
        self._step_began = now
        self._spent = False
        self._delivers_until = [now] * group.size

    @property
    def deadline(self) -> float:
        """When `stall` must be called next, in monotonic seconds."""
        return min(self._progress_at + (self.level + 1) * STALL_SECONDS, self.ends_at)

    @property
    def here(self) -> int:
        """Bitmask of the members that can be reached."""
        return self.group.everyone & ~self.lost

    @property
    def hoped_for(self) -> int:
        """Bitmask of the members that may still take part: a lost member counts until a stall has passed.

        A broken connection may be opened again at once. In a group of two, each break would otherwise end the round. A
        silent member has had that time, whether or not it delivered before.
        """
        return self.group.everyone & ~(self.lost if self.level else self.gone | self.silent)

    @property
    def given_up_at(self) -> float:
        """When all members that are lost now have been lost for at least one stall, in monotonic seconds."""
        return self._lost_at + STALL_SECONDS

    def lose(self, member: int, now: float, gone: bool, silent: bool) -> bool:
        """A member is out of reach, `silent`, or `gone` for good; returns whether it was in reach until now."""
        news = not self.lost >> member & 1
        self._lost_at = now if news else self._lost_at
        self.lost |= 1 << member
        self.gone |= gone << member
        self.silent |= silent << member
        return news

    def come_back(self, member: int) -> bool:
        """A member is heard again; returns whether it takes part again."""
        if not self.lost >> member & 1 or self.gone >> member & 1:
            return False
        self.lost &= ~(1 << member)
        self.silent &= ~(1 << member)
        self.returned |= 1 << member
        return True

    def begin(self, step: Hashable, now: float) -> None:
        """Note the round's step: in a new step, all members have their time anew."""
        if step != self._step:
            self._step, self._step_began = step, now
            self.ends_at, self._spent = float("inf"), False

    def excuse(self, seconds: float, now: float) -> None:
        """Count no time of the last `seconds`, in which this process stood still."""
        times = self._progress_at, self._step_began, self._lost_at
        self._progress_at, self._step_began, self._lost_at = (min(at + seconds, now) for at in times)
        self.ends_at += seconds
        self._delivers_until = [until + seconds for until in self._delivers_until]

    def progress(self, now: float) -> None:
        """Note progress: the level is 0 again."""
        self._progress_at = now
        self.level = 0

    def arrived(self, sender: int, now: float) -> None:
        """Count a part as progress, unless its sender was late and the patience of this step is spent."""
        if self._spent and self.late >> sender & 1:
            return
        self.late &= ~(1 << sender)
        self.progress(now)

    def received(self, sender: int, count: int, awaited: Awaited, now: float) -> bool:
        """Count bytes of a heartbeat's time; returns whether the round waits for their sender, and they were enough.

        Bytes count for the time that they take at `MIN_BYTES_PER_SECOND`, within `MAX_SILENCE_SECONDS`: of the flows
        that share a slow uplink, one may carry nothing for a while.
        """
        until = max(self._delivers_until[sender], self._progress_at) + count / MIN_BYTES_PER_SECOND
        self._delivers_until[sender] = min(until, now + MAX_SILENCE_SECONDS)
        self._measure(awaited, now)
        return bool(awaited.members >> sender & 1) and count >= MIN_BYTES_PER_SECOND * HEARTBEAT_SECONDS

    def stall(self, awaited: Awaited, now: float) -> bool:
        """Raise the level if a stall is due; returns whether it was raised.

        While some awaited members still deliver, the level stays, and only the others become late.
        """
        self._measure(awaited, now)
        if now < self.deadline:
            return False
        if now >= self.ends_at:
            self._spent, self.ends_at = True, float("inf")
        delivering = sum(1 << member for member, until in enumerate(self._delivers_until) if until >= now)
        slow = 0 if self._spent else awaited.members & delivering & ~self.lost
        if awaited.dispensable:
            self.late |= awaited.members & ~slow
        if slow:
            self.progress(now)
            return False
        self.level += 1
        return True

    def _measure(self, awaited: Awaited, now: float) -> None:
        """Set `ends_at` once at least half of the members that deliver in this step are through."""
        half_are_through = 2 * awaited.members.bit_count() <= awaited.of.bit_count()
        if not awaited.members:
            self.ends_at = float("inf")
        elif self.ends_at == float("inf") and not self._spent and half_are_through:
            on_slow_link = min(now + self.group.encoded_size / SLOWEST_LINK, self.patient_until)
            self.ends_at = max(now + SLOWNESS * (now - self._step_began) + GRACE_SECONDS, on_slow_link)
