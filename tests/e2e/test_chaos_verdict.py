"""Which chaos runs are called broken: a broken promise must be found. `test_chaos.py` calls no kept one broken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.chaos.campaign import Campaign, Plan
from e2e.chaos.faults import KILL, KINDS, MATCHING, P2PD, RESTART, Fault, Observed, Strike
from e2e.chaos.member import Call, Return, Usage
from e2e.chaos.truth import Contribution
from e2e.chaos.verdict import BACK_SECONDS, MORE_DESCRIPTORS, NOTICE_SECONDS, SURVIVORS_SECONDS, Verdict
from equipoise.averaging.outcome import Outcome

AT = 100.0
"""When faults strike; the calls around them begin a second earlier and end a second later."""

PEERS = tuple(f"peer{index}" for index in range(4))

Change = Callable[["Made"], object]


class Made:
    """A story of four members of one group, told by hand: daemon 0 was killed in their round, and is back."""

    def __init__(self) -> None:
        self.campaign = Campaign(Plan(1, 1, 4, 1000, "int8", KINDS, timeout=20.0), swarm=None)
        self.story = self.campaign.story
        for member in self.campaign.members:
            member.peer_id = PEERS[member.index]
            self.story.before[member.index] = self.story.after[member.index] = Usage(300_000_000, 60, 12, 1)
        self.calls = [self.call(index) for index in range(4)]
        self.calls[0].outcome, self.calls[0].lost, self.calls[0].faulted = None, "the daemon is gone", KILL
        self.struck = self.strike(KILL)
        self.struck.calls = self.calls[1:]
        self.story.back = [Return(KILL, AT, 3.0, 2.0)]

    def call(self, member: int) -> Call:
        """An ok call of a group that lost somebody on its way."""
        call = Call(Contribution(member, 7, 1.0), timeout=20.0, began=AT - 1, ended=AT + 1)
        call.outcome = Outcome(ok=True, reason="mean", round=7, group=PEERS, events=("peer0 was lost",))
        self.story.calls.append(call)
        return call

    def fail(self, member: int) -> None:
        """Its call failed, though no fault befell it."""
        self.calls[member].outcome = Outcome(ok=False, reason="timed out", round=7, group=PEERS)

    def strike(self, kind: str, victim: int = 0, phase: str = "gather") -> Strike:
        fault = Fault(kind, (victim,), phase, 0.0, 0.0, 1.0, 0.0)
        strike = Strike(fault, 7, self.campaign.members[victim], None)
        strike.at, strike.phase, strike.felt_until, strike.whole = AT, phase, AT + 5, True
        self.story.strikes.append(strike)
        return strike

    def only(self, kind: str, phase: str = "gather") -> None:
        """Another fault befell daemon 0 than the kill."""
        self.story.strikes.clear()
        self.story.back.clear()
        self.struck = self.strike(kind, phase=phase)
        self.struck.calls = self.calls[1:]

    def observe(self, noticed: float, back: float) -> None:
        """The p2pd of daemon 0 was killed while a group was sought."""
        self.only(P2PD, MATCHING)
        self.struck.observed = Observed(noticed, back)

    def hold(self, **more: int) -> None:
        """Daemon 2 holds so much more at the end than at first."""
        before = self.story.before[2]
        self.story.after[2] = Usage(*(getattr(before, name) + more.get(name, 0) for name in before.__slots__))


def later(seconds: float) -> Change:
    """The last survivor was done so long after the fault."""
    return lambda made: setattr(made.calls[3], "ended", AT + seconds)


def back_after(kind: str, seconds: float) -> Change:
    return lambda made: made.story.back.append(Return(kind, AT, seconds))


LATE = SURVIVORS_SECONDS + 0.1

BROKEN: dict[str, tuple[Change, str]] = {
    "a violation": (lambda made: made.story.violations.append("is not the mean"), "is not the mean"),
    "left behind": (lambda made: made.story.left.append("outlived: p2pd"), "outlived: p2pd"),
    "a survivor late": (later(LATE), "the last survivor was done after 2.60 s"),
    "noticed late": (lambda made: made.observe(NOTICE_SECONDS + 0.1, 3.0), "noticed after 2.10 s"),
    "p2pd back late": (lambda made: made.observe(0.1, BACK_SECONDS + 0.1), "back after 10.10 s"),
    "back late": (back_after(RESTART, BACK_SECONDS + 0.1), f"after {RESTART}: back in a group"),
    "failed though well": (lambda made: made.fail(1), "member 1: failed though it was well: timed out"),
    "disturbed without p2pd": (lambda made: made.only(P2PD), "disturbed member 1: ['peer0 was lost']"),
    "descriptors": (
        lambda made: made.hold(descriptors=MORE_DESCRIPTORS + 1),
        "daemon 2 holds more than before",
    ),
    "regions": (lambda made: made.hold(regions=1), "daemon 2 holds more than before"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(name: str) -> None:
    change, told = BROKEN[name]
    made = Made()
    assert Verdict(made.story).broken == []
    change(made)
    verdict = Verdict(made.story)
    assert told in " ".join(verdict.broken)
    assert verdict.figures()["verdict"] == "FAIL"
