"""The verdict on a chaos run: figures for people and programs, and whether every promise was kept."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from e2e.chaos.campaign import Story
from e2e.chaos.faults import KILL, MATCHING, P2PD, RESTART, STOP, Strike
from e2e.chaos.member import Call

SURVIVORS_SECONDS = 2.5
"""From a kill or a stop to the last survivor's outcome: 4 peers of 16M values, two cores, nothing else running. Where a
group was sought while some were away, it is matchmaking that says how long those are waited for."""

BACK_SECONDS = 10.0
"""A way back into a group: the daemon's start, its trainer's joining and meeting a peer, then the calls from there to
the first ok one; what lies between calls, in which nobody asks, does not count. After the death of a p2pd there is no
start, only the calls that began since. How soon the daemon has another p2pd that is connected is held to the same
bound."""

NOTICE_SECONDS = 2.0
"""From the death of p2pd to the daemon's knowing it."""

EXCHANGING = ("scatter", "decide", "gather", "commit")
"""Phases in which what is sent goes over direct channels."""

MORE_DESCRIPTORS = 16
"""Connections to peers come and go; a leak of one descriptor a round would be a hundred."""


class Verdict:
    """The figures of one story.

    Args:
        story: What happened.
        leniency: By which bounds in seconds are multiplied, on machines that do other things too.

    Attributes:
        broken: Every promise that was not kept, one line each; empty for PASS.
    """

    def __init__(self, story: Story, leniency: float = 1.0) -> None:
        self._story = story
        self._leniency = leniency
        self.survivors = _survivors(story.strikes)
        self.back = _grouped((one.kind, one.seconds) for one in story.back)
        spoilt = [*self._spoilt(), *self._without_p2pd()]
        self.broken = [*story.violations, *spoilt, *self._late(), *self._leaks(), *story.left]

    def figures(self) -> dict[str, Any]:
        """Everything, for `--json`."""
        story, plan = self._story, self._story.plan
        return {
            "verdict": "FAIL" if self.broken else "PASS",
            "broken": self.broken,
            "seed": plan.seed,
            "peers": plan.peers,
            "values": plan.values,
            "codec": plan.codec,
            "rounds": story.rounds,
            "seconds": round(story.seconds, 1),
            "load": f"{_spread(story.load)} on {os.cpu_count()} processors",
            "calls": self._calls(),
            "failed": dict(Counter(_kind(call.reason) for call in story.calls if not call.ok)),
            "means": len(story.judge.errors),
            "worst_error": max((one.relative for one in story.judge.errors), default=0.0),
            "worst_share_of_bound": max((one.share_of_bound for one in story.judge.errors), default=0.0),
            "faults": dict(Counter(strike.fault.kind for strike in story.strikes)),
            "phases": dict(Counter(strike.phase for strike in story.strikes)),
            "survivors_s": {kind: _spread(seconds) for kind, seconds in sorted(self.survivors.items())},
            "back_s": {kind: _spread(seconds) for kind, seconds in sorted(self.back.items())},
            "start_s": _spread([one.starting for one in story.back if one.starting]),
            "p2pd_s": self._p2pd(),
            "usage": {f"daemon {index}": self._usage(index) for index in sorted(story.after)},
        }

    def _calls(self) -> dict[str, int]:
        calls = self._story.calls
        victims = [call for call in calls if call.faulted]
        return {
            "ok": sum(call.ok for call in calls),
            "failed": sum(not call.ok for call in calls),
            "victims_ok": sum(call.ok for call in victims),
            "victims_failed": sum(not call.ok for call in victims),
        }

    def _spoilt(self) -> list[str]:
        """Calls that failed though their own daemon was well, and so were most of their group."""
        return [
            f"round {call.contribution.round}, member {call.contribution.member}: failed though it was well: "
            f"{call.reason} {list(call.outcome.events) if call.outcome else ''}"
            for call in self._story.calls
            if not call.ok and not call.faulted and not self._outnumbered(call)
        ]

    def _outnumbered(self, call: Call) -> bool:
        """Whether faults left no majority of the call's group."""
        struck = {
            strike.victim.peer_id
            for strike in self._story.strikes
            if strike.at < call.ended and call.began < strike.felt_until
        }
        group = call.outcome.group if call.outcome is not None else ()
        return len(group) > 0 and 2 * len(struck & set(group)) >= len(group)

    def _without_p2pd(self) -> list[str]:
        """Groups in the midst of whose exchange a p2pd was killed, and that lost somebody or something for it."""
        found = []
        for strike in self._story.strikes:
            if strike.fault.kind != P2PD or strike.phase not in EXCHANGING:
                continue
            for call in self._story.calls:
                outcome, made = call.outcome, call.contribution
                if outcome is None or not call.began < strike.at < call.ended:
                    continue
                if call.faulted not in ("", P2PD):
                    continue  # It may still be in an earlier round, and feels another fault.
                if strike.victim.peer_id in outcome.group and outcome.events:
                    found.append(f"{strike}: disturbed member {made.member}: {list(outcome.events)}")
        return found

    def _late(self) -> list[str]:
        found = []
        for strike in self._story.strikes:
            seconds = strike.survivors_seconds
            bound = SURVIVORS_SECONDS * self._leniency
            judged = strike.fault.kind in (KILL, STOP) and (strike.phase != MATCHING or strike.whole)
            if judged and seconds is not None and seconds > bound:
                found.append(f"{strike}: the last survivor was done after {seconds:.2f} s, not {bound:g} s")
            observed = strike.observed
            if observed is not None and observed.noticed > NOTICE_SECONDS * self._leniency:
                found.append(f"{strike}: noticed after {observed.noticed:.2f} s")
            if observed is not None and observed.back > BACK_SECONDS * self._leniency:
                found.append(f"{strike}: back after {observed.back:.2f} s")
        for kind in (KILL, RESTART, P2PD):
            for seconds in self.back.get(kind, []):
                if seconds > BACK_SECONDS * self._leniency:
                    found.append(f"after {kind}: back in a group after {seconds:.2f} s")
        return found

    def _leaks(self) -> list[str]:
        found = []
        for index, after in self._story.after.items():
            before = self._story.before.get(index, after)
            if after.descriptors > before.descriptors + MORE_DESCRIPTORS or after.regions > 1:
                found.append(f"daemon {index} holds more than before: {self._usage(index)}")
        return found

    def _p2pd(self) -> dict[str, str]:
        seen = [strike.observed for strike in self._story.strikes if strike.observed is not None]
        if not seen:
            return {}
        return {
            "noticed": _spread([one.noticed for one in seen]),
            "back": _spread([one.back for one in seen]),
        }

    def _usage(self, index: int) -> str:
        before, after = self._story.before.get(index), self._story.after[index]
        first = before or after
        return (
            f"{first.memory / 1e6:.0f} -> {after.memory / 1e6:.0f} MB, "
            f"{first.descriptors} -> {after.descriptors} descriptors, {first.threads} -> {after.threads} threads"
        )


def table(figures: dict[str, Any]) -> str:
    """The figures, a line each; the verdict last."""
    lines = []
    for name, value in figures.items():
        if name in ("verdict", "broken"):
            continue
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {key:<24} {_number(entry)}" for key, entry in value.items()]
        else:
            lines.append(f"{name + ':':<26} {_number(value)}")
    lines += [f"BROKEN {line}" for line in figures["broken"]]
    return "\n".join([*lines, figures["verdict"]])


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _survivors(strikes: Iterable[Strike]) -> dict[str, list[float]]:
    pairs = [(f"{strike.fault.kind} in {strike.place}", strike.survivors_seconds) for strike in strikes]
    return _grouped((name, seconds) for name, seconds in pairs if seconds is not None)


def _grouped(pairs: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        found[name].append(value)
    return found


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    return f"median {ordered[len(ordered) // 2]:.2f}  worst {ordered[-1]:.2f}  of {len(ordered)}"


def _kind(reason: str) -> str:
    """A reason without names and numbers."""
    return re.sub(r"[\d.]+", "#", re.split("[;:]", reason)[0])
