"""Faults: what they are, how a round's is drawn from the seed, how it strikes, and how the victim comes back."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import psutil

from e2e.chaos.member import Call, Member, Return
from e2e.chaos.trap import PHASES
from e2e.swarm import STOP_SECONDS, eventually

KILL, STOP, RESTART, P2PD, CUT, MUTE, SLOW = "kill", "stop", "restart", "p2pd", "cut", "mute", "slow"

KINDS = (KILL, STOP, RESTART, P2PD, CUT, MUTE, SLOW)
"""SIGKILL; SIGSTOP and SIGCONT; SIGTERM and a new start; p2pd killed; a link that loses everything for a while, or all
that its peer sends, or is slow."""

NEED_LINKS = (CUT, MUTE, SLOW)

SIGNALS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, RESTART: signal.SIGTERM}

HICCUP, ABSENCE = (0.1, 1.2), (2.5, 5.0)
"""Seconds of a pause that the others should wait for, and of one after which they should not."""

AWAY = (0.0, 1.5)
"""Seconds until a dead daemon is started again."""

SLOW_ROUND = (1.0, 3.0)
"""Seconds that one vector's worth of int8 takes on a slow link."""

AFTER = "after"
"""The victim's call had ended before the trap was due."""

MATCHING = PHASES[0]

NOTICE_SECONDS = 30.0
"""How long to watch for p2pd's return."""


class Links(Protocol):
    """The links of the daemons, one each."""

    def cut(self, member: int) -> None:
        """Let nothing through."""

    def mute(self, member: int) -> None:
        """Lose what it sends."""

    def slow(self, member: int, bits: float) -> None:
        """Let so many bits a second through, each way."""

    def heal(self, member: int) -> None:
        """Undo that."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is to happen in a round, and where.

    Attributes:
        kind: One of `KINDS`.
        order: Members in the order in which they would be the victim; the first that takes part is.
        phase: Of the victim's round.
        how_far: 0 to 1, into that phase.
        between: 0 to 1, among the actions of one event.
        seconds: How long it lasts, or until a restart.
        bits: A second, of a slow link.
    """

    kind: str
    order: tuple[int, ...]
    phase: str
    how_far: float
    between: float
    seconds: float
    bits: float


def draw(seed: int, number: int, kinds: Sequence[str], members: int, values: int) -> Fault:
    """Fault `number` of a run: kinds and phases as dealt from a shuffled deck of all pairs, the rest at random."""
    dealt, place = divmod(number, len(kinds) * len(PHASES))
    deck = list(itertools.product(kinds, PHASES))
    random.Random(f"{seed}/deck/{dealt}").shuffle(deck)
    kind, phase = deck[place]
    chance = random.Random(f"{seed}/fault/{number}")
    order = tuple(chance.sample(range(members), members))
    # Rounds differ in their events: what is drawn late in a phase would often come after it.
    how_far, between = chance.random() ** 2, chance.random()
    seconds = chance.uniform(*(AWAY if kind in (KILL, RESTART) else chance.choice((HICCUP, ABSENCE))))
    return Fault(kind, order, phase, how_far, between, seconds, 8 * values / chance.uniform(*SLOW_ROUND))


@dataclass
class Observed:
    """What the death of a p2pd looked like from its daemon, in seconds since; infinite if never."""

    noticed: float = float("inf")
    back: float = float("inf")


