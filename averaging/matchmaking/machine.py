"""Forming groups: the machine of one peer in one run.

A ready peer signs a join and sends it straight to the coordinator of its planned group. All peers with the same view of
the run compute the same coordinator. Peers read the directory ahead of time, so no round waits for it. The last
member's join closes the group at once, after one message each way. A coordinator closes a group when all peers worth
waiting for are in, or when the wait is over. If views of the run differ, joins are redirected. If a coordinator dies,
its peers ask the next in the same order. If a round is over, late peers are told and join the next one. A peer begins
at most one round each time that it becomes ready.
"""

from __future__ import annotations

from equipoise.averaging.manifest import Manifest, ManifestError
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.joiner import Joiner
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.rate_limit import Allowance

DOUBTS_SECONDS, MAX_DOUBTS = 1.0, 4
"""Time, and most manifests of shunned peers checked within it, one of each: up to 64 signatures each, a twentieth of a
core in all."""

ANNOUNCE_PERIOD = 1.0
"""Seconds between announcements: a store costs 20 ms on two cores, and rounds may be faster than that."""


class Matchmaking(Matchmaker):
    """One peer's matchmaking in one run, for as long as it has joined the run.

    It takes events and returns actions; at `deadline` it must get `Woke`. The peer joins groups, and coordinates groups
    whether or not it is ready itself. Times are seconds of one monotonic clock.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._coordinator = Coordinator(context)
        self._joiner = Joiner(context, self._coordinator)
        self._doubtful = Allowance(DOUBTS_SECONDS, MAX_DOUBTS)
        self._announced: tuple[bool, int] | None = None
        self._announced_at = float("-inf")
        self._now = float("-inf")

    @property
    def ready(self) -> bool:
        """True while this peer seeks a group."""
        return self._joiner.ready

    @property
    def _gathering(self) -> Gathering:
        ready, target = self._joiner.count
        if self._joiner.asked == self._context.peer:
            ready, target = self._coordinator.count(self._context.round, self._now)
        return Gathering(max(ready, 1), max(target, ready, 2), self.reason)

    def _take(self, event: events.Event, now: float) -> None:
        self._now = now
        match event:
            case events.BecameReady():
                self._joiner.begin(event, now)
                self._exchanging = None
            case events.Withdrew():
                self._joiner.end()
                # A caller may have given up in the very moment in which its group formed.
                self._exchanging = None
                self.reason = "withdrawn"
            case events.MessageReceived(peer, message):
                self._receive(peer, message, now)
            case events.RoundHeard(peer):
                self._joiner.missed(peer, now)
            case events.PeerLost(peer):
                self._coordinator.drop(peer)
                self._joiner.lost(peer)
            case events.RoundEnded(round):
                if self._exchanging is not None and self._exchanging.round == round:
                    self._exchanging = None
                    self.reason = f"round {round} is over"

    def _receive(self, peer: str, message: object, now: float) -> None:
        match message:
            case wire.JoinRequest():
                self._coordinator.request(peer, message, now)
            case wire.JoinAccepted():
                self._joiner.accepted(peer, message, now)
            case wire.JoinRefused():
                self._joiner.refused(peer, message, now)
            case wire.LeaveRequest():
                self._coordinator.drop(peer, message.ticket)
            case wire.GroupFormed():
                self._take_manifest(peer, message, now)
            case wire.Invitation():
                self._context.send(peer, self._context.whereabouts())
                self._joiner.invited(peer, message.round, now)
            case wire.Whereabouts():
                self._coordinator.remind(peer, message.round)
                if self._context.within_reach(message.round, now):
                    self._membership.advance(peer, message.round)

    def _take_manifest(self, peer: str, message: wire.GroupFormed, now: float) -> None:
        # This peer accepts a valid group with its own join from any coordinator. Only the cost of checking is bounded.
        if self._membership.shuns(peer, now) and not self._doubtful.admits(peer, now):
            return
        try:
            manifest = self._joiner.formed(message)
            if manifest is None:
                return
        except ManifestError as error:
            self.reason = f"{peer} sent a manifest that is not valid: {error}"
            self._joiner.give_up(peer, now)
            return
        self._context.learn(message)
        self._coordinator.remember(message, now)
        self._begin_round(manifest, message.reason)

    def _begin_round(self, manifest: Manifest, reason: str) -> None:
        self._joiner.end(formed_by=manifest.coordinator)
        self._context.advance(manifest)
        self._exchanging = manifest
        self.reason = f"round {manifest.round} with {len(manifest.members)} members: {reason}"
        self._context.out.append(events.Form(manifest, self.reason))

    def _settle(self, now: float) -> None:
        self._joiner.settle(now)
        self._coordinator.note_own(self._joiner.asked, not self._joiner.anywhere)
        own = self._coordinator.settle(now)
        if own is not None:
            self._begin_round(*own)
        elif self._coordinator.has_closed(self._context.round):
            self._joiner.settle(now)  # The group is full without this peer's own join.
        self._coordinator.note_own(self._joiner.asked, not self._joiner.anywhere)
        self._coordinator.end_rounds_gone()
        if self._coordinator.speak(now):
            self._joiner.alone(now)
        if self._joiner.ready:
            coordinates = self._joiner.asked == self._context.peer
            round = self._context.round
            self.reason = self._coordinator.describe(round, now) if coordinates else self._joiner.reason
        self.deadline = min(self._announce(now), self._joiner.deadline(), self._coordinator.deadline(now))

    def _announce(self, now: float) -> float:
        """Announce a change of state, but not too often; returns when to try again."""
        stands = self._joiner.ready, self._context.round
        if stands != self._announced and now >= self._announced_at + ANNOUNCE_PERIOD:
            self._announced, self._announced_at = stands, now
            self._context.out.append(events.Announce(*stands, self.reason))
        return float("inf") if stands == self._announced else self._announced_at + ANNOUNCE_PERIOD
