"""Rounds of real daemons with a fault in every second one, each call judged."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from e2e.chaos.faults import Fault, Strike, draw
from e2e.chaos.judge import Judge
from e2e.chaos.member import Call, Member, Return, Usage
from e2e.chaos.truth import Truth
from e2e.chaos.wires import Wires
from e2e.swarm import STOP_SECONDS, Swarm, eventually

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")

WARM_UP = 3
"""Rounds without faults at first, and rounds of a daemon before its memory is looked at."""

FAULT_EVERY = 2

FEWEST = 3
"""With one of three lost the other two are still a majority of their group."""

FULL_CHANCE = 0.7
"""How often a fault waits until everyone is back: most groups are whole, some are not."""

OBSERVER_CHANCE = 0.1

STAGGER_SECONDS = 0.03
"""Trainers do not call in the same instant."""

HANG_SECONDS = 10.0
"""Past its timeout, a call that has not returned is taken for hung."""

PATIENCE_SECONDS = 3.0
"""A survivor left without a group is met by the others in the next round, rather than waited for."""

TRAP_SECONDS = 1.0
"""After the others' round; a victim that waits for a group needs them for that."""

RETURN_SECONDS = 60.0
"""A daemon that is not back by then never will be."""

LAST_ROUNDS = 20
"""Tries until one round holds everyone again, at the end."""


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        seed: Draws tensors, weights and faults.
        rounds: How many, every second one with a fault.
        peers: How many daemons.
        values: Length of each vector.
        codec: By which means travel.
        kinds: Of faults.
        timeout: Seconds, of each call.
    """

    seed: int
    rounds: int
    peers: int
    values: int
    codec: str
    kinds: tuple[str, ...]
    timeout: float


@dataclass
class Story:
    """All that happened.

    Attributes:
        plan: What was to be run.
        rounds: Rounds that were.
        strikes: The faults.
        calls: Every call that returned.
        back: The ways back to an ok outcome.
        before: By member, what its daemon held after its first rounds; `after` at the end.
        load: How many processes wanted to run, after each round: others' count too.
        left: What was left behind.
        judge: Holds the violations.
    """

    plan: Plan
    judge: Judge
    rounds: int = 0
    seconds: float = 0.0
    strikes: list[Strike] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    back: list[Return] = field(default_factory=list)
    before: dict[int, Usage] = field(default_factory=dict)
    after: dict[int, Usage] = field(default_factory=dict)
    load: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """The promises that were broken."""
        return self.judge.violations

    def lines(self) -> list[str]:
        """Every fault and call, in the order of their ends."""
        told = [(strike.at, f"{strike.at:.3f} {strike}, drawn {strike.fault}") for strike in self.strikes]
        for call in self.calls:
            made, outcome = call.contribution, call.outcome
            what = outcome if outcome is not None else call.lost
            name = f"round {made.round}, member {made.member}, weight {made.weight:.6f} {call.faulted}"
            told.append((call.ended, f"{call.began:.3f} to {call.ended:.3f} {name}: {what}"))
        return [line for _, line in sorted(told)]


class Stuck(Exception):
    """The campaign cannot go on; says why."""


class Campaign:
    """One swarm, its members, and the rounds."""

    def __init__(
        self,
        plan: Plan,
        swarm: Swarm,
        network: Wires | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`network` gives each daemon a link of its own."""
        truth = Truth(plan.seed, plan.values, plan.codec)
        self.plan = plan
        self.story = Story(plan, Judge(truth))
        self._swarm = swarm
        self._network = network
        self._say = say
        options = {"codec": plan.codec, "group_size": max(plan.peers, 2)}
        self.members = [Member(index, swarm, truth, plan.values, options) for index in range(plan.peers)]

    def run(self) -> Story:
        """Start the daemons, run all rounds, let everyone come back, and look at what is left."""
        began = time.monotonic()
        try:
            self._start()
            for number in range(WARM_UP):
                self._round(number, None)
            for number in range(WARM_UP, WARM_UP + self.plan.rounds):
                self._round(number, self._draw(number))
            self._settle()
            for member in self.members:
                self.story.after[member.index] = member.usage()
        except (Stuck, TimeoutError, AssertionError) as error:
            self.story.violations.append(f"the campaign is stuck: {error}")
        self.story.seconds = time.monotonic() - began
        return self.story

    def close(self) -> list[str]:
        """Disconnect all trainers and end all processes; returns what outlived its daemon."""
        for strike in self.story.strikes:
            strike.over.wait(STOP_SECONDS)  # It may be about to start a daemon.
        for member in self.members:
            if member.pids:
                member.daemon.resume()
                member.detach()
        return [f"outlived its daemon: {line}" for line in self._swarm.close()]

    @property
    def pids(self) -> set[int]:
        """Every daemon process that there was."""
        return {pid for member in self.members for pid in member.pids}

    # ---- one round ----

    def _draw(self, number: int) -> Fault | None:
        if (number - WARM_UP) % FAULT_EVERY == 0:
            return None
        plan = self.plan
        return draw(plan.seed, (number - WARM_UP) // FAULT_EVERY, plan.kinds, plan.peers, plan.values)

    def _round(self, number: int, fault: Fault | None) -> None:
        chance = random.Random(f"{self.plan.seed}/round/{number}")
        ready = self._gather(self.plan.peers if chance.random() < FULL_CHANCE else FEWEST)
        strike = None if fault is None else self._prepare(fault, number, ready)
        self._call(number, ready, chance)
        if strike is not None:
            self._watch(strike)
        self._collect([member for member in ready if strike is None or member is not strike.victim])
        self.story.rounds += 1
        self.story.load.append(os.getloadavg()[0])
        if strike is not None:
            if not strike.struck.wait(TRAP_SECONDS):
                strike.now.set()
            strike.struck.wait(self.plan.timeout)
            self._say(str(strike))

    def _prepare(self, fault: Fault, number: int, ready: Sequence[Member]) -> Strike | None:
        """Set the trap of one who takes part; None if all who do have faults to recover from."""
        victims = [self.members[index] for index in fault.order if self.members[index] in ready]
        victim = next((one for one in victims if not self._lasting(one)), None)
        if victim is None:
            return None
        strike = Strike(fault, number, victim, self._network)
        strike.arm()
        self.story.strikes.append(strike)
        return strike

    def _watch(self, strike: Strike) -> None:
        calls = {member: member.call for member in self.members if member.call is not None}
        strike.watch(calls.pop(strike.victim))
        # Who is on its way back from a fault of its own may be left out for that; how soon it is back is judged apart.
        strike.calls = [call for member, call in calls.items() if member.returning is None]
        strike.whole = len(strike.calls) == len(self.members) - 1

    def _gather(self, wanted: int) -> list[Member]:
        """Those who are free to begin a round, at least `wanted` with those who wait for a group already."""

        def free() -> list[Member] | None:
            self._harvest()
            up = [member for member in self.members if member.available]
            found = [member for member in up if member.call is None]
            return found if len(up) >= wanted and len(found) >= min(2, wanted) else None

        found = eventually(free, f"{wanted} members free to begin a round", RETURN_SECONDS)
        assert found is not None
        return found

    def _call(self, number: int, ready: Sequence[Member], chance: random.Random) -> None:
        weights = [chance.uniform(0.5, 8.0) for _ in self.members]
        late = [chance.uniform(0.0, STAGGER_SECONDS) for _ in self.members]
        observer = chance.randrange(len(self.members)) if chance.random() < OBSERVER_CHANCE else None
        if observer is not None and len(ready) > FEWEST:
            weights[observer] = 0.0
        for member in ready:
            call = member.prepare(number, weights[member.index], self.plan.timeout)
            self.story.judge.register(member.peer_id, call.contribution)
            call.faulted = self._lasting(member)
        for member in ready:
            member.average(late[member.index])

    def _lasting(self, member: Member) -> str:
        """The fault from which a member has not recovered yet, though it takes part."""
        struck = [
            strike for strike in self.story.strikes if strike.victim is member and strike.struck.is_set()
        ]
        felt = [one.fault.kind for one in struck if time.monotonic() < one.felt_until]
        return felt[-1] if felt else ""

    def _collect(self, members: Sequence[Member]) -> None:
        """Wait until all of them are done; not for those who were left without a group, whom the others meet next."""
        calls = [member.call for member in members if member.call is not None]
        began = time.monotonic()
        while waiting := [call for call in calls if not call.done.is_set()]:
            last = max([began, *(call.ended for call in calls if call.done.is_set())])
            left = last + PATIENCE_SECONDS - time.monotonic()
            if left <= 0:
                break
            waiting[0].done.wait(min(0.02, left))
            self._check_hung()
        self._harvest()

    def _harvest(self) -> None:
        """Judge the calls that have returned."""
        self._check_hung()
        for member in self.members:
            call = member.call
            if call is None or not call.done.is_set():
                continue
            if member.returning is not None:
                member.returning.count(call)
            self.story.judge.judge(member.peer_id, call, member.tensor)
            self.story.calls.append(call)
            member.call = None
            if call.ok:
                self._count_ok(member, call)

    def _count_ok(self, member: Member, call: Call) -> None:
        member.rounds += 1
        strikes = (strike for strike in self.story.strikes if strike.victim is member)
        if member.rounds == WARM_UP and all(strike.over.is_set() for strike in strikes):
            # A daemon that is stopping has let go of most. One may be killed, or end, right here.
            with contextlib.suppress(psutil.Error, OSError):
                self.story.before[member.index] = member.usage()
        if member.returning is not None and call.began > member.returning.since:
            self.story.back.append(member.returning)
            member.returning = None

    def _check_hung(self) -> None:
        for member in self.members:
            call = member.call
            if call is None or call.done.is_set():
                continue
            if time.monotonic() > call.began + call.timeout + HANG_SECONDS:
                raise Stuck(f"the call of member {member.index} in round {call.contribution.round} hangs")
        for strike in self.story.strikes:
            if strike.failure is not None:
                failure, strike.failure = strike.failure, None
                raise Stuck(f"{strike}: {type(failure).__name__}: {failure}")

    # ---- the beginning and the end ----

    def _start(self) -> None:
        join: list[str] = []
        for member in self.members:
            prefix = () if self._network is None else self._network.prefix(member.index)
            args = LOOPBACK if self._network is None else self._network.listen(member.index)
            member.create(join, args, prefix)
            join = join or [member.daemon.address]
        for member in self.members:
            what = f"daemon {member.index} to know all others"
            eventually(lambda member=member: member.knows(len(self.members) - 1), what, RETURN_SECONDS)

    def _settle(self) -> None:
        """Let everyone come back, and all meet in one round without a fault."""
        for strike in self.story.strikes:
            if not strike.over.wait(RETURN_SECONDS):
                raise Stuck(f"{strike}: its victim does not come back")
        first = WARM_UP + self.plan.rounds
        for number in range(first, first + LAST_ROUNDS):
            self._round(number, None)
            last = [call for call in self.story.calls if call.contribution.round == number and call.outcome]
            if len(last) == len(self.members) == len(last[0].outcome.group if last[0].outcome else ()):
                return
        raise Stuck(f"everyone is back, but no round holds all in {LAST_ROUNDS} tries")
