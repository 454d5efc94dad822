"""A round in virtual time: real machines and real bytes on a simulated network, with faults, all from one seed.

What has happened is a list of lines, the story; the same scenario always tells the same one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Fail, Finish, Withdrew
from equipoise.averaging.allreduce.messages import Decision
from equipoise.averaging.sim.arithmetic import encode
from equipoise.averaging.sim.faults import (
    Corrupt,
    Cut,
    Drop,
    Fault,
    Forge,
    Hold,
    Kill,
    Leave,
    Poison,
    Slow,
    Stop,
)
from equipoise.averaging.sim.member import Frame, Job, Output, Violation, check_agreement
from equipoise.averaging.sim.network import Link
from equipoise.averaging.sim.process import ROUNDING_SECONDS, Process
from equipoise.averaging.sim.scenario import Scenario

MAX_EVENTS = 1_000_000
"""More than any sound round takes: machines that talk in circles are found by it."""

MAX_REDUCE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulated round came to.

    Attributes:
        ends: One per member: `Finish`, `Fail`, or None if it died before.
        steps: Events that machines took.
        seconds: Virtual seconds until the last member that must succeed, or any, had ended.
        calm_at: Virtual seconds when the last fault was over.
        story: What happened, if that was asked for.
    """

    ends: tuple[Finish | Fail | None, ...]
    steps: int
    seconds: float
    calm_at: float
    story: tuple[str, ...]


