"""The search for a group: one peer's life from ready until a group has formed, it gives up, or it is late.

Whether a search goes on, and where, is its state:

    state         what happens                                           next state
    ------------  -----------------------------------------------------  ---------------------------------
    Idle          begin: the peer is ready                               Looking
    Looking       another peer coordinates its group by its view         Asking that peer
                  this peer does                                         Coordinating
                  no peer can be dialled                                 Looking, again in a second
    Asking        accepted                                               Parked
    Asking,       refused, with a redirect                               Asking the named coordinator
    Parked        refused; lost; no answer in time                       Looking
                  invited while no group is possible here                Asking the peer that invites
    Parked        accepted: a sign of life                               Parked
    all but Idle  another peer coordinates by the latest view            Asking that peer
                  the number of the next round moves                     Looking, with a join of that round
                  formed; withdrawn; late                                Idle

A joiner that turns away from a coordinator tells it so: `LeaveRequest`. `PatientJoiner` searches in federated runs.
"""

from __future__ import annotations

from collections import deque

import msgspec

from equipoise.averaging.draw import Drawn
from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.closing import ClosePolicy
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.events import BecameReady, Late
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import (
    BEHIND_SECONDS,
    MISSED_SECONDS,
    OVERDUE_SECONDS,
    REPLY_SECONDS,
    SHORT_SECONDS,
)

ASK_AGAIN_SECONDS = 1.0
"""Time between two looks for a coordinator to ask, while there is no candidate."""

MAX_MISSED = 64
"""Most peers asked about a round unknown here, each once for one join; as many as a group has members."""

JOINS_KEPT = 4
"""Most joins of one ready period for which a manifest is still accepted, one for each round that the peer sought. A
link can be slower than the directory, so that a manifest comes after the directory has shown the next round."""

LONELY_SECONDS = 10.0
"""Time that a peer waits alone in its planned group before it looks for company in the whole run. If it were shorter,
an early bird would be missing from its own group."""

NEVER = float("inf")


class State(msgspec.Struct, frozen=True):
    """Where a search stands.

    Attributes:
        coordinator: The peer that has this peer's join, or was asked to take it.
        act_at: When the search goes on if no message comes.
        since: Since when the coordinator has had the join, or since the latest search for another.
        hops: Number of redirects of the join, as the coordinator was told.
    """

    coordinator: str | None = None
    act_at: float = NEVER
    since: float = NEVER
    hops: int = 0


class Idle(State, frozen=True):
    """No group is sought."""


class Looking(State, frozen=True):
    """No coordinator has the join; the next look is due."""


class Asking(State, frozen=True):
    """A coordinator was asked to take the join, and has not answered."""


class Parked(State, frozen=True):
    """The coordinator has parked the join.

    Attributes:
        ready: Number of joins that the coordinator has.
        target: Number of joins that it waits for in all.
        short: Whether the joins that it has could not be a group.
        held_since: Since when it could have closed a group, or promised to.
    """

    ready: int = 0
    target: int = 0
    short: bool = True
    held_since: float = NEVER


class Coordinating(State, frozen=True):
    """This peer coordinates its own group, and has parked its join with itself."""


class Search(msgspec.Struct):
    """Knowledge of one search, whichever coordinator has the join; a move to another round begins the last three anew.

    Attributes:
        stated: What the caller wants.
        since: When the search began.
        joins: The joins for which a manifest still counts.
        join: The join of the present round.
        alone: Whether the join has had no group for a while.
        anywhere: Whether this peer seeks company in the whole run, where members of its group should not follow.
        behind_since: Since when the others are beyond the round.
        hops: Number of times that the join was sent elsewhere than this peer's view says.
        cost: Seconds that each coordinator has cost.
        missed: When to ask peers about a round unknown here.
    """

    stated: BecameReady
    since: float
    joins: deque[Join]
    join: Join | None = None
    alone: bool = False
    anywhere: bool = False
    behind_since: float = NEVER
    hops: int = 0
    cost: dict[str, float] = {}
    missed: dict[str, float] = {}

    @property
    def bound(self) -> bool:
        """True if the contribution was made for a state."""
        return self.stated.join.bound is not None


