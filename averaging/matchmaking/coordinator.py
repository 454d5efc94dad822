"""The coordinator's side of matchmaking: it parks the joins of other peers, closes groups, and redirects joins.

Any peer of a run may coordinate, whether or not it is ready itself. A coordinator sees no tensors. If the coordinator
dies, the peers that asked it notice the silence and ask the next coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from typing import NamedTuple

from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.closing import ClosePolicy
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.group_builder import (
    UNSETTLED_SECONDS,
    Closing,
    GroupBuilder,
    Outlook,
    ParkedJoin,
)
from equipoise.averaging.matchmaking.topology import rank
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import MAX_WAIT
from equipoise.averaging.weights import LEAST_CONTRIBUTION
from equipoise.limits import LruDict

MAX_GATHERINGS = 4
"""Most rounds gathered at once: this round, and later rounds of groups that are ahead."""

CLOSED_KEPT = 4
"""Most groups remembered that this peer closed or belongs to. Members that lack the manifest get it from this peer, and
late joiners get an answer."""

ENDED_KEPT = 64
"""Most rounds whose state and closing time are remembered, longer than the group itself: they show that a contribution
is late."""

LEAST_LATE = 1e-3
"""Least lateness told, in seconds: 0 says that a contribution was not late."""

MAX_OWED = 64
"""Most peers remembered that were left over when a group closed."""


class _Closed(NamedTuple):
    formed: wire.GroupFormed
    began: float
    awaited: set[str]
    reminded: set[str]


class _Ended(NamedTuple):
    """A round whose group closed: the state of most members, and the members that held it; others have another.

    Contributions to the states `apart` were left over: the group was there for its own state.
    """

    state: StateId | None
    peers: frozenset[str]
    at: float
    ok: bool = False
    apart: frozenset[StateId | None] = frozenset()


class Coordinator:
    """The groups of one run that one daemon puts together."""

    def __init__(self, context: Context, policy: ClosePolicy) -> None:
        self._context = context
        self._policy = policy
        self._membership = context.membership
        self._builders: dict[int, GroupBuilder] = {}
        self._closed: LruDict[int, _Closed] = LruDict(CLOSED_KEPT)
        self._ended: LruDict[int, _Ended] = LruDict(ENDED_KEPT)
        self._owed: LruDict[str, None] = LruDict(MAX_OWED)
        self._elsewhere: str | None = None
        self._redirects = True
        self._seen_at = float("-inf")
        self._changed_at = float("-inf")

    def count(self, round: int, now: float) -> tuple[int, int]:
        """Return the number of joins of a round that are parked here, and the number of peers expected in all."""
        builder = self._builders.get(round)
        if builder is None:
            return 0, 0
        parked = builder.parked.keys()
        return len(parked), len(self._outlook(builder, now).expected | parked)

    def is_short(self, round: int, now: float) -> bool:
        """True if the joins of a round that are parked here could not be a group."""
        builder = self._builders.get(round)
        return builder is None or builder.is_short(self._outlook(builder, now))

    def describe(self, round: int, now: float) -> str:
        """Describe the group of a round, and the peers that it waits for, in one line."""
        builder = self._builders.get(round)
        if builder is None or not builder.parked:
            return "this peer coordinates"
        return self._policy.describe(builder, self._outlook(builder, now).expected)

    def standing(self, round: int, now: float) -> tuple[wire.Standing | None, float | None]:
        """The coordinator's word to parked peers: drawn and contributed peers, and seconds until the group closes."""
        builder = self._builders.get(round)
        return (None, None) if builder is None else self._word(builder, now)

    def has_closed(self, round: int) -> bool:
        """True if a group of this round has been closed here, or formed with this peer."""
        return round in self._closed

    def lateness(self, bound: StateId | None, round: int, now: float) -> float:
        """Seconds since a round's group closed, if a contribution bound to this state was made for it; else 0.

        A peer may have its round's number wrong, so the number alone does not make a contribution late. The group may
        have left it over for its state: the peer then attends, and learns the group's.
        """
        ended = self._ended.get(round)
        return _ago(ended.at, now) if ended and bound in {ended.state, *ended.apart} - {None} else 0.0

    def left_behind(self, join: Join, now: float) -> float:
        """Seconds since the group closed that has led others beyond the state of a parked contribution; 0 if none has.

        A round that failed leaves its state as it was. A member of the round knows whether it succeeded; another peer
        learns it from a member that joins again with a later state. A peer that does not know of the round learns it
        from a quorum in one later state, of peers that were in the contributor's state before: they came after the
        group had closed. Peers that have never held its state lead nobody beyond it.
        """
        if join.bound is None:
            return 0.0
        beyond = self._beyond(join.bound, join.round)
        for round, ended in self._ended.items():
            if ended.state == join.bound and round < join.round and (ended.ok or ended.peers & beyond.keys()):
                return _ago(ended.at, now)
        fellows = {peer for ended in self._ended.values() if join.peer in ended.peers for peer in ended.peers}
        ahead = [parked for peer, parked in beyond.items() if peer in fellows]
        counts = Counter(parked.join.state for parked in ahead)
        if max(counts.values(), default=0) < self._context.needs.quorum:
            return 0.0
        return _ago(min(parked.arrived for parked in ahead), now)

    def _beyond(self, state: StateId, round: int) -> dict[str, ParkedJoin]:
        """The joins of a round that claim a later state than this one."""
        builder = self._builders.get(round)  # None if it has just closed without the join.
        parked = {} if builder is None else builder.parked
        return {
            peer: join
            for peer, join in parked.items()
            if join.join.state is not None and join.join.state.epoch > state.epoch
        }

    def note_success(self, round: int) -> None:
        """Note that this peer holds the mean of a round, and which members contributed from a state of others.

        A member that holds a state which this peer has held lately is only behind. A member that attends with another
        state stays where it was, as do all members with another state where this peer itself attends.
        """
        if round in self._ended:
            self._ended[round] = self._ended[round]._replace(ok=True)
        if round not in self._closed:
            return
        manifest = self._closed[round].formed.manifest
        held = {closed.formed.manifest.states.get(self._context.peer) for closed in self._closed.values()}
        own = next((join.bound for join in manifest.members if join.peer == self._context.peer), None)
        strange = {join.peer for join in manifest.members if own and join.bound and join.bound not in held}
        alike = {join.peer for join in manifest.members if join.state is None or join.state in held}
        self._membership.part(alike | strange, strange)

    def note_closed(self, join: Join, group: Iterable[str], at: float) -> None:
        """Note that another peer says that the group for which a contribution was made closed at a time."""
        self._ended.setdefault(join.round, _Ended(join.bound, frozenset(group), at))

    def note_own(self, coordinator: str | None, redirects: bool) -> None:
        """Note which coordinator has this peer's own join, and whether members of its group should follow it there."""
        self._elsewhere = None if coordinator == self._context.peer else coordinator
        self._redirects = redirects

    def park_own(self, join: Join, patience: float, now: float) -> None:
        """Park this peer's own join with itself."""
        # The own join needs no answer. With `MAX_HOPS` it is not redirected: the joiner itself moves it.
        self._builder(join.round, now).park(ParkedJoin(join, now, patience, wire.MAX_HOPS, answered=True))

    def drop(self, peer: str, ticket: bytes | None = None) -> None:
        """Forget a peer's joins: it left, or was lost."""
        for builder in self._builders.values():
            builder.drop(peer, ticket)

    def request(self, peer: str, request: wire.JoinRequest, now: float) -> None:
        """Park a join, redirect it, or refuse it with the reason."""
        join, here = request.join, self._context.round
        if problem := self._objection(peer, join, now):
            self._refuse(peer, join, problem, now, here if join.round < here else 0)
            return
        self._membership.welcome(peer, join.round, ready=True)
        if closed := self._closed.get(join.round):
            self._answer_late(peer, join, closed, now)
            return
        parked = ParkedJoin(join, now, request.patience, request.hops)
        if not self._redirects_join(parked, now) and not self._builder(join.round, now).park(parked):
            self._refuse(peer, join, "more joins are parked here than may be", now)

    def settle(self, now: float) -> wire.GroupFormed | None:
        """Redirect joins and close groups; returns this peer's own group if it closed."""
        membership = self._membership
        looked = membership.seen_at != self._seen_at
        if looked or membership.changed_at != self._changed_at:
            self._seen_at, self._changed_at = membership.seen_at, membership.changed_at
            self._hand_on(now)
        membership.lose_silent(now)
        own = None
        for builder in sorted(self._builders.values(), key=lambda builder: builder.round):
            builder.catch_up(now)
            self._refuse_left_behind(builder, now)
            if closing := builder.decide(self._outlook(builder, now), now):
                own = self._close(builder, closing, now) or own
        return own

    def remember(
        self, formed: wire.GroupFormed, now: float, began: float, awaited: Iterable[str] = ()
    ) -> None:
        """Keep a closed group, so that this peer can tell its members even if their coordinator dies first."""
        manifest = formed.manifest
        late = dict(zip((*manifest.peers, *formed.absent), formed.late, strict=False))
        idle = (join.peer for join in manifest.members if join.weight < LEAST_CONTRIBUTION)
        self._policy.learn(late, {*formed.absent, *idle}, now)
        self._closed[manifest.round] = _Closed(formed, began, set(awaited), set())
        # A round without contributions changes no state, so no contribution is late for it.
        state = manifest.before if any(join.bound for join in manifest.members) else None
        self._ended[manifest.round] = _Ended(state, frozenset(manifest.peers_of(manifest.before)), now)

    def remind(self, peer: str, round: int) -> None:
        """Send the group of a round, once more, to a member that says it has not begun it."""
        closed = self._closed.get(round)
        if closed and peer in closed.formed.manifest.peers and peer not in closed.reminded:
            closed.reminded.add(peer)
            self._context.send(peer, closed.formed)

    def end_rounds_gone(self, now: float) -> None:
        """Refuse the joins of rounds that are over here."""
        for round in [round for round in self._builders if round < self._context.round]:
            self._abandon(round, f"round {round} is over here", now, self._context.round)

    def speak(self, now: float) -> bool:
        """Answer parked joins and invite missing peers; returns whether this peer's own join has no group yet."""
        own_waits = False
        for builder in self._builders.values():
            outlook = self._outlook(builder, now)
            for peer in self._membership.dialable_others(builder.invite(outlook, now), now):
                self._membership.ask(peer, now)
                standing, closes = self._word(builder, now)
                invitation = wire.Invitation(self._context.run, builder.round, closes, standing)
                self._context.send(peer, invitation)
            for parked in builder.speak(outlook, now):
                if parked.join.peer == self._context.peer:
                    own_waits = builder.is_short(outlook)
                else:
                    parked.answered = True
                    self._accept(builder, parked, outlook, now)
        return own_waits

    def deadline(self, now: float) -> float:
        """When the next decision or message is due; infinity if no join is parked."""
        builders = self._builders.values()
        due = min(
            (builder.deadline(self._outlook(builder, now)) for builder in builders), default=float("inf")
        )
        return min(due, self._membership.silent_at)

    def _objection(self, peer: str, join: Join, now: float) -> str:
        """Why this peer does not take a join, one line; empty if it does."""
        if join.round not in self._closed and join.round < self._context.round:
            return f"round {join.round} is over here"
        if not self._context.next_round.within_reach(join.round, now):
            return f"round {join.round} is far ahead of {self._context.round} here"
        return self._context.objection(peer, join, now)

    def _answer_late(self, peer: str, join: Join, closed: _Closed, now: float) -> None:
        if join in closed.formed.manifest.members:
            self._context.send(peer, closed.formed)
            return
        if peer in closed.awaited and now - closed.began <= MAX_WAIT:
            closed.awaited.discard(peer)
            self._context.straggler_wait.learn(now - closed.began)
        self._refuse(peer, join, f"the group of round {join.round} has closed", now, join.round + 1)

    def _refuse(self, peer: str, join: Join, why: str, now: float, round: int = 0) -> None:
        """Refuse a join, with how late its contribution is for the group that it was made for, if it is."""
        late, ended = self.lateness(join.bound, join.round, now), self._ended.get(join.round)
        group = tuple(sorted(ended.peers)) if late and ended and ended.state == join.bound else ()
        self._context.refuse(peer, join, why, round=round, late=late, group=group)

    def _redirects_join(self, parked: ParkedJoin, now: float) -> bool:
        """Redirect a join, unless this peer should have it or it has been redirected `MAX_HOPS` times."""
        join = parked.join
        better = self._better(join.peer, join.round, now) if parked.hops < wire.MAX_HOPS else None
        if better is not None:
            self._context.refuse(join.peer, join, f"{better} coordinates its group", redirect=better)
        return better is not None

    def _better(self, peer: str, round: int, now: float) -> str | None:
        """The coordinator that should have the join of `peer`; None if this peer should keep it."""
        membership, best = self._membership, None
        group = membership.group(self._context.peer, round)
        if peer == self._elsewhere:
            # The two peers ask each other: both choose the lower ranked of the two as coordinator.
            best = min(peer, self._context.peer, key=lambda either: rank(str(round), either))
        elif self._elsewhere and self._redirects and round == self._context.round and peer in group:
            best = self._elsewhere
        elif membership.knows(peer):
            best = membership.coordinator(peer, round, now)
        elif len(membership.plan(round)) == 1:
            best = membership.coordinator(self._context.peer, round, now)
        return None if best == self._context.peer else best

    def _hand_on(self, now: float) -> None:
        for builder in self._builders.values():
            for parked in list(builder.parked.values()):
                if self._redirects_join(parked, now):
                    builder.drop(parked.join.peer)

    def _outlook(self, builder: GroupBuilder, now: float) -> Outlook:
        membership, policy = self._membership, self._policy
        expected, missing = policy.awaited(builder, now)
        if self._elsewhere is not None:
            expected, missing = expected - {self._context.peer}, missing - {self._context.peer}
        # Peers with a place come before peers that an earlier round left over: no group makes a state without them.
        crowded = membership.crowded
        group = frozenset(expected if policy.patient and crowded else membership.seated(builder.round))
        # Before the first group only, wait for peers that may still be met: client-mode peers must speak first.
        first = not self._closed and membership.incomplete(builder.parked.keys(), now)
        limit = policy.limit(builder, now)
        holds = policy.holds(builder, now) or self._is_unsettled(builder, now)
        holds = holds or (crowded and self._lacks_makers(builder, group, now)) or self._begins(builder, now)
        owed = frozenset[str]() if crowded else self._owed.keys()
        return Outlook(group, owed, expected, missing, limit, first, holds)

    def _lacks_makers(self, builder: GroupBuilder, group: Set[str], now: float) -> bool:
        """True while most of the peers that made the state may be in another group: two would make two states of it.

        A federated round needs one of the drawn peers. Makers that live and never come hold nobody up for longer.
        """
        there = builder.parked.keys()
        if self._policy.patient:
            return group.isdisjoint(there)
        makers = self._membership.makers or group
        waited = builder.opened is not None and now >= builder.opened + UNSETTLED_SECONDS
        return 2 * len(makers & there) <= len(makers) and not waited

    def _begins(self, builder: GroupBuilder, now: float) -> bool:
        """True while the first round must wait: two groups that begin from one state would make two of it."""
        first = any(parked.join.bound and not parked.join.bound.epoch for parked in builder.parked.values())
        waited = builder.opened is not None and now >= builder.opened + MAX_WAIT
        return first and not waited and self._membership.settles(now)

    def _is_unsettled(self, builder: GroupBuilder, now: float) -> bool:
        """True while the state of parked contributions may be that of a round which goes on.

        Late peers must form no round of their own. The members of a failed round show its failure: they join again.
        """
        parked = builder.parked
        bound = {join.join.bound for join in parked.values()} - {None}
        return any(
            ended.state in bound
            and round < builder.round
            and now - ended.at < UNSETTLED_SECONDS
            and not ended.peers & parked.keys()
            and any(self._membership.alive(peer, now) for peer in ended.peers)
            for round, ended in self._ended.items()
        )

    def _word(self, builder: GroupBuilder, now: float) -> tuple[wire.Standing | None, float | None]:
        left = self._policy.limit(builder, now).at - now
        closes = min(max(left, 0.0), wire.MAX_PATIENCE) if left < float("inf") else None
        return self._policy.standing(builder, now), closes

    def _close(self, builder: GroupBuilder, closing: Closing, now: float) -> wire.GroupFormed | None:
        context = self._context
        standing = self._policy.standing(builder, now)
        drawn = () if standing is None else standing.drawn
        manifest = Manifest.of(context.peer, closing.members, drawn)
        reason = f"{closing.reason}; coordinated by {context.peer}"[: wire.MAX_DETAIL_CHARS]
        lateness = min(closing.lateness, MAX_WAIT)
        waited = closing.last, min(closing.waited, wire.MAX_PATIENCE)
        seconds = self._policy.late(builder, closing, now)
        late = tuple(seconds[peer] for peer in (*manifest.peers, *closing.absent)) if seconds else ()
        formed = wire.GroupFormed(
            context.run, manifest, lateness, tuple(closing.absent), reason, *waited, late
        )
        for peer in manifest.peers:
            if peer != context.peer:
                context.send(peer, formed)
        self.remember(formed, now, closing.began, closing.absent)
        apart = frozenset(join.bound for join in closing.left_over if builder.is_stale(join))
        self._ended[builder.round] = self._ended[builder.round]._replace(apart=apart)
        for join in closing.left_over:
            if join.peer != context.peer:
                why = f"the group of round {join.round} has closed without it"
                self._refuse(join.peer, join, why, now, join.round + 1)
        self._owe(closing)
        del self._builders[builder.round]
        context.learn(formed)
        return formed if context.peer in manifest.peers else None

    def _owe(self, closing: Closing) -> None:
        for join in closing.members:
            self._owed.pop(join.peer, None)
        self._owed.update(dict.fromkeys(join.peer for join in closing.left_over))

    def _builder(self, round: int, now: float) -> GroupBuilder:
        if round not in self._builders:
            empty = [number for number, builder in self._builders.items() if not builder.parked]
            if len(self._builders) >= MAX_GATHERINGS:
                furthest = empty[0] if empty else max(self._builders)
                self._abandon(furthest, "more rounds are gathered here than may be", now)
            needs, policy = self._context.needs, self._policy
            self._builders[round] = GroupBuilder(round, needs, policy.keepalive, invites=policy.patient)
        return self._builders[round]

    def _accept(self, builder: GroupBuilder, parked: ParkedJoin, outlook: Outlook, now: float) -> None:
        join, short = parked.join, builder.is_short(outlook)
        wait = min(max(builder.promise(outlook) - now, 0.0), MAX_WAIT)
        count = len(builder.parked), len(outlook.expected | builder.parked.keys())
        standing, closes = self._word(builder, now)
        news = None if standing == parked.told else standing
        parked.told = standing
        closes = None if standing is None else closes
        answer = wire.JoinAccepted(self._context.run, join.ticket, wait, *count, short, closes, news)
        self._context.send(join.peer, answer)

    def _abandon(self, round: int, reason: str, now: float, next_round: int = 0) -> None:
        """Drop the group of a round; refuse all its joins except this peer's own."""
        for peer, parked in self._builders.pop(round).parked.items():
            if peer != self._context.peer:
                self._refuse(peer, parked.join, reason, now, next_round)

    def _refuse_left_behind(self, builder: GroupBuilder, now: float) -> None:
        """Refuse contributions to a state that the others have left behind; the joiner looks after this peer's own."""
        for peer, parked in list(builder.parked.items()):
            if peer != self._context.peer and (late := self.left_behind(parked.join, now)):
                builder.drop(peer)
                self._context.refuse(peer, parked.join, "the others have gone beyond its state", late=late)


def _ago(at: float, now: float) -> float:
    """Seconds since a time, as lateness is told."""
    return min(max(now - at, LEAST_LATE), wire.MAX_PATIENCE)
