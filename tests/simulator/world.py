"""A round in virtual time: real machines and real bytes on a simulated network, with faults, all from one seed.

What has happened is a list of lines, the story; the same scenario always tells the same one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.events import Fail, Finish, Group
from equipoise.averaging.allreduce.messages import Decision
from simulator.arithmetic import encode
from simulator.core import Violation
from simulator.faults import Fault, When
from simulator.member import Frame, Output, check_agreement
from simulator.network import Network, Weather
from simulator.process import ROUNDING_SECONDS, Process, Start

MAX_REDUCE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Scenario:
    """A round to be simulated.

    Attributes:
        seed: Of everything left to chance on the way.
        group: The round.
        starts: One per member.
        weather: Of the network.
        faults: What goes wrong, and when.
        core: Bitmask of the members that must succeed; 0 where only safety is promised.
    """

    seed: int
    group: Group
    starts: tuple[Start, ...]
    weather: Weather
    faults: tuple[tuple[When, Fault], ...] = ()
    core: int = 0


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


class World(Network):
    """One simulated round.

    Args:
        scenario: What to simulate.
        keep_story: Whether to keep the story.

    Attributes:
        steps: Events that machines have taken.
        struck_at: When the first fault struck, if one has.
        story: What has happened, a line each.
    """

    def __init__(self, scenario: Scenario, keep_story: bool = False) -> None:
        super().__init__(scenario.weather, Random(scenario.seed))
        self.scenario, self.group = scenario, scenario.group
        self.steps = 0
        self.struck_at: float | None = None
        self.story: list[str] = []
        self._keep_story = keep_story
        group = scenario.group
        for index, start in enumerate(scenario.starts):
            self.processes[index] = Process(self, index, start)
        for one, other in itertools.combinations(range(group.size), 2):
            if group.dialable & (1 << one | 1 << other):
                self._connect(one, other)
        for index, process in self.processes.items():
            process.incoming = [(sender, link) for (sender, to), link in self.links.items() if to == index]
        self._corrupted = [0] * group.size
        self._awaited: dict[object, list[Fault]] = {}
        self._phases = [""] * group.size
        self._stepping: tuple[Process | None, list[Output]] = (None, [])

    def run(self) -> Report:
        """Simulate until every living member has closed.

        Raises:
            Violation: A promise was broken.
        """
        for process in self.processes.values():
            self.at(process.start.at, process.happen, True, process.begin)
        for when, fault in self.scenario.faults:
            if when.seconds is not None:
                self.at(when.seconds, self._strike, fault)
            else:
                moment = when.step if when.step is not None else (when.member, when.phase)
                self._awaited.setdefault(moment, []).append(fault)
        if not self.run_until(lambda: all(process.closed for process in self.processes.values())):
            raise Violation("nothing more will happen, and a member has not closed")
        return self._judge()

    def step(self, process: Process, what: object, outputs: list[Output]) -> None:
        """Do what a process asks for after an event; faults that wait for this moment strike first."""
        self.steps += 1
        self.tell(process.index, what)
        faults = self._awaited.pop(self.steps, [])
        phase = process.member.machine.phase
        if phase != self._phases[process.index]:
            self._phases[process.index] = phase
            faults = faults + self._awaited.pop((process.index, phase), [])
        self._stepping = process, outputs
        for fault in faults:
            self._strike(fault)
        self._stepping = None, []
        self.act(process, outputs)

    def act(self, process: Process, outputs: list[Output]) -> None:
        """Do what a process asks for, unless it is dead."""
        process.perform(outputs, self._send, lambda: self.random.random() * MAX_REDUCE_SECONDS)

    def _send(self, frame: Frame, forged: bool = False) -> None:
        sender = self.processes[frame.sender].member
        if isinstance(frame.message, wire.Mean) and self._corrupted[frame.sender] >> frame.to & 1:
            frame = Frame(frame.sender, frame.to, frame.message, frame.body[::-1])
        beat = wire.encode(frame.message) if isinstance(frame.message, wire.Heartbeat) else b""
        receive, wanted = self.processes[frame.to].receive, lambda: forged or sender.keeps(frame)
        self.transmit(frame.sender, frame.to, receive, frame, bulk=frame.bulk, beat=beat, wanted=wanted)

    # ---- faults ----

    def _strike(self, fault: Fault) -> None:
        self.tell(None, fault)
        if self.struck_at is None:
            self.struck_at = self.now
        fault.strike(self)
        self.calm(0.0)

    def kill(self, name: int, noticed: float | None = 0.0, done: float = 1.0) -> None:
        """Kill a member, after it has done some of what its machine asked for last.

        Args:
            name: Which.
            noticed: Seconds until the others' connections to it break, at most; None: only its silence tells.
            done: Share of the last actions that it still does, if the moment is one of its own steps.
        """
        process, outputs = self._stepping
        if process and process.index == name:
            self.act(process, outputs[: int(done * (len(outputs) + 1))])
        super().kill(name, noticed)

    def leave(self, member: int) -> None:
        """A member's user cancels the round."""
        process = self.processes[member]
        if process.begun:
            process.happen(False, process.leave)

    def corrupt(self, member: int, victims: int) -> None:
        """From now on, means that a member sends to some others are not the ones that it keeps.

        Args:
            member: Who sends them.
            victims: Bitmask of those who get them.
        """
        self._corrupted[member] |= victims

    def poison(self, member: int) -> None:
        """A member sends everyone means of all parts, none of which it was asked for or owns, as if they were right."""
        group, over = self.scenario.group, self.scenario.group.contributors
        for part, where in enumerate(group.parts):
            for to in self._peers_of(member):
                self._send(Frame(member, to, wire.Mean(part, over), encode((0.0,) * where.size)), forged=True)

    def forge(self, member: int) -> None:
        """A member tells everyone that everyone holds a mean of its invention, with signatures of its own making."""
        group = self.scenario.group
        for ballot in range(2 * group.size):
            for contributors in (group.contributors, group.contributors & ~1):
                vote = wire.Vote(ballot, Decision(contributors, group.dialable), bytes(32))
                signed = self.processes[member].member.vote_signatures.seal(wire.Votes(vote, 1 << member))
                assert isinstance(signed, wire.Votes)
                ((_, signature),) = signed.signatures
                proofs = tuple((one, signature) for one in range(group.size))
                commit = wire.Votes(vote, group.everyone, proofs)
                for to in self._peers_of(member):
                    self._send(Frame(member, to, signed))
                    self._send(Frame(member, to, commit))

    def _peers_of(self, member: int) -> list[int]:
        return [to for sender, to in self.links if sender == member]

    # ---- the end ----

    def _judge(self) -> Report:
        members = [process.member for process in self.processes.values()]
        honest = not any(self._corrupted)
        check_agreement(members, exact=honest)
        for process in self.processes.values():
            self._judge_one(process)
        must = self.scenario.core or -1
        ended = [process.ended_at for process in self.processes.values() if must >> process.index & 1]
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
            raise Violation(f"{name} of the core failed: {end}; {process.member.machine.findings.notes}")

    def tell(self, index: int | None, what: object) -> None:
        """Add to the story what happened to a member, or which fault struck."""
        if self._keep_story:
            who = "fault" if index is None else f"p{index}"
            self.story.append(f"{self.now:9.4f} s {self.steps:5d} {who}: {what}")
