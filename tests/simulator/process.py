"""A member's process in a simulation: what the asyncio driver does around an endpoint, by its own clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equipoise.averaging.allreduce import events
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.endpoint import Endpoint
from simulator.core import NEVER
from simulator.member import Frame, Job, Member, Output, Values
from simulator.network import Link

if TYPE_CHECKING:
    from simulator.world import World

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
    """One process: a member, which is given this process's own clock.

    Its events wait while it is stopped, and never happen once it is dead.

    Args:
        world: What it lives in.
        index: Which member it is.
        start: How it begins.

    Attributes:
        incoming: The links from all other members that it can have one with.
        begun: Whether it knows of the round.
        ended_at: When its machine ended, in virtual seconds.
        flows: Its round's frames wait for another channel.
        dead: Whether it was killed.
        stopped: Whether it is stopped (SIGSTOP).
        resumed_at: When it last went on after a stop.
    """

    flows = (b"",)

    def __init__(self, world: World, index: int, start: Start) -> None:
        group = world.group
        self.index = index
        self.start = start
        self.incoming: Sequence[tuple[int, Link]] = ()
        self.begun = self.dead = self.stopped = False
        self.ended_at = self.resumed_at = 0.0
        self._waiting: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []
        self._wakes_at = NEVER
        self._world = world
        self.member = Member(group, index, start.values, self._time(start.at), start.timeout, bare=False)
        assert isinstance(self.member.endpoint, Endpoint)
        self._endpoint = self.member.endpoint
        self._early: list[Frame] = []
        self._received: dict[int, int] = {}

    @property
    def closed(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.dead or self.member.closed

    @property
    def deadline(self) -> float:
        """When to wake it, in virtual seconds: a little later than it wants, for the clocks' rounding."""
        return self._endpoint.deadline - self.start.clock + ROUNDING_SECONDS

    def begin(self) -> None:
        """It learns of the round."""
        self.begun = True
        outputs = self._noted(self.member.start(self._time()))
        for frame in self._early:
            outputs += self._receive(frame)
        self._world.step(self, "begins", outputs)

    def receive(self, frame: Frame) -> None:
        """A frame has come."""
        if self.member.closed:
            return
        outputs = self._receive(frame)
        if isinstance(frame.message, wire.Heartbeat):
            self._world.act(self, outputs)
        else:
            self._world.step(self, frame, outputs)

    def lose(self, other: int, reason: str) -> None:
        """No channel to another member can be opened."""
        if self.member.closed:
            return
        outputs: list[Output] = []
        if self.begun:
            outputs = self._hear(events.PeerLost(other, reason))
        self._world.step(self, f"loses p{other}: {reason}", outputs)

    def leave(self) -> None:
        """Its user cancels the round."""
        if self.member.closed:
            return
        self._world.step(self, "leaves", self._hear(events.Withdrew("cancelled by its user")))

    def wake(self) -> None:
        """Its deadline may have passed."""
        if self.member.closed:
            return
        if not self.begun or self.deadline > self._world.now:
            self.arm()
            return
        for other, link in self.incoming:
            count = link.received()
            self._endpoint.received(other, count - self._received.get(other, 0))
            self._received[other] = count
        due = self.member.machine.deadline <= self._time()
        outputs = self._hear(events.Woke())
        if due:
            self._world.step(self, "wakes", outputs)
        else:
            self._world.act(self, outputs)

    def reduced(self, job: Job) -> None:
        """A reduction is done."""
        if self.member.closed:
            return
        self._world.step(self, job, self._noted(self.member.reduced(job, self._time())))

    def perform(
        self, outputs: list[Output], send: Callable[[Frame], None], reducing: Callable[[], float]
    ) -> None:
        """Do what the member asks for, unless it is dead.

        Args:
            outputs: Frames and reductions.
            send: Has a frame travel.
            reducing: Draws the seconds that a reduction takes.
        """
        if self.dead:
            return
        for output in outputs:
            if isinstance(output, Job):
                self.after(reducing(), self.reduced, output)
            else:
                send(output)
        self.arm()

    def happen(self, timer: bool, event: Callable[..., None], *args: Any) -> None:
        """Have something happen to the process as soon as it runs."""
        if self.stopped and not self.dead:
            self._waiting.append((timer, event, args))
        elif not self.dead:
            event(*args)

    def after(self, seconds: float, event: Callable[..., None], *args: Any) -> None:
        """Have something happen to the process some time later."""
        self._world.at(self._world.now + seconds, self.happen, False, event, *args)

    def arm(self) -> None:
        """Have the process woken at its deadline."""
        if self.deadline < self._wakes_at:
            self._wakes_at = self.deadline
            self._world.at(self._wakes_at, self._wake)

    def _wake(self) -> None:
        self._wakes_at = NEVER
        self.happen(True, self.wake)

    def stop(self) -> None:
        """As by SIGSTOP."""
        self.stopped = True

    def kill(self) -> None:
        """As by SIGKILL."""
        self.dead = True

    def resume(self, timers_first: bool = False) -> None:
        """As by SIGCONT: what came meanwhile comes at once; `timers_first`, its timers before all else."""
        self._world.tell(self.index, "goes on")
        self.stopped, self.resumed_at = False, self._world.now
        waiting, self._waiting = self._waiting, []
        for timer, event, args in sorted(waiting, key=lambda one: timers_first and not one[0]):
            self.happen(timer, event, *args)

    def _receive(self, frame: Frame) -> list[Output]:
        if not self.begun:
            self._early.append(frame)
            return []
        outputs = self.member.heard(frame.sender, self._time())
        return self._noted(outputs + self.member.receive(frame, self._time()))

    def _hear(self, event: events.Event) -> list[Output]:
        return self._noted(self.member.tell(event, self._time()))

    def _time(self, at: float | None = None) -> float:
        """By its own clock, now or at another time."""
        return (self._world.now if at is None else at) + self.start.clock

    def _noted(self, outputs: list[Output]) -> list[Output]:
        if self.member.ended is not None and not self.ended_at:
            self.ended_at = self._world.now
        return outputs
