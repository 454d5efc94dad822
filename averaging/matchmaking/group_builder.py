"""The coordinator's side of one round: the joins parked with it, and when to close the group.

The builder learns from the lateness of peers how long to wait for the last member.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from typing import NamedTuple

import msgspec

from equipoise.averaging.manifest import Join, shortfall
from equipoise.averaging.matchmaking.messages import Standing
from equipoise.averaging.options import MAX_PARKED_GROUPS, Needs
from equipoise.averaging.state import StateId, group_state
from equipoise.averaging.timing import (
    GRACE,
    INITIAL_WAIT,
    INVITE_SECONDS,
    KEEPALIVE,
    MAX_WAIT,
    MIN_WAIT,
    OVERDUE_SECONDS,
)
from equipoise.averaging.weights import LEAST_CONTRIBUTION

WINDOW = 32
"""Most rounds remembered: enough for a quantile, few enough to follow a swarm that changes."""

QUANTILE, FACTOR, MARGIN = 0.9, 2.0, 0.1
"""Share of the rounds whose last peer the wait covers, factor on that peer's lateness, and seconds beyond that for the
jitter of a network. Among 32 daemons on two cores the last of a call is now and then twice as late as usual."""

FEW = 4
"""Fewest rounds from which the wait may fall below the initial one."""

MAX_SHIFT = OVERDUE_SECONDS
"""Most seconds of its own pauses that a coordinator adds to one group's wait. Without it, a group on a machine that is
always late would never close."""

UNSETTLED_SECONDS = 60.0
"""Longest time for which contributions to the state of a closed group wait for word of that group's round: as long as
the record of a dead peer lasts. Beyond, the group is taken for dead."""

PATIENCE_SPENT = 0.5
"""Largest share of its patience that a join spends in matchmaking. The group closes when half its joins have spent that
share, because the round needs the rest."""


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
            return f"{self.wait:.2f} s, as it does at first"
        return f"{self.wait:.2f} s: in {len(self._seen)} rounds the last was up to {self._usual():.2f} s late"

    def _usual(self) -> float:
        ordered = sorted(self._seen)
        return ordered[min(int(QUANTILE * len(ordered)), len(ordered) - 1)]


INVITE_AGAIN_SECONDS = 5.0
"""Seconds between further questions to missing peers, while no group is possible: those peers may be ready and parked
alone with another coordinator."""


class ParkedJoin(msgspec.Struct):
    """A join that waits for its group; `told` is the standing of the round that its peer was told last."""

    join: Join
    arrived: float
    patience: float
    hops: int
    answered: bool = False
    told: Standing | None = None


class Closing(msgspec.Struct, frozen=True):
    """The decision to close a group now; `last` is the peer that it waited for, for `waited` seconds."""

    members: list[Join]
    left_over: list[Join]
    absent: list[str]
    lateness: float
    began: float
    reason: str
    last: str
    waited: float


class Limit(NamedTuple):
    """The time at which a group closes without the missing peers, and the reason for that, one line.

    If no group is possible at `restarts`, the next join starts a new wait.
    """

    at: float
    reason: str
    restarts: float = float("inf")


class Outlook(msgspec.Struct, frozen=True):
    """The coordinator's knowledge beside the joins.

    Attributes:
        group: The planned group, whose members come before guests.
        owed: Peers that were left over before. They come first: otherwise a guest could be left over for ever.
        expected: Peers that the group is for.
        missing: Those of them that it waits for.
        limit: When it closes without those.
        strangers: Whether to wait for peers that are not in the plan yet, even if no peer is missing.
        holds: Whether it must not close now.
    """

    group: Set[str]
    owed: Set[str]
    expected: Set[str]
    missing: Set[str]
    limit: Limit
    strangers: bool
    holds: bool


class GroupBuilder:
    """Joins of one round, parked with this peer. Times are the seconds of one monotonic clock.

    Args:
        round: The round's number.
        needs: The needs of a group of the run.
        keepalive: Seconds between two messages to parked peers.
        invites: Whether missing peers are asked again and again whether they are there, also once a group is possible.

    Attributes:
        parked: The joins, by PeerID.
        opened: When the wait for the other joins began; None if none is parked.
    """

    def __init__(self, round: int, needs: Needs, keepalive: float = KEEPALIVE, invites: bool = False) -> None:
        self.round = round
        self.parked: dict[str, ParkedJoin] = {}
        self.opened: float | None = None
        self._needs = needs
        self._keepalive = keepalive
        self._invites = invites
        self._told_at = float("-inf")
        self._invite_at = float("inf")
        self._shifted = 0.0
        self._closes_from = float("-inf")

    def park(self, parked: ParkedJoin) -> bool:
        """Take a join, in place of an earlier join of the same peer; returns False if there is no room."""
        peer = parked.join.peer
        before = self.parked.get(peer)
        if before is None and len(self.parked) >= MAX_PARKED_GROUPS * self._needs.group_size:
            return False
        if before is not None and self._counts(before.join) == self._counts(parked.join):
            parked.arrived = before.arrived  # Else a peer could delay the close by joining again and again.
        elif not self.parked:
            self._told_at = parked.arrived
        self.parked[peer] = parked
        if self.opened is None:
            self.opened = parked.arrived
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
            self.opened = None
        elif self.opened is not None:
            self.opened = max(self.opened, min(parked.arrived for parked in self.parked.values()))

    def deadline(self, outlook: Outlook) -> float:
        """When to decide, to invite, or to speak, at the latest; infinity if no join is parked."""
        return min(self.promise(outlook), self._invite_at) if self.parked else float("inf")

    def promise(self, outlook: Outlook) -> float:
        """When the parked joins will be answered again, at the latest."""
        speak = self._told_at + self._keepalive
        if self.opened is None or outlook.holds or self.is_short(outlook):
            return speak
        return min(speak, max(outlook.limit.at, self._closes_from))

    def is_short(self, outlook: Outlook) -> bool:
        """True if the parked joins could not be a group."""
        return bool(shortfall(self._choose(outlook), self._needs))

    def catch_up(self, now: float) -> None:
        """Add a pause of this peer's own process to the wait: the others were not late in that time.

        Messages that came during the pause are still unread. To close at once would leave out peers that were in time,
        and would take in peers that have left.
        """
        held_up = now - (self._told_at + self._keepalive)
        if not self.parked or self.opened is None or held_up < GRACE:
            return
        shift = min(held_up, MAX_SHIFT - self._shifted)
        if shift > 0 and held_up >= OVERDUE_SECONDS:
            self._closes_from = now + GRACE
        self._shifted += shift
        self.opened = min(self.opened + shift, now)

    def decide(self, outlook: Outlook, now: float) -> Closing | None:
        """Return the group to close now, with a reason; None if not yet."""
        members, missing = self._choose(outlook), outlook.missing
        reason = self._reason(members, outlook, now)
        if not reason:
            return None
        arrivals = {join.peer: self.parked[join.peer].arrived for join in members}
        left_over = [parked.join for peer, parked in self.parked.items() if peer not in arrivals]
        first, last = min(arrivals.values()), max(arrivals, key=lambda peer: (arrivals[peer], peer))
        began, waited = first if self.opened is None else self.opened, arrivals[last] - first
        lateness = max(arrivals[last] - began, 0.0)
        if missing:
            last, waited = min(missing), now - first
            # Learning only from peers that came would shorten the wait every time. A missing peer teaches more once it
            # comes; until then the wait stays, for it may never come.
            lateness = max(lateness, (now - began) / FACTOR)
        return Closing(members, left_over, sorted(missing), lateness, began, reason, last, waited)

    def _reason(self, members: list[Join], outlook: Outlook, now: float) -> str:
        """Why the group closes now with these members; empty if it does not."""
        if shortfall(members, self._needs) or outlook.holds or now < self._closes_from:
            return ""
        if not outlook.missing and len(members) == self._needs.group_size:
            return "it is full"
        if not outlook.missing and not outlook.strangers:
            return "all that are expected are in"
        return outlook.limit.reason if now >= outlook.limit.at else ""

    def invite(self, outlook: Outlook, now: float) -> Set[str]:
        """The missing peers, if it is time to ask them whether they are there."""
        if not self.parked or now < self._invite_at:
            return frozenset()
        again = self._invites or self.is_short(outlook)
        self._invite_at = now + INVITE_AGAIN_SECONDS if again else float("inf")
        return outlook.missing - self.parked.keys()

    def speak(self, outlook: Outlook, now: float) -> list[ParkedJoin]:
        """The parked joins to answer now: new joins, and regularly all of them.

        If no group is possible after the wait, the next arrival starts a new one: an early bird shows no lateness.
        """
        if not self.parked or now < self._told_at + self._keepalive:
            return [parked for parked in self.parked.values() if not parked.answered]
        self._told_at = now
        if self.opened is not None and now >= outlook.limit.restarts and self.is_short(outlook):
            self.opened = None
        return list(self.parked.values())

    def out_of_patience(self) -> float:
        """When half of the joins have spent `PATIENCE_SPENT` of their patience; infinity if none is parked."""
        if not self.parked:
            return float("inf")
        spent = sorted(join.arrived + PATIENCE_SPENT * join.patience for join in self.parked.values())
        latest = max(join.arrived for join in self.parked.values())
        # A join shortly after the last one still gets in, however long the others have waited before.
        return max(spent[(len(spent) - 1) // 2], latest + GRACE)

    def _choose(self, outlook: Outlook) -> list[Join]:
        def place(parked: ParkedJoin) -> tuple[bool, bool, float]:
            peer = parked.join.peer
            return peer not in outlook.owed, peer not in outlook.group, parked.arrived

        order = sorted(self.parked.values(), key=place)
        joins = [parked.join for parked in order if not self.is_stale(parked.join)]
        chosen = joins[: self._needs.group_size]
        if not shortfall(chosen, self._needs):
            return chosen
        dialable = sorted((join for join in joins if join.dialable), key=lambda join: join.weight == 0)
        weighty = [join for join in joins if join.weight > 0]
        contributors = [join for join in weighty if self._counts(join)] or weighty
        first = {join.peer: join for join in [*dialable[:1], *contributors[: self._needs.quorum], *joins]}
        return list(first.values())[: self._needs.group_size]

    @property
    def contributors(self) -> tuple[str, ...]:
        """The parked peers whose contribution counts towards the quorum, in the order in which they came."""
        return tuple(peer for peer, parked in self.parked.items() if self._counts(parked.join))

    def quorum_at(self, quorum: int) -> float:
        """When as many peers were in that do not only attend; infinity if they are not."""
        given = (one for one in self.parked.values() if one.join.weight >= LEAST_CONTRIBUTION)
        arrived = sorted(one.arrived for one in given if self._counts(one.join))
        return arrived[quorum - 1] if len(arrived) >= quorum else float("inf")

    @property
    def introduces(self) -> bool:
        """True if the parked peers only attend, and are enough for a group."""
        attending = [parked.join for parked in self.parked.values() if parked.join.weight > 0]
        return not self.contributors and not shortfall(attending, self._needs)

    @property
    def state(self) -> StateId | None:
        """The state that most of the parked peers claim; see `group_state`."""
        return group_state(filter(None, (parked.join.state for parked in self.parked.values())))

    def apart(self, settled: bool = False) -> frozenset[str]:
        """The parked peers that hold another state of the group's epoch or, once that is `settled`, of a later one:
        they cannot contribute before they take on the group's."""
        group, claims = self.state, {peer: parked.join.state for peer, parked in self.parked.items()}
        return frozenset(
            peer
            for peer, one in claims.items()
            if group
            and one
            and one != group
            and group.epoch <= one.epoch <= (math.inf if settled else group.epoch)
        )

    def is_stale(self, join: Join) -> bool:
        """True if a contribution is to another state than the group's, in a run in which that counts never."""
        return 0 < self._needs.least <= join.weight and join.state != self.state

    def _counts(self, join: Join) -> bool:
        return join.weight > 0 and join.weight >= self._needs.least and not self.is_stale(join)
