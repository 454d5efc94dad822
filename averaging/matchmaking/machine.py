"""Forming groups: the machine of one peer in one run.

A ready peer signs a join and sends it straight to the coordinator of its planned group. All peers with the same view of
the run compute the same coordinator. Peers read the directory ahead of time, so no round waits for it. The last
member's join closes the group at once, after one message each way. A coordinator closes a group when all peers worth
waiting for are in, or when the wait is over. If views of the run differ, joins are redirected. If a coordinator dies,
its peers ask the next in the same order. If a round is over, late peers are told and join the next one; but if their
contribution was made for the state that the round began with, their search ends as late. A peer begins at most one
round each time that it becomes ready.
"""

from __future__ import annotations

from equipoise.averaging.draw import Drawn
from equipoise.averaging.manifest import ManifestError
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.closing import ClosePolicy
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import Coordinator
from equipoise.averaging.matchmaking.joiner import Joiner
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.matchmaking.patient import PatientJoiner
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.state import StateId
from equipoise.limits import Allowance

DOUBTS_SECONDS, MAX_DOUBTS = 1.0, 4
"""Time, and most manifests of shunned peers checked within it, one of each: up to 64 signatures each, a twentieth of a
core in all."""

ANNOUNCE_PERIOD = 1.0
"""Seconds between announcements: a store costs 20 ms on two cores, and rounds may be faster than that."""


class Matchmaking(Matchmaker):
    """One peer's matchmaking in one run, for as long as it has joined the run.

    The peer joins groups, and coordinates groups whether or not it is ready itself.
    """

    def __init__(self, context: Context, policy: ClosePolicy | None = None) -> None:
        super().__init__(context)
        policy = self._policy = policy or ClosePolicy(context)
        self._coordinator = Coordinator(context, policy)
        joiner = PatientJoiner if policy.patient else Joiner
        self._joiner = joiner(context, self._coordinator, policy)
        self._doubtful = Allowance(DOUBTS_SECONDS, MAX_DOUBTS)
        self._announced: tuple[bool, int] | None = None
        self._announced_at = float("-inf")
        self._now = float("-inf")

    @property
    def ready(self) -> bool:
        """True while this peer seeks a group."""
        return self._joiner.search is not None

    @property
    def gathering(self) -> Gathering | None:
        """See `Matchmaker.gathering`."""
        return self._joiner.gathering(self._now)

    @property
    def shortage(self) -> str:
        """See `Matchmaker.shortage`."""
        return self._joiner.shortage(self._now) or self.reason

    def draw(self, state: StateId, now: float) -> Drawn:
        """See `Matchmaker.draw`."""
        return self._joiner.draw(state, now)

    def _take(self, event: events.Event, now: float) -> None:
        self._now = now
        match event:
            case events.BecameReady():
                self._joiner.begin(event, now)
                self._exchanging = None
            case events.Withdrew():
                self._joiner.gives_up(now)
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
            case events.RoundEnded(round, ok):
                if ok:
                    self._coordinator.note_success(round)
                if self._exchanging is not None and self._exchanging.round == round:
                    self._exchanging = None
                    self.reason = f"round {round} is over"
            case events.MeanHeld(outcome) if outcome.givers:
                # A member that attends has told that it gives nothing, so nobody waited for it.
                attend = set(outcome.group).difference(outcome.givers)
                drawn = tuple(peer for peer in outcome.drawn if peer not in attend)
                self._policy.ended(wire.Standing(outcome.before, drawn, outcome.givers), failed=False)

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
                self.context.send(peer, self.context.whereabouts())
                self._joiner.invited(peer, message, now)
            case wire.Whereabouts():
                self._coordinator.remind(peer, message.round)
                self._membership.hear_place(peer, message.placed)
                if self.context.next_round.within_reach(message.round, now):
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
        self.context.learn(message)
        self._coordinator.remember(message, now, now)
        self._begin_round(message)

    def _begin_round(self, formed: wire.GroupFormed) -> None:
        manifest = formed.manifest
        self._joiner.end(formed_by=manifest.coordinator)
        self.context.next_round.advance(manifest)
        self._exchanging = manifest
        self.reason = f"round {manifest.round} with {len(manifest.members)} members: {formed.reason}"
        self.context.out.append(events.Form(manifest, self.reason, formed.last, formed.waited))

    def _settle(self, now: float) -> None:
        self._joiner.settle(now)
        self._coordinator.note_own(self._joiner.state.coordinator, not self._joiner.anywhere)
        own = self._coordinator.settle(now)
        if own is not None:
            self._begin_round(own)
        elif self._coordinator.has_closed(self.context.round):
            self._joiner.settle(now)  # The group is full without this peer's own join.
        self._coordinator.note_own(self._joiner.state.coordinator, not self._joiner.anywhere)
        self._coordinator.end_rounds_gone(now)
        if self._coordinator.speak(now):
            self._joiner.alone(now)
        if self.ready:
            self.reason = self._joiner.describe(now)
        self.deadline = min(self._announce(now), self._joiner.deadline, self._coordinator.deadline(now))

    def _announce(self, now: float) -> float:
        """Announce a change of state, but not too often; returns when to try again."""
        stands = self.ready, self.context.round
        if stands != self._announced and now >= self._announced_at + ANNOUNCE_PERIOD:
            self._announced, self._announced_at = stands, now
            self.context.out.append(events.Announce(*stands))
        return float("inf") if stands == self._announced else self._announced_at + ANNOUNCE_PERIOD
