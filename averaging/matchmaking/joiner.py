"""The search for a group: the joiner asks a coordinator, follows its answer, or asks the next one."""

from __future__ import annotations

from collections import deque

from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.events import BecameReady
from equipoise.averaging.matchmaking.group_builder import MAX_WAIT
from equipoise.averaging.matchmaking.membership import LEAP
from equipoise.averaging.timing import KEEPALIVE, MISSED_SECONDS, OVERDUE_SECONDS, REPLY_SECONDS

HOLD_SECONDS = MAX_WAIT + REPLY_SECONDS
"""Most seconds that one coordinator may cost a search before the joiner asks others first. An honest coordinator needs
at most `MAX_WAIT` once a group is possible, and the joiner waits for one missing answer. Refusals count: no peer holds
a search by refusing and luring. A coordinator that invites the joiner later gets the time of one answer."""

SHORT_SECONDS = 2.0
"""Seconds that a join may stay parked without a possible group. Then the joiner looks again: other peers may have
joined another coordinator, because views of the run differ by a look or two."""

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
    """

    def __init__(self, context: Context, convening: Coordinator) -> None:
        self._context = context
        self._membership = context.membership
        self._coordinator = convening
        self._ready: BecameReady | None = None
        self._since = 0.0
        self._rest()

    def _rest(self) -> None:
        self._join: Join | None = None
        self._joins: deque[Join] = deque(maxlen=JOINS_KEPT)
        self.asked: str | None = None
        self._parked = False
        self._held_since = float("inf")
        self._cost: dict[str, float] = {}
        self._missed: dict[str, float] = {}
        self._short = True
        self._alone = False
        self.anywhere = False
        self._hops = 0
        self._asked_hops = 0
        self._asked_at = float("inf")
        self._answer_by = float("inf")
        self.count = 0, 0
        self.reason = ""

    @property
    def ready(self) -> bool:
        """True while this peer seeks a group."""
        return self._ready is not None

    def begin(self, ready: BecameReady, now: float) -> None:
        """Start to seek.

        Raises:
            ValueError: The weight is not valid.
        """
        self._context.join(ready)
        self._membership.dialable = ready.dialable
        self._membership.own_misses = 0
        self._ready, self._since = ready, now
        believed = self._context.believed_round(now)
        if believed is not None and believed <= self._context.round - 2:
            # A lie may have led this peer into a round without other peers: it comes back, but not to a past round.
            self._context.round = max(self._context.floor, believed)

    def end(self, formed_by: str | None = None) -> None:
        """Stop: a group has formed, or the caller gave up. Any other coordinator that holds the join must drop it."""
        if formed_by is None or formed_by != self.asked:
            self._leave()
        self._ready = None
        self._rest()

    def accepted(self, peer: str, message: wire.JoinAccepted, now: float) -> None:
        """Handle a coordinator's word that it has parked the join, or still holds it."""
        if not self._is_answer(peer, message.ticket):
            self._context.send(peer, wire.LeaveRequest(self._context.run, message.ticket))
            return
        if self._parked and message.short:
            self.alone(now)
        self._parked = True
        self.count, self._short = (message.ready, message.target), message.short
        self.reason = f"{peer} coordinates: {message.ready} of {message.target} are in"
        self._answer_by = now + min(message.wait, KEEPALIVE) + OVERDUE_SECONDS
        self._charge(peer, max(0.0, now - self._held_since), now)
        # If mates say that they are ready, a group is possible too: only the coordinator says that they are not in.
        could_close = not message.short or self._membership.mate_ready(self._context.round, now, but=peer)
        self._held_since = now if could_close else float("inf")

    def alone(self, now: float) -> None:
        """Note that the join has no group yet. After `SHORT_SECONDS` search again by the latest view of the run."""
        if now - self._asked_at >= SHORT_SECONDS:
            self._asked_at = now
            self._hops = 0
            self._alone = True

    def invited(self, peer: str, round: int, now: float) -> None:
        """Handle an invitation: move the join there if no group is possible where it is, at most `MAX_HOPS` times."""
        same_round = self._join is not None and round == self._join.round == self._context.round
        known = self._membership.knows(peer)  # Any stranger can claim to coordinate.
        own = self.asked == self._context.peer
        alone = self._coordinator.is_short(round, now) if own else self._short
        may_go = known and same_round and peer != self.asked and alone and self._hops < wire.MAX_HOPS
        if may_go and self._membership.heeds(peer, now):
            self._leave()
            self._hops += 1
            self._ask(peer, now)

    def refused(self, peer: str, message: wire.JoinRefused, now: float) -> None:
        """Handle a refusal: follow the redirect, go on to the next round, or turn to the next coordinator."""
        if not self._is_answer(peer, message.ticket):
            return
        self.asked = None
        self.reason = f"{peer} refused: {message.detail}"
        if message.redirect is not None and self._asked_hops < wire.MAX_HOPS:
            self._follow(peer, message.redirect, now)
        elif message.round > self._context.round and self._context.within_reach(message.round, now):
            self._membership.advance(peer, message.round)
            self._context.round = message.round
        else:
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
        context.check(manifest, own)
        return manifest

    def settle(self, now: float) -> None:
        """Ask the coordinator by this peer's view of the run, unless the join was redirected or invited elsewhere."""
        if self._ready is None:
            return
        self._keep_up(now)
        if self._join is None or self._join.round != self._context.round:
            self._leave()
            self._join = self._context.join(self._ready)
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
        """When an answer is overdue or a question is due; infinity if neither is pending."""
        return min(self._answer_by, *self._missed.values(), float("inf"))

    def _keep_up(self, now: float) -> None:
        context = self._context
        while self._coordinator.has_closed(context.round):
            context.round += 1
        believed = context.believed_round(now)
        if believed is not None and believed >= context.round + 2:
            context.round = believed
        elif context.membership.left_behind(context.round, now) and (self._alone or not self._parked):
            # A parked peer waits for its coordinator's word: the others may be ahead because its group has formed.
            context.round += 1
        elif self._alone:
            highest = context.membership.highest_round(context.round + LEAP, now)
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
        limit = REPLY_SECONDS if membership.shuns(coordinator, now) else HOLD_SECONDS
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
