"""Forming groups: the machine of one peer in one run.

A ready peer signs a join and sends it straight to the convener of its planned group, which every peer computes alike
from what it knows of the run; the directory is read ahead, and is in nobody's way. The last one to ask makes the group
close at once: from then it is one message each way. The convener closes when all that are worth waiting for are in, or
when waiting longer is not worth it. Where views of the run differ, joins are redirected; where a convener dies, the
next in the same order is asked; where a round is over, the late are told and come to the next. Whatever happens, a peer
begins at most one round each time that it became ready.
"""

from __future__ import annotations

from equipoise.averaging.allowance import Allowance
from equipoise.averaging.manifest import Manifest, ManifestError
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking.convening import Convening
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.matchmaking.messages import (
    GroupFormed,
    Invitation,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    Whereabouts,
)
from equipoise.averaging.matchmaking.seeking import Seeking
from equipoise.averaging.matchmaking.standing import Standing
from equipoise.averaging.outcome import Exchanging, Gathering, Idle, NoPeers, RunState

LOOK_OFTEN = 1.0
"""Seconds between looks at the directory while a group is gathered: that is how long views of the run may differ."""

LOOK_SELDOM = 5.0
"""Seconds between looks otherwise: a warm view is what makes a group form in one message each way."""

SETTLING_SECONDS = 10.0
"""A view that has just changed is about to change again: daemons are started together."""

LOOK_FOR_STRANGERS = 0.25
"""Seconds between looks while joins have come from peers that the last view did not show: the view is behind."""

NOTICE_SECONDS, MAX_NOTICES = 1.0, 4
"""Groups of others that are looked at in so long a time, one of each peer: up to 64 signatures each, a twentieth of a
core in all. A convener sends one for each round that went on without a peer; the directory tells the same later."""

ANNOUNCE_PERIOD = 1.0
"""Seconds between announcements: a store costs 20 ms on two cores, and rounds may be faster than that."""


