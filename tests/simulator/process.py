"""A member's process in a simulation: what the asyncio driver does around a machine, by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.liveness import HEARTBEAT_SECONDS, Liveness
from simulator import core
from simulator.member import Frame, Job, Member, Output, Values
from simulator.network import Link

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


class Surroundings(Protocol):
    """What a process lives in: a world of one round, or one round of a world.

    Attributes:
        clock: Of the world.
        group: The round.
    """

    clock: core.Clock
    group: events.Group

    def step(self, process: Process, what: object, outputs: list[Output]) -> None:
        """The machine of a process has taken an event: do what it asks for."""

    def act(self, process: Process, outputs: list[Output]) -> None:
        """Do what a process asks for, unless it is dead."""

    def tell(self, index: int | None, what: object) -> None:
        """Something has happened to a member."""


class Process(core.Process):
    """One process: a member, its failure detector, and the bulk it keeps back from members not heard of yet.

    The machine and the detector are given this process's own clock.

    Args:
        world: What it lives in.
        index: Which member it is.
        start: How it begins.

    Attributes:
        incoming: The links from all other members that it can have one with.
        begun: Whether it knows of the round.
        ended_at: When its machine ended, in virtual seconds.
    """

    def __init__(self, world: Surroundings, index: int, start: Start) -> None:
        super().__init__(world.clock)
        group = world.group
        self.index = index
        self.start = start
        self.incoming: Sequence[tuple[int, Link]] = ()
        self.begun = False
        self.ended_at = 0.0
        self.member = Member(group, index, start.values, self._time(start.at), start.timeout)
        others = [
            other
            for other in range(group.size)
            if other != index and group.dialable & (1 << other | 1 << index)
        ]
        self._world = world
        self._heartbeats: list[Output] = [Frame(index, other, wire.Heartbeat()) for other in others]
        self._liveness = Liveness(others, self._time(start.at))
        self._early: list[Frame] = []
        self._unheard: dict[int, list[Output]] = {other: [] for other in others}
        self._received = dict.fromkeys(others, 0)

    def happen(self, timer: bool, event: Callable[..., None], *args: Any) -> None:
        """As any process; nothing happens to it any more once its round is closed."""
        if not self.member.closed:
            super().happen(timer, event, *args)

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.dead or self.member.closed

    @property
    def deadline(self) -> float:
        """When to wake the machine, in virtual seconds: a little later than it wants, for the clocks' rounding."""
        return self.member.machine.deadline - self.start.clock + ROUNDING_SECONDS

    def begin(self) -> None:
        """It learns of the round."""
        self.begun = True
        outputs = self._gate(self.member.start(self._time()))
        for frame in self._early:
            outputs += self._receive(frame)
        self._world.step(self, "begins", outputs)
        self.beat()

    def receive(self, frame: Frame) -> None:
        """A frame has come."""
        outputs = self._receive(frame)
        if isinstance(frame.message, wire.Heartbeat):
            self._world.act(self, outputs)
        else:
            self._world.step(self, frame, outputs)

    def lose(self, other: int, reason: str, connected: bool) -> None:
        """Frames to or from another member may have been lost."""
        outputs: list[Output] = []
        if self.begun:
            if not connected:
                self._liveness.lose(other)
                if other in self._unheard:
                    self._unheard[other] = []
            outputs = self._hear(events.PeerLost(other, reason, connected))
        self._world.step(self, f"loses p{other}: {reason}", outputs)

    def leave(self) -> None:
        """Its user cancels the round."""
        self._world.step(self, "leaves", self._hear(events.Withdrew("cancelled by its user")))

    def wake(self) -> None:
        """The machine's deadline may have passed."""
        self._world.step(self, "wakes", self._hear(events.Woke()) if self.deadline <= self.clock.now else [])

    def reduced(self, job: Job) -> None:
        """A reduction is done."""
        self._world.step(self, job, self._gate(self.member.reduced(job, self._time())))

    def beat(self) -> None:
        """Say that it lives, and see who else does; again and again, sooner if someone falls silent sooner."""
        outputs: list[Output] = []
        for other, link in self.incoming:
            count = link.received()
            news = count - self._received[other]
            self._received[other] = count
            if self._liveness.received(other, news, self._time()):
                outputs += self._hear(events.PeerReturned(other))
            if news:
                outputs += self._hear(events.BytesReceived(other, news))
        for other in self._liveness.check(self._time()):
            outputs += self._hear(events.PeerLost(other, "silent: no sign of life"))
        self._world.act(self, outputs + (self._heartbeats if self.member.machine.needed else []))
        if self.member.machine.needed:
            falls_silent = self._liveness.deadline - self.start.clock + ROUNDING_SECONDS
            next_beat = min(self.clock.now + HEARTBEAT_SECONDS, falls_silent)
            self.clock.at(next_beat, self.happen, True, self.beat)

    def resume(self, timers_first: bool = False) -> None:
        """It goes on."""
        self._world.tell(self.index, "goes on")
        super().resume(timers_first)

    def _receive(self, frame: Frame) -> list[Output]:
        if not self.begun:
            self._early.append(frame)
            return []
        outputs: list[Output] = []
        if self._liveness.heard(frame.sender, self._time()):
            outputs += self._hear(events.PeerReturned(frame.sender))
        # Who says something about the round knows of it, and has a place for what we send.
        outputs += self._unheard.pop(frame.sender, [])
        return outputs + self._gate(self.member.receive(frame, self._time()))

    def _hear(self, event: events.Event) -> list[Output]:
        return self._gate(self.member.tell(event, self._time()))

    def _time(self, at: float | None = None) -> float:
        """By its own clock, now or at another time."""
        return (self.clock.now if at is None else at) + self.start.clock

    def _gate(self, outputs: list[Output]) -> list[Output]:
        if self.member.ended is not None and not self.ended_at:
            self.ended_at = self.clock.now
        passed: list[Output] = []
        for output in outputs:
            kept = self._unheard.get(output.to) if isinstance(output, Frame) and output.bulk else None
            (passed if kept is None else kept).append(output)
        return passed
