"""A member's process in a simulation: what the asyncio driver does around a machine, by its own clock."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import (
    BytesReceived,
    Event,
    Finish,
    Group,
    PeerLost,
    PeerReturned,
    Woke,
)
from equipoise.averaging.allreduce.liveness import HEARTBEAT_SECONDS, Liveness
from equipoise.averaging.sim.member import Frame, Job, Member, Output, Values

ROUNDING_SECONDS = 1e-6
"""By how much the sum of a time and a clock's offset may be off, and much to spare."""


@dataclass(frozen=True, slots=True)
class Start:
    """How one member begins.

    Attributes:
        values: Its contribution.
        at: Virtual seconds when it knows of the round.
        clock: What its clock adds to virtual time.
        timeout: Seconds.
    """

    values: Values
    at: float
    clock: float
    timeout: float


class Process:
    """One process: a member, its failure detector, and the bulk it keeps back from members not heard of yet.

    Times are virtual; the machine and the detector are given this process's own clock.

    Attributes:
        begun: Whether it knows of the round.
        dead: Whether it was killed.
        stopped: Whether it is stopped (SIGSTOP).
        resumed_at: When it last went on after a stop.
        ended_at: When its machine ended.
    """

    def __init__(self, group: Group, index: int, start: Start) -> None:
        self.group = group
        self.index = index
        self.start = start
        self.dead = False
        self.stopped = False
        self.resumed_at = 0.0
        self.ended_at = 0.0
        self.member = Member(group, index, start.values, start.at + start.clock, start.timeout)
        others = [
            other
            for other in range(group.size)
            if other != index and group.dialable & (1 << other | 1 << index)
        ]
        self._heartbeats: list[Output] = [Frame(index, other, wire.Heartbeat()) for other in others]
        self._liveness = Liveness(others, start.at + start.clock)
        self.begun = False
        self._early: list[Frame] = []
        self._unheard: dict[int, list[Output]] = {other: [] for other in others}
        self._received = dict.fromkeys(others, 0)

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.dead or self.member.closed

    @property
    def beats(self) -> bool:
        """Whether it still shows signs of life."""
        return self.member.machine.needed

    @property
    def deadline(self) -> float:
        """When to wake the machine, in virtual seconds: a little later than it wants, for the clocks' rounding."""
        return self.member.machine.deadline - self.start.clock + ROUNDING_SECONDS

    def begin(self, now: float) -> list[Output]:
        """It learns of the round."""
        self.begun = True
        outputs = self._gate(self.member.start(now + self.start.clock), now)
        for frame in self._early:
            outputs += self.receive(frame, now)
        return outputs

    def receive(self, frame: Frame, now: float) -> list[Output]:
        """A frame has come."""
        if not self.begun:
            self._early.append(frame)
            return []
        sender, clock = frame.sender, now + self.start.clock
        outputs: list[Output] = []
        if self._liveness.heard(sender, clock):
            outputs += self.tell(PeerReturned(sender), now)
        # Who says something about the round knows of it, and has a place for what we send.
        outputs += self._unheard.pop(sender, [])
        return outputs + self._gate(self.member.receive(frame, clock), now)

    def tell(self, event: Event, now: float) -> list[Output]:
        """Something that is no frame has happened."""
        return self._gate(self.member.tell(event, now + self.start.clock), now)

    def lose(self, other: int, reason: str, now: float) -> list[Output]:
        """Frames to or from another member may have been lost."""
        if not self.begun:
            return []
        self._liveness.lose(other)
        if other in self._unheard:
            self._unheard[other] = []
        return self.tell(PeerLost(other, reason), now)

    def drop(self, other: int, now: float) -> list[Output]:
        """Values on their way to another member were lost, which is still connected."""
        return (
            self.tell(PeerLost(other, "one of its channels broke", connected=True), now) if self.begun else []
        )

    def beat(self, received: dict[int, int], now: float) -> list[Output]:
        """Say that it lives, and see who else does.

        Args:
            received: Bytes of parts that have come in from each other member so far.
            now: Virtual seconds.
        """
        outputs: list[Output] = []
        for other, count in received.items():
            news = count - self._received[other]
            self._received[other] = count
            if self._liveness.received(other, news, now + self.start.clock):
                outputs += self.tell(PeerReturned(other), now)
            if news:
                outputs += self.tell(BytesReceived(other, news), now)
        for other in self._liveness.check(now + self.start.clock):
            outputs += self.tell(PeerLost(other, "silent: no sign of life"), now)
        return outputs + (self._heartbeats if self.beats else [])

    def next_beat(self, now: float) -> float:
        """When to beat after now: by the usual pace, or sooner if someone falls silent sooner."""
        return min(now + HEARTBEAT_SECONDS, self._liveness.deadline - self.start.clock + ROUNDING_SECONDS)

    def wake(self, now: float) -> list[Output]:
        """The machine's deadline may have passed."""
        return self.tell(Woke(), now) if self.deadline <= now else []

    def reduced(self, job: Job, now: float) -> list[Output]:
        """A reduction is done."""
        return self._gate(self.member.reduced(job, now + self.start.clock), now)

    def finished(self) -> bool:
        """Whether it has reported success, even if it died later."""
        return isinstance(self.member.ended, Finish)

    def _gate(self, outputs: list[Output], now: float) -> list[Output]:
        if self.member.ended is not None and not self.ended_at:
            self.ended_at = now
        passed: list[Output] = []
        for output in outputs:
            kept = self._unheard.get(output.to) if isinstance(output, Frame) and output.bulk else None
            (passed if kept is None else kept).append(output)
        return passed