class Joiner:
    """One peer's search for a group; then for the next group.

    Attributes:
        state: Where the search stands.
        search: Knowledge of the search; None if the peer is idle.
    """

    def __init__(self, context: Context, coordinator: Coordinator, policy: ClosePolicy) -> None:
        self._context = context
        self._policy = policy
        self._membership = context.membership
        self._round = context.next_round
        self._coordinator = coordinator
        self._reason = ""
        self.state: State = Idle()
        self.search: Search | None = None

    @property
    def anywhere(self) -> bool:
        """True if this peer is a guest of its coordinator, so that members of its own group should not follow."""
        return self.search is not None and self.search.anywhere

    @property
    def deadline(self) -> float:
        """When an answer is overdue, a question is due, or this peer is late; infinity if nothing is pending."""
        search = self.search
        if search is None:
            return NEVER
        return min(self.state.act_at, search.behind_since + BEHIND_SECONDS, *search.missed.values(), NEVER)

    # ---- the life of a search ----

    def begin(self, ready: BecameReady, now: float) -> None:
        """Start to seek, or state the join anew: a group with the join that it had may be on its way, and counts.

        Raises:
            ValueError: The weight is not valid.
        """
        self._context.join(ready.join)
        joins = deque[Join](maxlen=JOINS_KEPT) if self.search is None else self.search.joins
        if self.search is not None:
            self.end()
        self._membership.dialable = ready.join.dialable
        self._membership.own_misses = 0
        if ready.join.bound is None:
            self._membership.unite()
        self.state, self.search = Looking(), Search(ready, now, joins)
        self._round.come_back(now)
        self._choose_round(self.search, now)

    def settle(self, now: float) -> None:
        """Ask the coordinator by this peer's view of the run, unless the join was redirected or invited elsewhere."""
        search = self.search
        if search is None or self._is_late(search, now):
            return
        if search.join is None or search.join.round != self._round.number:
            self._join(search)
        if self.state.coordinator is not None and now >= self.state.act_at:
            self._give_up_silent(search, self.state.coordinator, now)
        for peer in [peer for peer, at in search.missed.items() if now >= at]:
            search.missed[peer] = NEVER
            self._context.send(peer, self._context.whereabouts())
        target = self._target(search, now)
        if target is not None and target != self.state.coordinator:
            self._leave()
            self._ask(search, target, now)
        elif target is None and self.state.coordinator is None:
            search.alone = True
            self._reason = "no peer that can be dialled is alive"
            self.state = Looking(act_at=now + ASK_AGAIN_SECONDS)
        if isinstance(self.state, Coordinating) and (late := self._left_behind(search, now)):
            # Before its group closes with this join.
            self._end_late(late, "the others have gone beyond its state")

    def accepted(self, peer: str, message: wire.JoinAccepted, now: float) -> None:
        """Handle a coordinator's word that it has parked the join, or still holds it."""
        search = self._answered(peer, message.ticket)
        if search is None:
            self._context.send(peer, wire.LeaveRequest(self._context.run, message.ticket))
            return
        if isinstance(self.state, Parked) and message.short:
            self.alone(now)
        self._hear(message, now)
        before = self.state
        self._reason = f"{peer} coordinates: {message.ready} of {message.target} are in"
        held_since = before.held_since if isinstance(before, Parked) else NEVER
        self._charge(search, peer, max(0.0, now - held_since), now, excused=message.short)
        self.state = Parked(
            peer,
            now + min(message.wait, self._policy.keepalive) + OVERDUE_SECONDS,
            before.since,
            before.hops,
            message.ready,
            message.target,
            message.short,
            now if self._could_close(peer, message, now) else NEVER,
        )

    def refused(self, peer: str, message: wire.JoinRefused, now: float) -> None:
        """Handle a refusal: end as late, follow the redirect, go on to the next round, or turn to the next coordinator.

        A coordinator that lies about lateness costs this peer one search: the next round has another coordinator.
        """
        search = self._answered(peer, message.ticket)
        if search is None or search.join is None:
            return
        hops, short = self.state.hops, self._is_short(now)
        self.state, self._reason = Looking(), f"{peer} refused: {message.detail}"
        goes_on = message.round > self._round.number and self._round.within_reach(message.round, now)
        if goes_on:
            self._membership.advance(peer, message.round)
            self._round.reach(message.round)
        if message.late and search.bound:
            self._coordinator.note_closed(search.join, message.group, now - message.late)
            self._end_late(message.late, message.detail)
        elif message.redirect is not None and hops < wire.MAX_HOPS:
            self._follow(search, peer, message.redirect, now)
        elif not goes_on:
            self._membership.lose(peer, now)
            self._charge(search, peer, REPLY_SECONDS, now, excused=short)

    def invited(self, peer: str, message: wire.Invitation, now: float) -> None:
        """Handle an invitation: move the join there if no group is possible where it is, at most `MAX_HOPS` times."""
        search, round = self.search, message.round
        if search is None or search.join is None or not round == search.join.round == self._round.number:
            return
        may_go = self._membership.knows(peer)  # Any stranger can claim to coordinate.
        may_go = may_go and peer != self.state.coordinator and search.hops < wire.MAX_HOPS
        if may_go and self._is_short(now) and self._trusts(peer, now) and self._membership.heeds(peer, now):
            self._leave()
            search.hops += 1
            self._ask(search, peer, now)

    def alone(self, now: float) -> None:
        """Note that the join has no group yet. After `SHORT_SECONDS` search again by the latest view of the run."""
        if self.search is not None and now - self.state.since >= SHORT_SECONDS:
            self.state = msgspec.structs.replace(self.state, since=now)
            self.search.hops, self.search.alone = 0, True

    def missed(self, peer: str, now: float) -> None:
        """Note that a peer is in an unknown round, perhaps with this peer: ask it unless a manifest comes."""
        missed = {} if self.search is None else self.search.missed
        if self._membership.knows(peer) and len(missed) < MAX_MISSED:
            missed.setdefault(peer, now + MISSED_SECONDS)

    def lost(self, peer: str) -> None:
        """Note that a peer cannot be reached: if it has the join, the next coordinator is asked."""
        if peer == self.state.coordinator:
            self.state, self._reason = Looking(), f"{peer} cannot be reached"

    def give_up(self, peer: str, now: float) -> None:
        """Take the join from this peer, and shun the peer for a while."""
        if peer == self.state.coordinator:
            self._leave()
        self._membership.shun(peer, now)

    def gives_up(self, now: float) -> None:
        """Note that the caller is about to give up."""

    def formed(self, message: wire.GroupFormed) -> Manifest | None:
        """The manifest, if it has a join of this peer that still counts; any peer may have sent it.

        Raises:
            ManifestError: The manifest has this peer's join, but is not valid.
        """
        context, manifest = self._context, message.manifest
        joins = () if self.search is None else self.search.joins
        own = next((join for join in joins if join in manifest.members), None)
        if own is None:
            return None
        manifest.check(context.verify, spec=context.spec, needs=context.needs, own=own, role=context.role)
        return manifest

    def end(self, formed_by: str | None = None) -> None:
        """Stop: a group has formed, or the caller gave up. Any other coordinator that holds the join must drop it."""
        if formed_by is None or formed_by != self.state.coordinator:
            self._leave()
        self.state, self.search, self._reason = Idle(), None, ""

    # ---- for people ----

    def describe(self, now: float) -> str:
        """The state of the search, one line."""
        if isinstance(self.state, Coordinating):
            return self._coordinator.describe(self._round.number, now)
        return self._reason

    def gathering(self, now: float) -> Gathering | None:
        """The round that gathers, as far as this peer knows; None if it knows of none."""
        ready = target = 0
        if isinstance(self.state, Idle):
            return None
        if isinstance(self.state, Parked):
            ready, target = self.state.ready, self.state.target
        elif isinstance(self.state, Coordinating):
            ready, target = self._coordinator.count(self._round.number, now)
        return Gathering(max(ready, 1), max(target, ready, 2), self.describe(now))

    def shortage(self, now: float) -> str:
        """Why no group has formed so far, one line; empty if `describe` says it."""
        return ""

    def draw(self, state: StateId, now: float) -> Drawn:
        """See `Matchmaker.draw`."""
        return self._policy.draw(state, now)

    # ---- in federated runs otherwise ----

    def _choose_round(self, search: Search, now: float) -> None:
        """Move to the round of the others, as a search begins."""
        if not search.bound:
            self._round.follow_mates(now)

    def _follow_others(self, search: Search, now: float) -> float:
        """Move to the round of the others; returns the seconds by which a bound contribution to the round is late."""
        bound = search.join is not None and search.bound and self._round.floor
        if bound and self._is_behind(search, now):
            return self._heed(search, now)
        self._round.follow(now, alone=search.alone)
        return 0.0

    def _hear(self, message: wire.JoinAccepted | wire.Invitation, now: float) -> None:
        """Take in what a coordinator says of its round."""

    def _could_close(self, peer: str, message: wire.JoinAccepted, now: float) -> bool:
        """True if the coordinator could close a group, or if mates are ready that it says are not in."""
        return not message.short or self._membership.mate_ready(self._round.number, now, but=peer)

    def _trusts(self, peer: str, now: float) -> bool:
        """True if this peer may move its join to the peer that invites it."""
        return True

    # ---- the steps ----

    def _is_late(self, search: Search, now: float) -> bool:
        """Move to the round in which the others are; end the search if the contribution is late, and return True."""
        coordinator, round, late = self._coordinator, self._round, 0.0
        while coordinator.has_closed(round.number):
            late = late or coordinator.lateness(search.stated.join.bound, round.number, now)
            round.number += 1
        late = late or self._left_behind(search, now)
        if late:
            why = "its group closed here"
        else:
            why = f"the others are beyond round {round.number}"
            late = self._follow_others(search, now)
        if late:
            self._end_late(late, why)
        return late > 0

    def _left_behind(self, search: Search, now: float) -> float:
        """Seconds since others have gone beyond the state of this peer's own contribution, which is parked here."""
        if search.join is None or not isinstance(self.state, Coordinating):
            return 0.0
        return self._coordinator.left_behind(search.join, now)

    def _is_behind(self, search: Search, now: float) -> bool:
        """True if the others are beyond this peer's round."""
        behind = (self._round.believed(now) or 0) > self._round.number
        search.behind_since = min(search.behind_since, now) if behind else NEVER
        return behind

    def _heed(self, search: Search, now: float) -> float:
        """Give up the round once the others have been beyond it for `BEHIND_SECONDS`: a contribution to it is late."""
        late = now - search.behind_since
        if late < BEHIND_SECONDS:
            return 0.0
        search.behind_since = NEVER
        self._round.reach(self._round.believed(now) or 0)
        # A peer that has had no round yet only has its number wrong.
        return late if search.bound and self._round.floor else 0.0

    def _end_late(self, seconds: float, why: str) -> None:
        self._context.out.append(Late(seconds, why))
        self.end()

    def _join(self, search: Search) -> None:
        self._leave()
        search.join = self._context.join(search.stated.join)
        search.joins.append(search.join)
        search.hops, search.cost, search.missed = 0, {}, {}

    def _give_up_silent(self, search: Search, peer: str, now: float) -> None:
        self._reason = f"{peer} did not answer in time"
        self._membership.lose(peer, now)
        self._charge(search, peer, REPLY_SECONDS, now, excused=self._is_short(now))
        self._leave()

    def _target(self, search: Search, now: float) -> str | None:
        """The coordinator to ask: the present one if the join was sent to it, else that of this peer's view."""
        membership, asked, round = self._membership, self.state.coordinator, self._round.number
        long_alone = search.alone and now - search.since >= LONELY_SECONDS
        search.anywhere = long_alone and not membership.mate_ready(round, now)
        was_sent = search.hops > 0 and not search.anywhere
        if asked is not None and was_sent and not membership.suspects(asked, now):
            return asked
        return membership.coordinator(self._context.peer, round, now, anywhere=search.anywhere)

    def _follow(self, search: Search, peer: str, redirect: str, now: float) -> None:
        membership = self._membership
        search.hops = min(search.hops + 1, wire.MAX_HOPS)
        in_vain = redirect == self._context.peer and not membership.dialable
        dead_or_shunned = membership.suspects(redirect, now) or membership.shuns(redirect, now)
        if redirect == peer or in_vain or dead_or_shunned:  # A shunned peer may call itself.
            search.hops, redirect = wire.MAX_HOPS, peer
        self._ask(search, redirect, now)

    def _ask(self, search: Search, coordinator: str, now: float) -> None:
        assert search.join is not None, "a search that settles has a join"
        patience = max(0.0, min(search.since + search.stated.patience - now, wire.MAX_PATIENCE))
        if coordinator == self._context.peer:
            self._coordinator.park_own(search.join, patience, now)
            self.state = Coordinating(coordinator, since=now)
            return
        hops = wire.MAX_HOPS if search.anywhere else search.hops
        self._context.send(coordinator, wire.JoinRequest(self._context.run, search.join, patience, hops))
        self.state, self._reason = (
            Asking(coordinator, now + REPLY_SECONDS, now, hops),
            f"{coordinator} is asked",
        )

    def _leave(self) -> None:
        """Take the join from its coordinator, if it has one."""
        coordinator, search = self.state.coordinator, self.search
        if coordinator == self._context.peer:
            self._coordinator.drop(coordinator)
        elif coordinator is not None and search is not None and search.join is not None:
            self._context.send(coordinator, wire.LeaveRequest(self._context.run, search.join.ticket))
        self.state = Looking()

    def _answered(self, peer: str, ticket: bytes) -> Search | None:
        """The search, if this is an answer to its join by the coordinator that was asked."""
        search = self.search
        asked = search is not None and search.join is not None and search.join.ticket == ticket
        return search if asked and peer == self.state.coordinator else None

    def _is_short(self, now: float) -> bool:
        """True if no group is possible where the join is."""
        if isinstance(self.state, Coordinating):
            return self._coordinator.is_short(self._round.number, now)
        return not isinstance(self.state, Parked) or self.state.short

    def _charge(self, search: Search, peer: str, seconds: float, now: float, *, excused: bool) -> None:
        """Add seconds to a coordinator's cost: beyond the limit, it is not asked first for a while.

        A coordinator without a possible group may wait for its own trainer: if `excused`, it may call once when that is
        ready.
        """
        limit = REPLY_SECONDS if self._membership.shuns(peer, now) else self._policy.hold
        search.cost[peer] = search.cost.get(peer, 0.0) + seconds
        if search.cost[peer] > limit:
            self._reason = f"{peer} has formed no group in {limit:.0f} s"
            self._membership.shun(peer, now, excused=excused)
            search.hops = 0
            del search.cost[peer]
