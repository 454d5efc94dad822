"""The search for a group: the joiner asks a coordinator, follows its answer, or asks the next one."""

from __future__ import annotations

from collections import deque

from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.closing import ClosePolicy
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.events import BecameReady, Late
from equipoise.averaging.timing import (
    BEHIND_SECONDS,
    MISSED_SECONDS,
    OVERDUE_SECONDS,
    REPLY_SECONDS,
    SHORT_SECONDS,
)

VAIN = 0.25
"""Share of its time for a group after which a patient search that ends without one counts as vain: the others may be in
another round. A search that ends sooner may have been withdrawn for a training."""

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


class Joiner:
    """One peer's search for a group, from ready to formed or withdrawn; then for the next group.

    Attributes:
        asked: The coordinator that has this peer's join, or was asked to take it.
        anywhere: Whether this peer is a guest there, so that members of its own group should not follow.
        count: Number of joins that the coordinator has, and number that it waits for in all.
        reason: The state of the search, one line.
        standing: The drawn and the contributed peers by the coordinator's last word; None in most runs.
    """

    def __init__(self, context: Context, convening: Coordinator, policy: ClosePolicy) -> None:
        self._context = context
        self._policy = policy
        self._membership = context.membership
        self._coordinator = convening
        self._ready: BecameReady | None = None
        self._since = 0.0
        self._in_vain = False
        self._rest()

    def _rest(self) -> None:
        self._join: Join | None = None
        self._joins: deque[Join] = deque(maxlen=JOINS_KEPT)
        self.asked: str | None = None
        self._parked = False
        self._held_since = float("inf")
        self._cost: dict[str, float] = {}
        self._missed: dict[str, float] = {}
        self._behind_since = float("inf")
        self._short = True
        self._alone = False
        self.anywhere = False
        self._hops = 0
        self._asked_hops = 0
        self._asked_at = float("inf")
        self._answer_by = float("inf")
        self.count = 0, 0
        self.reason = ""
        self.standing: wire.Standing | None = None
        self._closes_at = float("inf")

    @property
    def ready(self) -> bool:
        """True while this peer seeks a group."""
        return self._ready is not None

    @property
    def observes(self) -> bool:
        """True while this peer seeks a group with weight 0."""
        return self._ready is not None and self._ready.join.weight == 0

    def begin(self, ready: BecameReady, now: float) -> None:
        """Start to seek, or state the join anew: a group with the join that it had may be on its way, and counts.

        Raises:
            ValueError: The weight is not valid.
        """
        self._context.join(ready.join)
        joins = self._joins
        if self._ready is not None:
            self.end()
        self._joins = joins
        self._membership.dialable = ready.join.dialable
        self._membership.own_misses = 0
        if ready.join.bound is None:
            self._membership.unite()
        self._ready, self._since = ready, now
        believed = self._context.believed_round(now)
        if believed is not None and believed <= self._context.round - 2:
            # A lie may have led this peer into a round without other peers: it comes back, but not to a past round.
            self._context.round = max(self._context.floor, believed)
        if ready.join.bound is None and not self._policy.patient:
            # A mate that has had this round with others cannot come back to it: the rest of its group follows. Else
            # peers that are a round apart stay so, because each call brings all of them one round on.
            self._context.round = self._membership.outrun(self._context.round, self._context.ceiling, now)
        if self._policy.patient and self._in_vain:
            # A peer that has had a later round than the others cannot come back to theirs.
            highest = self._membership.highest_round(self._context.ceiling, now)
            self._context.round = max(self._context.round, highest or 0)
        self._in_vain = False

    def end(self, formed_by: str | None = None) -> None:
        """Stop: a group has formed, or the caller gave up. Any other coordinator that holds the join must drop it."""
        if formed_by is None or formed_by != self.asked:
            self._leave()
        self._in_vain = self._in_vain and formed_by is None
        self._ready = None
        self._rest()

    def accepted(self, peer: str, message: wire.JoinAccepted, now: float) -> None:
        """Handle a coordinator's word that it has parked the join, or still holds it."""
        if not self._is_answer(peer, message.ticket):
            self._context.send(peer, wire.LeaveRequest(self._context.run, message.ticket))
            return
        if self._parked and message.short:
            self.alone(now)
        self._hear_of(message, now)
        if (standing := message.standing) is not None:
            # The peers that the coordinator does not draw are asked whether they live.
            undrawn = set(self._policy.draw(standing.state, now).peers).difference(standing.drawn)
            self._context.ask(self._membership.dialable_others(undrawn, now), now)
        self._parked = True
        self.count, self._short = (message.ready, message.target), message.short
        self.reason = f"{peer} coordinates: {message.ready} of {message.target} are in"
        self._answer_by = now + min(message.wait, self._policy.keepalive) + OVERDUE_SECONDS
        self._charge(peer, max(0.0, now - self._held_since), now)
        # If mates say that they are ready, a group is possible too: only the coordinator says that they are not in.
        could_close = not message.short or (
            not self._policy.patient and self._membership.mate_ready(self._context.round, now, but=peer)
        )
        self._held_since = now if could_close else float("inf")

    def _hear_of(self, message: wire.JoinAccepted | wire.Invitation, now: float) -> None:
        self._closes_at = float("inf") if message.closes is None else now + message.closes
        self.standing = message.standing or self.standing

    def view(self, now: float) -> tuple[wire.Standing | None, float | None, float]:
        """The standing of the round, the seconds until it closes, and the seconds until this peer gives up."""
        patience = 0.0 if self._ready is None else self._ready.patience - self._policy.reserve
        gives_up = self._since + patience - now
        own = self._coordinator.standing(self._context.round, now)
        if self.asked == self._context.peer or (self.asked is None and own[0] is not None):
            return *own, gives_up
        left = self._closes_at - now
        return self.standing, left if left < float("inf") else None, gives_up

    def alone(self, now: float) -> None:
        """Note that the join has no group yet. After `SHORT_SECONDS` search again by the latest view of the run.

        Where others train for minutes, a join without a group is no sign that the views differ.
        """
        if now - self._asked_at >= SHORT_SECONDS and not self._policy.patient:
            self._asked_at = now
            self._hops = 0
            self._alone = True

    def invited(self, peer: str, message: wire.Invitation, now: float) -> None:
        """Handle an invitation: move the join there if no group is possible where it is, at most `MAX_HOPS` times."""
        round = message.round
        if self._ready is None and round >= self._context.round and self._membership.knows(peer):
            self._hear_of(message, now)
        same_round = self._join is not None and round == self._join.round == self._context.round
        known = self._membership.knows(peer)  # Any stranger can claim to coordinate.
        own = self.asked == self._context.peer
        alone = self._coordinator.is_short(round, now) if own else self._short
        may_go = known and same_round and peer != self.asked and alone and self._hops < wire.MAX_HOPS
        if self._policy.patient:
            # Any peer may invite again and again: this peer goes only where its own view sends it.
            may_go = may_go and peer == self._membership.coordinator(self._context.peer, round, now)
        if may_go and self._membership.heeds(peer, now):
            self._leave()
            self._hops += 1
            self._ask(peer, now)

    def refused(self, peer: str, message: wire.JoinRefused, now: float) -> None:
        """Handle a refusal: end as late, follow the redirect, go on to the next round, or turn to the next coordinator.

        A coordinator that lies about lateness costs this peer one search: the next round has another coordinator.
        """
        if not self._is_answer(peer, message.ticket):
            return
        self.asked = None
        self.reason = f"{peer} refused: {message.detail}"
        goes_on = message.round > self._context.round and self._context.within_reach(message.round, now)
        if goes_on:
            self._membership.advance(peer, message.round)
            self._context.round = message.round
        if message.late and self._join is not None and self._join.bound:
            self._coordinator.note_closed(self._join, message.group, now - message.late)
            self._end_late(message.late, message.detail)
        elif message.redirect is not None and self._asked_hops < wire.MAX_HOPS:
            self._follow(peer, message.redirect, now)
        elif not goes_on:
            self._membership.lose(peer, now)
            self._charge(peer, REPLY_SECONDS, now)

    def missed(self, peer: str, now: float) -> None:
        """Note that a peer is in an unknown round, perhaps with this peer: ask it unless a manifest comes."""
        news = self._ready is not None and self._membership.knows(peer)
        if news and peer not in self._missed and len(self._missed) < MAX_MISSED:
            self._missed[peer] = now + MISSED_SECONDS

    def lost(self, peer: str) -> None:
        """Note that a peer cannot be reached: if it has the join, the next coordinator is asked."""
        if peer == self.asked:
            self.asked, self.reason = None, f"{peer} cannot be reached"

    def give_up(self, peer: str, now: float) -> None:
        """Take the join from this peer, and shun the peer for a while."""
        if peer == self.asked:
            self._leave()
        self._membership.shun(peer, now)

    def formed(self, message: wire.GroupFormed) -> Manifest | None:
        """The manifest, if it has a join of this peer that still counts; any peer may have sent it.

        Raises:
            ManifestError: The manifest has this peer's join, but is not valid.
        """
        context, manifest = self._context, message.manifest
        own = next((join for join in self._joins if join in manifest.members), None)
        if own is None:
            return None
        manifest.check(context.verify, spec=context.spec, needs=context.needs, own=own)
        return manifest

    def settle(self, now: float) -> None:
        """Ask the coordinator by this peer's view of the run, unless the join was redirected or invited elsewhere."""
        if self._ready is None:
            return
        self._in_vain = now >= self._since + VAIN * (self._ready.patience - self._policy.reserve)
        self._keep_up(self._ready, now)
        if self._ready is None:
            return  # The contribution is late.
        if self._join is None or self._join.round != self._context.round:
            self._leave()
            self._join = self._context.join(self._ready.join)
            self._joins.append(self._join)
            self._hops = 0
            self._cost.clear()
            self._missed.clear()
        if self.asked is not None and now >= self._answer_by:
            self.reason = f"{self.asked} did not answer in time"
            self._membership.lose(self.asked, now)
            self._charge(self.asked, REPLY_SECONDS, now)
            self._leave()
        for peer in [peer for peer, at in self._missed.items() if now >= at]:
            self._missed[peer] = float("inf")
            self._context.send(peer, self._context.whereabouts())
        target = self._target(now)
        if target is None and self.asked is None:
            self._alone = True
            self.reason = "no peer that can be dialled is alive"
            self._answer_by = now + ASK_AGAIN_SECONDS
        elif target is not None and target != self.asked:
            self._leave()
            self._ask(target, now)

    def deadline(self) -> float:
        """The time of the next overdue answer, due question, or lateness of this peer; infinity if none is pending."""
        return min(self._answer_by, self._behind_since + BEHIND_SECONDS, *self._missed.values(), float("inf"))

    def _keep_up(self, ready: BecameReady, now: float) -> None:
        context, coordinator, late = self._context, self._coordinator, 0.0
        while coordinator.has_closed(context.round):
            late = late or coordinator.lateness(ready.join.bound, context.round, now)
            context.round += 1
        if self._join is not None and self.asked == context.peer:
            late = late or coordinator.left_behind(self._join, now)
        if late:
            self._end_late(late, "its group closed here")
        elif self._join is not None and ((ready.join.bound and context.floor) or self._policy.patient):
            self._heed_others(ready, now)
        else:
            self._follow_others(now)

    def _heed_others(self, ready: BecameReady, now: float) -> None:
        """Give up the round once the others have been beyond it for `BEHIND_SECONDS`: a contribution to it is late."""
        context, believed = self._context, self._context.believed_round(now)
        ahead = max(believed or 0, context.round + context.membership.left_behind(context.round, now))
        if ahead <= context.round:
            self._behind_since = float("inf")
            if not self._policy.patient:
                self._follow_others(now)
        elif self._behind_since == float("inf"):
            self._behind_since = now
        elif now >= self._behind_since + BEHIND_SECONDS:
            why, since = f"the others are beyond round {context.round}", self._behind_since
            context.round, self._behind_since = ahead, float("inf")
            # A peer that has had no round yet only has its number wrong.
            if ready.join.bound and context.floor:
                self._end_late(now - since, why)

    def _end_late(self, seconds: float, why: str) -> None:
        self._context.out.append(Late(seconds, why))
        self.end()

    def _follow_others(self, now: float) -> None:
        context = self._context
        believed = context.believed_round(now)
        forsaken = self._alone and not context.membership.has_mates
        if forsaken and believed is not None and believed < context.floor:
            # Its mates are gone, and the others may never reach its number: it begins as a newcomer.
            context.round, context.floor = believed, 0
        # A peer with a mate in reach asks for its next round first: a refusal tells it the true number.
        asks = not self._alone and any(
            one <= context.round for one in context.membership.mates_near(context.round)
        )
        if believed is not None and believed >= context.round + 2 and not asks:
            context.round = believed
        elif context.membership.left_behind(context.round, now) and (self._alone or not self._parked):
            # A parked peer waits for its coordinator's word: the others may be ahead because its group has formed.
            context.round += 1
        elif self._alone:
            highest = context.membership.highest_round(context.ceiling, now)
            context.round = max(context.round, highest or 0)

    def _target(self, now: float) -> str | None:
        membership, asked = self._membership, self.asked
        round, long_alone = self._context.round, self._alone and now - self._since >= LONELY_SECONDS
        self.anywhere = long_alone and not membership.mate_ready(round, now)
        was_sent = self._hops > 0 and not self.anywhere
        if asked is not None and was_sent and not membership.suspects(asked, now):
            return asked
        return membership.coordinator(self._context.peer, round, now, anywhere=self.anywhere)

    def _follow(self, peer: str, redirect: str, now: float) -> None:
        membership = self._membership
        self._hops = min(self._hops + 1, wire.MAX_HOPS)
        in_vain = redirect == self._context.peer and not membership.dialable
        dead_or_shunned = membership.suspects(redirect, now) or membership.shuns(redirect, now)
        if redirect == peer or in_vain or dead_or_shunned:  # A shunned peer may call itself.
            self._hops, redirect = wire.MAX_HOPS, peer
        self._ask(redirect, now)

    def _charge(self, coordinator: str, seconds: float, now: float) -> None:
        """Add seconds to a coordinator's cost: beyond the limit, it is not asked first for a while."""
        membership = self._membership
        limit = REPLY_SECONDS if membership.shuns(coordinator, now) else self._policy.hold
        self._cost[coordinator] = self._cost.get(coordinator, 0.0) + seconds
        if self._cost[coordinator] > limit:
            self.reason = f"{coordinator} has formed no group in {limit:.0f} s"
            # A coordinator without a possible group may wait for its own trainer: it may call once when that is ready.
            membership.shun(coordinator, now, excused=self._short)
            self._hops = 0
            del self._cost[coordinator]

    def _ask(self, coordinator: str, now: float) -> None:
        if self._ready is None or self._join is None:
            return
        self.asked, self._asked_at, self._parked = coordinator, now, False
        self._held_since = float("inf")
        self.count, self._short = (0, 0), True
        self.standing, self._closes_at = None, float("inf")
        patience = max(0.0, min(self._since + self._ready.patience - now, wire.MAX_PATIENCE))
        if coordinator == self._context.peer:
            self._coordinator.park_own(self._join, patience, now)
            self._answer_by = float("inf")
            self.reason = "this peer coordinates"  # `Coordinator.describe` tells more.
        else:
            self._asked_hops = wire.MAX_HOPS if self.anywhere else self._hops
            request = wire.JoinRequest(self._context.run, self._join, patience, self._asked_hops)
            self._context.send(coordinator, request)
            self._answer_by = now + REPLY_SECONDS
            self.reason = f"{coordinator} is asked"

    def _leave(self) -> None:
        if self.asked == self._context.peer:
            self._coordinator.drop(self._context.peer)
        elif self.asked is not None and self._join is not None:
            self._context.send(self.asked, wire.LeaveRequest(self._context.run, self._join.ticket))
        self.asked = None

    def _is_answer(self, peer: str, ticket: bytes) -> bool:
        return self._join is not None and peer == self.asked and ticket == self._join.ticket