class Strike:
    """One fault from the trap that was set until its victim has recovered; runs in a thread of its own.

    Attributes:
        at: When it struck, monotonic.
        phase: Where the victim was; `AFTER` if its call had ended.
        calls: The calls of the others that had not returned when it was set, without members on their way back.
        whole: Whether those are all the others. If not, members that seek a group wait for late ones.
        now: Set where the fault is not to wait for the trap.
        struck: Set once it has; `over` once the victim has recovered.
        felt_until: When nobody need feel it any longer, monotonic. After a link is whole again TCP waits up to as long
            as it was not: it sends again after ever longer pauses.
        observed: Of a p2pd that was killed.
        failure: What went wrong in striking or recovering.
    """

    def __init__(self, fault: Fault, round: int, victim: Member, links: Links | None) -> None:
        self.fault = fault
        self.round = round
        self.victim = victim
        self.at = 0.0
        self.phase = ""
        self.observed: Observed | None = None
        self.failure: BaseException | None = None
        self.calls: list[Call] = []
        self.whole = False
        self.now = threading.Event()
        self.struck = threading.Event()
        self.over = threading.Event()
        self.felt_until = float("inf")
        self._aftermath = 0.0
        self._links = links

    def __str__(self) -> str:
        return f"round {self.round}: {self.fault.kind} of daemon {self.victim.index} in {self.phase or '?'}"

    @property
    def place(self) -> str:
        """Where the fault met the others: while a group was sought, in a group of two, or in a larger one."""
        groups = [call.outcome.group for call in self.calls if call.outcome is not None]
        pair = any(len(group) == 2 and self.victim.peer_id in group for group in groups)
        if self.phase == MATCHING:
            return MATCHING if self.whole else f"{MATCHING}, some away"
        return "a pair" if pair else "the round"

    @property
    def survivors_seconds(self) -> float | None:
        """From the fault to the last outcome of those who were in a round with the victim; None if nobody was."""
        peer, searching = self.victim.peer_id, self.phase == MATCHING
        outcomes = [call.outcome for call in self.calls if call.outcome is not None]
        # A peer that the round left out may meet the victim in a later one, once that is back.
        round = min((outcome.round for outcome in outcomes if peer in outcome.group), default=0)
        ends = []
        for call in self.calls:
            group = call.outcome.group if call.outcome is not None else ()
            there = call.outcome is not None and peer in group and call.outcome.round == round
            if call.ended > self.at and (there or not group or searching):
                ends.append(call.ended)
        return max(ends) - self.at if ends else None

    def arm(self) -> None:
        """Set the trap, before the round begins."""
        fault = self.fault
        self.victim.page.arm(fault.phase, fault.how_far, fault.between, SIGNALS.get(fault.kind, 0))

    def watch(self, call: Call) -> None:
        """Wait, in the background, for the trap to spring in the victim's `call`; strike, and recover."""
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Call) -> None:
        try:
            self._await_trap(call)
            self._strike(call)
            self.struck.set()
            self._recover(call)
        except BaseException as error:
            self.failure = error
        finally:
            self.felt_until = max(time.monotonic(), self._aftermath)
            self.struck.set()
            self.over.set()

    def _await_trap(self, call: Call) -> None:
        page = self.victim.page
        ends = (call.done, self.now)
        eventually(lambda: page.sprung or any(end.is_set() for end in ends), "the trap", call.timeout + 10.0)
        if page.sprung is None:
            page.disarm()
        if page.sprung is not None:
            self.at, self.phase = page.sprung
            return
        # The round went another way, or was over before the trap, or is not to be waited for: it strikes now.
        self.at, self.phase = time.monotonic(), AFTER if call.done.is_set() else MATCHING
        if self.fault.kind in SIGNALS:
            self.victim.daemon.signal(SIGNALS[self.fault.kind])

    def _strike(self, call: Call) -> None:
        victim = self.victim
        if call.ended > self.at:
            call.faulted = self.fault.kind
        if self.fault.kind in (KILL, STOP, RESTART, CUT, MUTE):
            victim.available = False
        match self.fault.kind:
            case "p2pd":
                self._before = _p2pd(victim)
                self._before.kill()
                self.at = time.monotonic()
            case "cut":
                assert self._links is not None
                self._links.cut(victim.index)
                self.at = time.monotonic()
            case "mute":
                assert self._links is not None
                self._links.mute(victim.index)
                self.at = time.monotonic()
            case "slow":
                assert self._links is not None
                self._links.slow(victim.index, self.fault.bits)
                self.at = time.monotonic()

    def _recover(self, call: Call) -> None:
        victim = self.victim
        if self.fault.kind == P2PD:
            self._observe()
        else:
            threading.Event().wait(self.fault.seconds)
        match self.fault.kind:
            case "kill" | "restart":
                victim.daemon.wait(STOP_SECONDS)
                call.done.wait()
                victim.start()
                took = time.monotonic() - victim.born
                victim.returning = Return(self.fault.kind, victim.born, took, took)
                return
            case "stop":
                victim.daemon.resume()
            case "cut" | "mute" | "slow":
                assert self._links is not None
                self._links.heal(victim.index)
                self._aftermath = time.monotonic() + self.fault.seconds
        if self.fault.kind != P2PD:
            victim.returning = Return(self.fault.kind, time.monotonic())
        victim.available = (
            True  # Its call may be waiting for a group, and the others wait for who is available.
        )
        call.done.wait()
        if call.lost:
            victim.attach()

    def _observe(self) -> None:
        at, before, self.observed = self.at, self._before.pid, Observed()
        self.victim.returning = Return(P2PD, at)

        def back() -> bool:
            assert self.observed is not None
            status = self.victim.status()
            if status is None or status.swarm.p2pd_pid == before:
                return False
            now = time.monotonic() - at
            self.observed.noticed = min(self.observed.noticed, now)
            if status.swarm.p2pd_pid is None or not status.swarm.connected:
                return False
            assert status.peer_id == self.victim.peer_id, "p2pd came back with another PeerID"
            self.observed.back = now
            return True

        eventually(back, f"the p2pd of daemon {self.victim.index} to come back", NOTICE_SECONDS)


def _p2pd(member: Member) -> psutil.Process:
    found = [process for process in member.daemon.descendants() if process.name() == "p2pd"]
    assert found, f"daemon {member.index} has no p2pd"
    return found[0]
