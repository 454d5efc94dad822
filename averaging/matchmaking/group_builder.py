"""The coordinator's side of one round: the joins parked with it, and when to close the group.

The builder learns from the lateness of peers how long to wait for the last member.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

import msgspec

from equipoise.averaging.manifest import Join, shortfall
from equipoise.averaging.timing import GRACE, INVITE_SECONDS, KEEPALIVE, OVERDUE_SECONDS

WINDOW = 32
"""Most rounds remembered: enough for a quantile, few enough to follow a swarm that changes."""

QUANTILE, FACTOR, MARGIN = 0.9, 1.25, 0.1
"""Share of the rounds whose last peer the wait covers, factor on that peer's lateness, and seconds beyond that for the
jitter of a network and of two busy cores. The tenth round goes on without its last peer."""

FEW = 4
"""Fewest rounds from which the wait may fall below the initial one."""

INITIAL_WAIT = 3.0
"""Least wait, in seconds, before `FEW` rounds: a training script's first step (warm-up, compilation) is most uneven."""

MIN_WAIT = 1.0
"""Least wait, in seconds: with less, a hiccup of busy cores costs a member its round. Only a live peer that is late
makes a group wait so long: dead peers are found out sooner."""

MAX_WAIT = 10.0
"""Longest wait, in seconds, and so the most that a lie about lateness can cause. A peer that is always later than this
belongs in the next round."""

MAX_SHIFT = OVERDUE_SECONDS
"""Most seconds of its own pauses that a coordinator adds to one group's wait. Without it, a group on a machine that is
always late would never close."""

PATIENCE_SPENT = 0.5
"""Largest share of its patience that a join spends in matchmaking. The group closes when half its joins have spent that
share, because the round needs the rest."""

MAX_PARKED_GROUPS = 4
"""Most parked joins, in group sizes: views of the run differ by a group or two, never by this many."""