class World:
    """One simulated round.

    Args:
        scenario: What to simulate.
        keep_story: Whether to keep the story.

    Attributes:
        now: Virtual seconds.
        steps: Events that machines have taken.
        struck_at: When the first fault struck, if one has.
        calm_at: When the last fault so far is over.
        story: What has happened, a line each.
    """

    def __init__(self, scenario: Scenario, keep_story: bool = False) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.steps = 0
        self.struck_at: float | None = None
        self.calm_at = 0.0
        self.story: list[str] = []
        self._keep_story = keep_story
        self._random = Random(scenario.seed)
        group = scenario.group
        self._processes = [Process(group, index, start) for index, start in enumerate(scenario.starts)]
        self._links = {
            (one, other): Link(scenario.weather, self._random)
            for one in range(group.size)
            for other in range(group.size)
            if one != other and group.dialable & (1 << one | 1 << other)
        }
        self._incoming: list[list[tuple[int, Link]]] = [[] for _ in self._processes]
        for (sender, to), link in self._links.items():
            self._incoming[to].append((sender, link))
        self._wakes = [float("inf")] * group.size
        self._deferred: list[list[tuple[bool, Callable[..., None], tuple[Any, ...]]]] = [
            [] for _ in self._processes
        ]
        self._corrupted = [0] * group.size
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._awaited: dict[object, list[Fault]] = {}
        self._phases = [""] * group.size

    def run(self) -> Report:
        """Simulate until every living member has closed.

        Raises:
            Violation: A promise was broken.
        """
        for process in self._processes:
            self._later(process.start.at, self._begin, process)
        for when, fault in self.scenario.faults:
            if when.seconds is not None:
                self._later(when.seconds, self._strike, fault)
            else:
                moment = when.step if when.step is not None else (when.member, when.phase)
                self._awaited.setdefault(moment, []).append(fault)
        for _ in range(MAX_EVENTS):
            if all(process.closed for process in self._processes):
                return self._judge()
            if not self._queue:
                raise Violation("nothing more will happen, and a member has not closed")
            self.now, _, happen, args = heapq.heappop(self._queue)
            happen(*args)
        raise Violation(f"no end after {MAX_EVENTS} events")

    # ---- time ----

    def _later(self, at: float, happen: Callable[..., None], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at, self._order, happen, args))

    def _is_away(self, process: Process, timer: bool, happen: Callable[..., None], *args: Any) -> bool:
        """Whether a process is dead, or stopped, so that this waits for it to go on."""
        if process.stopped and not process.dead:
            self._deferred[process.index].append((timer, happen, args))
        return process.dead or process.stopped

    # ---- what happens to a process ----

    def _begin(self, process: Process) -> None:
        if not self._is_away(process, True, self._begin, process):
            self._step(process, "begins", process.begin(self.now))
            self._beat(process)

    def _beat(self, process: Process) -> None:
        if process.member.closed or self._is_away(process, True, self._beat, process):
            return
        incoming = self._incoming[process.index]
        received = {sender: link.received(self.now) for sender, link in incoming}
        self._act(process, process.beat(received, self.now))
        if process.beats:
            self._later(process.next_beat(self.now), self._beat, process)

    def _wake(self, process: Process) -> None:
        self._wakes[process.index] = float("inf")
        if not process.member.closed and not self._is_away(process, True, self._wake, process):
            self._step(process, "wakes", process.wake(self.now))

    def _arrive(self, link: Link, epoch: int, frame: Frame) -> None:
        process = self._processes[frame.to]
        if link.epoch(frame.bulk) != epoch or process.member.closed:
            return
        if link.held_until > self.now:
            self._later(link.held_until, self._arrive, link, epoch, frame)
        elif not self._is_away(process, False, self._arrive, link, epoch, frame):
            if isinstance(frame.message, wire.Heartbeat):
                self._act(process, process.receive(frame, self.now))
            else:
                self._step(process, frame, process.receive(frame, self.now))

    def _reduced(self, process: Process, job: Job) -> None:
        if not self._is_away(process, False, self._reduced, process, job):
            self._step(process, job, process.reduced(job, self.now))

    def _lose(self, process: Process, other: int, reason: str) -> None:
        if not process.member.closed and not self._is_away(
            process, False, self._lose, process, other, reason
        ):
            self._step(process, f"loses p{other}: {reason}", process.lose(other, reason, self.now))

    def _leave(self, process: Process) -> None:
        if not process.begun or process.member.closed:
            return
        if not self._is_away(process, False, self._leave, process):
            self._step(process, "leaves", process.tell(Withdrew("cancelled by its user"), self.now))

    def _step(self, process: Process, what: object, outputs: list[Output]) -> None:
        self.steps += 1
        self._tell(process.index, what)
        faults = self._awaited.pop(self.steps, [])
        phase = process.member.machine.phase
        if phase != self._phases[process.index]:
            self._phases[process.index] = phase
            faults = faults + self._awaited.pop((process.index, phase), [])
        for fault in faults:
            if isinstance(fault, Kill) and fault.member == process.index:
                self._act(process, outputs[: int(fault.done * (len(outputs) + 1))])
            self._strike(fault)
        self._act(process, outputs)

    # ---- what a process does ----

    def _act(self, process: Process, outputs: list[Output]) -> None:
        if process.dead:
            return
        for output in outputs:
            if isinstance(output, Job):
                self._later(
                    self.now + self._random.random() * MAX_REDUCE_SECONDS, self._reduced, process, output
                )
            else:
                self._send(output)
        if process.deadline < self._wakes[process.index]:
            self._wakes[process.index] = process.deadline
            self._later(max(process.deadline, self.now), self._wake, process)

    def _send(self, frame: Frame) -> None:
        link = self._links[frame.sender, frame.to]
        if isinstance(frame.message, wire.Mean) and self._corrupted[frame.sender] >> frame.to & 1:
            frame = Frame(frame.sender, frame.to, frame.message, frame.body[::-1])
        for at in link.arrivals(frame.bulk, self.now):
            self._later(at, self._arrive, link, link.epoch(frame.bulk), frame)

    # ---- faults ----

    def _strike(self, fault: Fault) -> None:
        self._tell(None, fault)
        if self.struck_at is None:
            self.struck_at = self.now
        match fault:
            case Kill(member, noticed):
                self._kill(self._processes[member], noticed)
            case Stop(member, seconds, timers_first):
                self._stop(self._processes[member], seconds, timers_first)
            case Cut(links, seconds, noticed):
                self._cut(links, seconds, noticed)
            case Drop(links):
                self._drop(links)
            case Hold(links, seconds):
                for link in filter(None, map(self._links.get, links)):
                    link.held_until = self._calm(seconds)
            case Leave(member):
                self._leave(self._processes[member])
            case Corrupt(member, victims):
                self._corrupted[member] |= victims
            case Slow(links, transfer):
                for link in filter(None, map(self._links.get, links)):
                    link.slow_down(transfer)
            case Forge(member):
                self._forge(self._processes[member])
            case Poison(member):
                self._poison(self._processes[member])
        self._calm(0.0)

    def _calm(self, seconds: float) -> float:
        self.calm_at = max(self.calm_at, self.now + seconds)
        return self.now + seconds

    def _kill(self, process: Process, noticed: float | None) -> None:
        process.dead = True
        for (sender, to), link in self._links.items():
            if sender == process.index and noticed is not None:
                self._later(self._calm(noticed * self._random.random()), self._broke, link, sender, to)

    def _broke(self, link: Link, sender: int, to: int) -> None:
        link.lose()
        self._lose(self._processes[to], sender, "connection reset")

    def _stop(self, process: Process, seconds: float, timers_first: bool) -> None:
        if not process.dead and not process.stopped:
            process.stopped = True
            self._later(self._calm(seconds), self._resume, process, timers_first)

    def _resume(self, process: Process, timers_first: bool) -> None:
        process.stopped = False
        process.resumed_at = self.now
        deferred, self._deferred[process.index] = self._deferred[process.index], []
        self._tell(process.index, f"goes on, {len(deferred)} events late")
        for _, happen, args in sorted(deferred, key=lambda one: timers_first and not one[0]):
            happen(*args)

    def _cut(self, links: tuple[tuple[int, int], ...], seconds: float, noticed: float) -> None:
        for sender, to in links:
            link = self._links.get((sender, to))
            if link is not None:
                link.cut()
                self._later(self._calm(seconds), link.heal)
                for one, other in ((sender, to), (to, sender)):
                    at = self._calm(noticed * self._random.random())
                    self._later(at, self._lose, self._processes[one], other, "connection reset")

    def _drop(self, links: tuple[tuple[int, int], ...]) -> None:
        for sender, to in links:
            link = self._links.get((sender, to))
            if link is not None:
                link.drop()
                self._told_of_drop(self._processes[sender], to)

    def _told_of_drop(self, process: Process, other: int) -> None:
        if not process.member.closed and not self._is_away(
            process, False, self._told_of_drop, process, other
        ):
            self._step(process, f"lost values on their way to p{other}", process.drop(other, self.now))

    def _poison(self, process: Process) -> None:
        group, over = self.scenario.group, self.scenario.group.contributors
        for part, where in enumerate(group.parts):
            for to in range(group.size):
                if (process.index, to) in self._links:
                    body = encode((0.0,) * where.size)
                    self._send(Frame(process.index, to, wire.Mean(part, over), body))

    def _forge(self, process: Process) -> None:
        group, me = self.scenario.group, process.index
        for ballot in range(2 * group.size):
            for contributors in (group.contributors, group.contributors & ~1):
                held = wire.Held(ballot, Decision(contributors, group.dialable), bytes(32))
                signed = process.member.notary.seal(held)
                assert isinstance(signed, wire.Held)
                proofs = tuple((member, signed.signature) for member in range(group.size))
                commit = wire.Commit(ballot, held.decision, held.digest, group.everyone, proofs)
                for to in range(group.size):
                    if (me, to) in self._links:
                        self._send(Frame(me, to, signed))
                        self._send(Frame(me, to, commit))

    # ---- the end ----

    def _judge(self) -> Report:
        members = [process.member for process in self._processes]
        honest = not any(self._corrupted)
        check_agreement(members, exact=honest)
        for process in self._processes:
            self._judge_one(process)
        must = self.scenario.core or -1
        ended = [process.ended_at for process in self._processes if must >> process.index & 1]
        ends = tuple(member.ended for member in members)
        return Report(ends, self.steps, max(ended), self.calm_at, tuple(self.story))

    def _judge_one(self, process: Process) -> None:
        name, end = f"p{process.index}", process.member.ended
        if process.dead:
            return
        due = max(process.start.at + process.start.timeout, process.resumed_at) + 2 * ROUNDING_SECONDS
        if process.ended_at > due:
            raise Violation(f"{name} ended at {process.ended_at:g} s, not by {due:g} s")
        if (process.member.result is not None) != isinstance(end, Finish):
            raise Violation(f"{name} ended by {end} with the result {process.member.result!r}")
        if self.scenario.core >> process.index & 1 and not isinstance(end, Finish):
            raise Violation(f"{name} of the core failed: {end}; {process.member.machine.notes}")

    def _tell(self, index: int | None, what: object) -> None:
        if self._keep_story:
            who = "fault" if index is None else f"p{index}"
            self.story.append(f"{self.now:9.4f} s {self.steps:5d} {who}: {what}")