class Matchmaking(Matchmaker):
    """One peer's matchmaking in one run, for as long as it has joined the run.

    It is told events and returns what to do; `deadline` says by when it must be told `Woke`. It takes part in groups,
    and convenes them whether or not it is ready itself. Times are seconds of one monotonic clock.
    """

    def __init__(self, standing: Standing) -> None:
        super().__init__(standing)
        self._convening = Convening(standing)
        self._seeking = Seeking(standing, self._convening)
        self._notices = Allowance(NOTICE_SECONDS, MAX_NOTICES)
        self._doubtful = Allowance(NOTICE_SECONDS, MAX_NOTICES)
        self._announced: tuple[bool, int] | None = None
        self._announced_at = float("-inf")
        self._look_at = float("-inf")
        self._looked_at = float("-inf")
        self._now = float("-inf")

    @property
    def ready(self) -> bool:
        """Whether a group is sought for this peer."""
        return self._seeking.ready

    @property
    def state(self) -> RunState:
        """Where the next round stands."""
        standing, roster = self._standing, self._standing.roster
        others = roster.count
        if self._exchanging is not None:
            return Exchanging(len(self._exchanging.members), self._exchanging.round)
        if not others:
            return NoPeers(self._why_nobody())
        if not self._seeking.ready:
            return Idle(others)
        ready, target = self._seeking.count
        if self._seeking.convener == standing.peer:
            ready, target = self._convening.count(standing.round, self._now)
        return Gathering(max(ready, 1), max(target, ready, 2), self._reason)

    def _take(self, event: events.Event, now: float) -> None:
        self._now = now
        match event:
            case events.CandidatesSeen(candidates):
                self._standing.roster.see(candidates, now)
                self._standing.meet(now)
            case events.BecameReady():
                self._seeking.begin(event, now)
                self._exchanging = None
                if now - self._standing.roster.seen_at >= LOOK_OFTEN:
                    self._look_at = now
            case events.Withdrew():
                self._seeking.end()
                # A caller may have given up in the very moment in which its group formed.
                self._exchanging = None
                self._reason = "withdrawn"
            case events.MessageReceived(peer, message):
                self._standing.roster.hear(peer, now)
                self._receive(peer, message, now)
            case events.RoundHeard(peer):
                self._standing.roster.hear(peer, now)
                self._seeking.missed(peer, now)
            case events.PeerLost(peer):
                self._convening.drop(peer)
                self._lose(peer, now)
            case events.RoundEnded(round):
                if self._exchanging is not None and self._exchanging.round == round:
                    self._exchanging = None
                    self._reason = f"round {round} is over"
            case events.Woke():
                pass

    def _lose(self, peer: str, now: float) -> None:
        """A channel that breaks says little of the peer; one that cannot be opened anew, by a word to it, says more."""
        standing = self._standing
        in_doubt = standing.roster.doubt(peer, now)
        if self._seeking.lost(peer, now):
            return
        if in_doubt:
            standing.send(peer, standing.whereabouts(asks=True))
        else:
            standing.roster.lose(peer, now)

    def _receive(self, peer: str, message: object, now: float) -> None:
        match message:
            case JoinRequest():
                self._convening.request(peer, message, now)
            case JoinAccepted():
                self._seeking.accepted(peer, message, now)
            case JoinRefused():
                self._seeking.refused(peer, message, now)
            case LeaveRequest():
                self._convening.drop(peer, message.ticket)
            case GroupFormed():
                self._take_manifest(peer, message, now)
            case Invitation():
                self._standing.send(peer, self._standing.whereabouts())
                self._seeking.invited(peer, message.round, now)
            case Whereabouts():
                if message.asks:
                    self._standing.send(peer, self._standing.whereabouts())
                self._convening.remind(peer, message.round)
                if self._standing.within_reach(message.round, now):
                    self._standing.roster.advance(peer, message.round)

    def _take_manifest(self, peer: str, message: GroupFormed, now: float) -> None:
        # A valid group with this peer's own join is one, whoever convened it: only what it costs to see is bounded.
        if self._standing.roster.shuns(peer, now) and not self._doubtful.admits(peer, now):
            return
        try:
            manifest = self._seeking.formed(message)
            if manifest is None:
                self._take_notice(peer, message, now)
                return
        except ManifestError as error:
            self._reason = f"{peer} sent a manifest that is not valid: {error}"
            self._seeking.give_up(peer, now)
            return
        self._standing.learn(message)
        self._convening.remember(message, now)
        self._begin_round(manifest, message.reason)

    def _take_notice(self, peer: str, message: GroupFormed, now: float) -> None:
        """A group has formed without this peer: it learns who is in the next round now.

        Raises:
            ManifestError: The manifest is not valid.
        """
        standing, manifest = self._standing, message.manifest
        late = manifest.round < standing.round or not standing.within_reach(manifest.round, now)
        if late or standing.peer in manifest.peers or not standing.roster.knows(peer):
            return
        if not self._notices.admits(peer, now):
            return
        standing.check(manifest, None)
        standing.learn_members(manifest)
        standing.roster.miss({standing.peer}.intersection(message.absent))

    def _begin_round(self, manifest: Manifest, reason: str) -> None:
        self._seeking.end(formed_by=manifest.convener)
        self._standing.advance(manifest)
        self._exchanging = manifest
        self._reason = f"round {manifest.round} with {len(manifest.members)} members: {reason}"
        self._standing.out.append(events.Form(manifest, self._reason))

    def _settle(self, now: float) -> None:
        self._seeking.settle(now)
        self._convening.note_own(self._seeking.convener, self._seeking.redirects)
        own = self._convening.settle(now)
        if own is not None:
            self._begin_round(*own)
            self._convening.note_own(None, True)
        self._convening.end_rounds_gone()
        if self._convening.speak(now):
            self._seeking.alone(now)
        if self._seeking.ready:
            convenes = self._seeking.convener == self._standing.peer
            round = self._standing.round
            self._reason = self._convening.describe(round, now) if convenes else self._seeking.reason
        self._announce(now)
        self._look(now)
        self._deadline = min(
            self._seeking.deadline(),
            self._convening.deadline(now),
            self._look_at,
            self._announced_at + ANNOUNCE_PERIOD if self._to_announce() else float("inf"),
        )

    def _to_announce(self) -> bool:
        return self._announced != (self._seeking.ready, self._standing.round)

    def _announce(self, now: float) -> None:
        if self._to_announce() and now >= self._announced_at + ANNOUNCE_PERIOD:
            self._announced = (self._seeking.ready, self._standing.round)
            self._announced_at = now
            self._standing.out.append(events.Announce(*self._announced, self._reason))

    def _look(self, now: float) -> None:
        roster = self._standing.roster
        settling = not roster.count or now - roster.changed_at < SETTLING_SECONDS
        busy = settling or self._seeking.ready or self._convening.gathering
        if self._convening.has_strangers(now):
            self._look_at = min(self._look_at, self._looked_at + LOOK_FOR_STRANGERS)
        if busy:
            self._look_at = min(self._look_at, now + LOOK_OFTEN)
        if now >= self._look_at:
            self._look_at = now + (LOOK_OFTEN if busy else LOOK_SELDOM)
            self._looked_at = now
            self._standing.out.append(events.LookUp(self._reason))

    def _why_nobody(self) -> str:
        strangers = self._standing.roster.strangers
        if strangers:
            return f"{strangers} peers of this name have another spec: schema or options of the run differ"
        if self._standing.roster.known:
            return "no other peer of this run has answered"
        return "no other peer of this run is known"