class StragglerWait:
    """Seconds from the first ready peer to the last in past rounds, and the wait that follows from them."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def learn(self, seconds: float) -> None:
        """Note how late the last peer of a round was, in seconds after the first; clamped to 0 .. `MAX_WAIT`."""
        self._seen.append(min(max(seconds, 0.0), MAX_WAIT))

    @property
    def wait(self) -> float:
        """Seconds to wait after the first ready peer."""
        if not self._seen:
            return INITIAL_WAIT
        floor = INITIAL_WAIT if len(self._seen) < FEW else MIN_WAIT
        return min(max(self._usual() * FACTOR + MARGIN, floor), MAX_WAIT)

    @property
    def reason(self) -> str:
        """Reason for the length of the wait, one line."""
        if len(self._seen) < FEW:
            return f"{self.wait:.2f} s, with {len(self._seen)} rounds seen so far"
        return f"{self.wait:.2f} s: in {len(self._seen)} rounds the last was up to {self._usual():.2f} s late"

    def _usual(self) -> float:
        ordered = sorted(self._seen)
        return ordered[min(int(QUANTILE * len(ordered)), len(ordered) - 1)]


INVITE_AGAIN_SECONDS = 5.0
"""Seconds between further questions to missing peers, while no group is possible: those peers may be ready and parked
alone with another coordinator."""


class Parked(msgspec.Struct):
    """A join that waits for its group."""

    join: Join
    arrived: float
    patience: float
    hops: int
    answered: bool = False


class Closing(msgspec.Struct, frozen=True):
    """The decision to close a group now."""

    members: list[Join]
    left_over: list[Join]
    absent: list[str]
    lateness: float
    began: float
    reason: str


class Outlook(msgspec.Struct, frozen=True):
    """The coordinator's knowledge beside the joins.

    Attributes:
        group: The planned group, whose members come before guests.
        owed: Peers that were left over before. They come first: otherwise a guest could be left over for ever.
        expected: Members of the planned group that are worth waiting for.
        wait: Seconds to wait after the first join.
        why_wait: Reason for the length of the wait.
        strangers: Whether to wait for peers that are not in the plan yet, even if all peers in the plan have joined.
    """

    group: Set[str]
    owed: Set[str]
    expected: Set[str]
    wait: float
    why_wait: str
    strangers: bool


class GroupBuilder:
    """Joins of one round, parked with this peer. Times are the seconds of one monotonic clock."""

    def __init__(self, round: int, group_size: int, quorum: int) -> None:
        self.round = round
        self.parked: dict[str, Parked] = {}
        self._group_size = group_size
        self._quorum = quorum
        self._opened: float | None = None
        self._told_at = float("-inf")
        self._invite_at = float("inf")
        self._shifted = 0.0
        self._closes_from = float("-inf")

    def park(self, parked: Parked) -> bool:
        """Take a join, in place of an earlier join of the same peer; returns False if there is no room."""
        peer = parked.join.peer
        before = self.parked.get(peer)
        if before is None and len(self.parked) >= MAX_PARKED_GROUPS * self._group_size:
            return False
        if before is not None:
            parked.arrived = before.arrived  # Else a peer could delay the close by joining again and again.
        elif not self.parked:
            self._told_at = parked.arrived
        self.parked[peer] = parked
        if self._opened is None:
            self._opened = parked.arrived
            self._invite_at = parked.arrived + INVITE_SECONDS
            self._shifted = 0.0
        return True

    def drop(self, peer: str, ticket: bytes | None = None) -> None:
        """Forget the peer's join; if a ticket is given, only the join with this ticket."""
        parked = self.parked.get(peer)
        if parked is None or ticket not in (None, parked.join.ticket):
            return
        del self.parked[peer]
        if not self.parked:
            self._opened = None
        elif self._opened is not None:
            self._opened = max(self._opened, min(one.arrived for one in self.parked.values()))

    def deadline(self, outlook: Outlook) -> float:
        """When to decide, to invite, or to speak, at the latest; infinity if no join is parked."""
        return min(self.promise(outlook), self._invite_at) if self.parked else float("inf")

    def promise(self, outlook: Outlook) -> float:
        """When the parked joins will be answered again, at the latest."""
        speak = self._told_at + KEEPALIVE
        if self._opened is None or self.is_short(outlook):
            return speak
        close = min(self._opened + outlook.wait, self._out_of_patience())
        return min(speak, max(close, self._closes_from))

    def is_short(self, outlook: Outlook) -> bool:
        """True if the parked joins could not be a group."""
        return bool(shortfall(self._choose(outlook), self._quorum))

    def catch_up(self, now: float) -> None:
        """Add a pause of this peer's own process to the wait: the others were not late in that time.

        Messages that came during the pause are still unread. To close at once would leave out peers that were in time,
        and would take in peers that have left.
        """
        held_up = now - (self._told_at + KEEPALIVE)
        if not self.parked or self._opened is None or held_up < GRACE:
            return
        shift = min(held_up, MAX_SHIFT - self._shifted)
        if shift > 0 and held_up >= OVERDUE_SECONDS:
            self._closes_from = now + GRACE
        self._shifted += shift
        self._opened = min(self._opened + shift, now)

    def decide(self, outlook: Outlook, now: float) -> Closing | None:
        """Return the group to close now, with a reason; None if not yet."""
        members = self._choose(outlook)
        missing = outlook.expected - self.parked.keys()
        if shortfall(members, self._quorum) or now < self._closes_from:
            return None
        if not missing and len(members) == self._group_size:
            reason = "it is full"
        elif not missing and not outlook.strangers:
            reason = "all that are expected are in"
        elif self._opened is not None and now >= self._opened + outlook.wait:
            reason = f"waited {outlook.why_wait}"
        elif now >= self._out_of_patience():
            reason = "half of them have spent half their time"
        else:
            return None
        peers = {join.peer for join in members}
        left_over = [one.join for peer, one in self.parked.items() if peer not in peers]
        arrivals = [self.parked[peer].arrived for peer in peers]
        began = min(arrivals) if self._opened is None else self._opened
        # Missing peers are later than this: learning only from peers that came would shorten the wait every time.
        lateness = max(0.0, (now if missing else max(arrivals)) - began)
        return Closing(members, left_over, sorted(missing), lateness, began, reason)

    def invite(self, outlook: Outlook, now: float) -> Set[str]:
        """The missing peers, if it is time to ask them whether they are there."""
        if not self.parked or now < self._invite_at:
            return frozenset()
        self._invite_at = now + INVITE_AGAIN_SECONDS if self.is_short(outlook) else float("inf")
        return outlook.expected - self.parked.keys()

    def speak(self, outlook: Outlook, now: float) -> list[Parked]:
        """The parked joins to answer now: new joins, and every `KEEPALIVE` seconds all of them.

        If no group is possible after the wait, the next arrival starts a new one: an early bird shows no lateness.
        """
        if not self.parked or now < self._told_at + KEEPALIVE:
            return [parked for parked in self.parked.values() if not parked.answered]
        self._told_at = now
        if self._opened is not None and now >= self._opened + outlook.wait and self.is_short(outlook):
            self._opened = None
        return list(self.parked.values())

    def _out_of_patience(self) -> float:
        spent = sorted(one.arrived + PATIENCE_SPENT * one.patience for one in self.parked.values())
        latest = max(one.arrived for one in self.parked.values())
        # A join shortly after the last one still gets in, however long the others have waited before.
        return max(spent[(len(spent) - 1) // 2], latest + GRACE)

    def _choose(self, outlook: Outlook) -> list[Join]:
        def place(one: Parked) -> tuple[bool, bool, float]:
            return one.join.peer not in outlook.owed, one.join.peer not in outlook.group, one.arrived

        order = sorted(self.parked.values(), key=place)
        joins = [one.join for one in order]
        chosen = joins[: self._group_size]
        if not shortfall(chosen, self._quorum):
            return chosen
        dialable = sorted((join for join in joins if join.dialable), key=lambda join: join.weight == 0)
        contributors = [join for join in joins if join.weight > 0]
        first = dict.fromkeys([*dialable[:1], *contributors[:2], *joins])
        return list(first)[: self._group_size]
