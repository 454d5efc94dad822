"""Pairing: the machine that forms pairs, of one peer in one run.

A free peer proposes to a random live partner, with its signed join, and to one at a time. A free partner puts the
manifest of the pair together, begins the round, and sends it. Any other declines at once, and says after how long to
ask it again. Two peers that propose to each other make one pair: the one with the smaller PeerID puts it together.

A peer that was declined listens for a while before it asks again: it is then free for those that ask it. If all free
peers kept asking, none would be free to be asked.

A peer begins at most one exchange each time that it becomes ready, whatever comes later. So it is never in two. A
partner whose manifest comes too late is told so: its round fails at once, and has changed nothing.

Each peer numbers its own exchanges; a pair's round has the number of the peer that proposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from equipoise.averaging.manifest import Join, Manifest, ManifestError, shortfall
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.matchmaking.membership import DIAL_SECONDS
from equipoise.averaging.options import TOPOLOGIES
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.timing import SILENT_SECONDS


def partners(topology: str, peers: Iterable[str], me: str) -> tuple[str, ...]:
    """Return the peers from which `me` draws, evenly.

    Two peers exchange both ways, so every topology is symmetric. With `random` an exchange contracts the error as a
    random matching does (Boyd et al. 2006, "Randomized gossip algorithms"). `exponential` is the static exponential
    graph (Ying et al. 2021, arXiv:2110.13363), with its edges used both ways. `ring` is for tests: it mixes slowly.

    Args:
        topology: One of `options.TOPOLOGIES`.
        peers: PeerIDs of the run, in any order; with or without `me`.
        me: This peer.

    Returns:
        PeerIDs, each once, sorted. Peers that know the same others agree: of two peers each is among the
        other's partners, or neither is.

    Raises:
        ValueError: The topology is not known.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"expected a topology of {', '.join(TOPOLOGIES)}, got {topology!r}")
    row = sorted({*peers, me})
    place, count = row.index(me), len(row)
    steps = {
        "random": list(range(1, count)),
        "exponential": [2**power for power in range((count - 1).bit_length())],
        "ring": [1],
    }[topology]
    found = {row[(place + sign * step) % count] for step in steps for sign in (1, -1)}
    return tuple(sorted(found - {me}))


PAIR = 2

BUSY_SECONDS = 0.1
"""Time after which a peer that is not free may be asked again; the others are asked meanwhile."""

LISTEN_SECONDS, MAX_LISTEN_SECONDS = 0.05, 1.0
"""Least and most time that a declined peer listens, on average, before it asks again: twice as long each time. An
answer from another continent takes a third of a second."""

REFUSED_SECONDS = 30.0
"""Time for which a peer is not asked that refused for a reason which does not pass: another version, another spec."""


class Pairing(Matchmaker):
    """One peer's pairs in one run. Times are seconds of one monotonic clock.

    Args:
        context: Where the peer stands in the run.
        topology: One of `options.TOPOLOGIES`.
        chance: Draws partners and waits.
    """

    def __init__(self, context: Context, topology: str, chance: Random) -> None:
        super().__init__(context)
        self._topology = topology
        self._chance = chance
        self._wants: events.BecameReady | None = None
        self._own: Join | None = None
        self._asked: str | None = None
        self._answer_by = float("inf")
        self._asks_at = float("-inf")
        self._listens = LISTEN_SECONDS
        self._away: dict[str, float] = {}

    @property
    def ready(self) -> bool:
        """True if a partner is sought for this peer."""
        return self._wants is not None

    @property
    def gathering(self) -> Gathering | None:
        """See `Matchmaker.gathering`."""
        return Gathering(1, PAIR, self.reason) if self.ready else None

    def _take(self, event: events.Event, now: float) -> None:
        match event:
            case events.BecameReady():
                self._begin(event, now)
            case events.Withdrew():
                self._wants = self._asked = self._exchanging = None
                self.reason = "withdrawn"
            case events.MessageReceived(peer, message):
                self._receive(peer, message, now)
            case events.PeerLost(peer) if peer == self._asked:
                self._listen(now, 0.0)
            case events.RoundEnded(round, ok):
                if self._exchanging is not None and self._exchanging.round == round:
                    self._remember(self._exchanging, ok)
                    self._exchanging = None
                    self.reason = f"exchange {round} is over"

    def _begin(self, event: events.BecameReady, now: float) -> None:
        self._own = self.context.join(event.join)
        self._wants, self._asked, self._exchanging = event, None, None
        self._asks_at, self._listens = now, LISTEN_SECONDS

    def _receive(self, peer: str, message: object, now: float) -> None:
        match message:
            case wire.JoinRequest():
                self._proposed(peer, message, now)
            case wire.JoinRefused(ticket=ticket) if (
                peer == self._asked and self._own and ticket == self._own.ticket
            ):
                self._listen(now, message.wait or REFUSED_SECONDS)
            case wire.GroupFormed():
                self._formed(peer, message, now)

    def _remember(self, manifest: Manifest, ok: bool) -> None:
        """Note how an exchange ended: the partner of a failed one, which may never vote, is drawn last for a while."""
        partner = next(peer for peer in manifest.peers if peer != self.context.peer)
        if ok:
            self.context.deeds.absolve(partner)
        else:
            self.context.deeds.blame(partner, "an exchange with it failed")

    # ---- the partner ----

    def _proposed(self, peer: str, request: wire.JoinRequest, now: float) -> None:
        join = request.join
        blames = self.context.deeds.blames
        if blames(peer) and not all(map(blames, self._membership.others(now))):
            self.context.refuse(peer, join, "the last exchange with it failed", wait=REFUSED_SECONDS)
        elif not self._takes(peer):
            self.context.refuse(peer, join, "it is not free", wait=BUSY_SECONDS)
        elif problem := self.context.objection(peer, join, now) or self._accept(join):
            self.context.refuse(peer, join, problem)

    def _takes(self, peer: str) -> bool:
        """True if this peer is free for another: it proposes to nobody else, and of two that cross its own counts."""
        crossing = self._asked == peer and self.context.peer < peer
        return self.ready and (self._asked is None or crossing)

    def _accept(self, join: Join) -> str:
        """Begin an exchange; returns why that is not possible, or an empty string."""
        context = self.context
        assert self._wants is not None, "it takes the join"
        manifest = Manifest.of(context.peer, [join, context.join(self._wants.join, join.round)])
        if problem := shortfall(manifest.members, context.needs):
            return problem
        context.send(join.peer, wire.GroupFormed(context.run, manifest, 0.0))
        self._exchange(manifest, join.peer)
        return ""

    # ---- the peer that proposes ----

    def _formed(self, peer: str, message: wire.GroupFormed, now: float) -> None:
        context, manifest = self.context, message.manifest
        try:
            if self._own is None or not self.ready:
                raise ManifestError("this peer seeks no partner any more")
            spec, needs, role = context.spec, context.needs, context.role
            manifest.check(context.verify, spec=spec, needs=needs, own=self._own, role=role)
        except ManifestError as error:
            context.out.append(events.Decline(peer, manifest.id))
            self.reason = f"{peer} sent a manifest that is not valid: {error}"
            if peer == self._asked:
                self._listen(now, REFUSED_SECONDS)
            return
        self._exchange(manifest, peer)

    def _listen(self, now: float, away: float) -> None:
        """The peer that was asked does not answer, or not before so many seconds have passed."""
        assert self._asked is not None, "it was asked"
        self._away[self._asked] = now + away
        self.reason = f"{self._asked} is not free for an exchange"
        self._asked = None
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._asks_at = now + self._listens * self._chance.uniform(0.5, 1.5)
        self._listens = min(2 * self._listens, MAX_LISTEN_SECONDS)

    def _propose(self, now: float) -> None:
        context, membership = self.context, self._membership
        assert self._own is not None, "it is ready"
        self._away = {peer: until for peer, until in self._away.items() if until > now}
        near = partners(self._topology, membership.others(now), context.peer)
        if not self._own.dialable:
            near = tuple(membership.dialable_others(near, now))
        free = [peer for peer in near if peer not in self._away]
        if not free:
            self.reason = f"all {len(near)} partners are busy" if near else "no partner is known"
            self._pause(now)
            return
        self._asked = self._chance.choice([peer for peer in free if not context.deeds.blames(peer)] or free)
        self.reason = f"{self._asked} was asked for an exchange"
        self._answer_by = now + DIAL_SECONDS + SILENT_SECONDS
        membership.ask(self._asked, now)
        context.send(self._asked, wire.JoinRequest(context.run, self._own))

    # ---- both ----

    def _exchange(self, manifest: Manifest, partner: str) -> None:
        self._wants = self._own = self._asked = None
        self._exchanging = manifest
        self.context.next_round.number += 1
        self._membership.shared(manifest.peers)
        self.reason = f"exchange {manifest.round} with {partner}"
        self.context.out.append(events.Form(manifest, self.reason))

    def _settle(self, now: float) -> None:
        membership = self._membership
        membership.lose_silent(now)
        if self._asked is not None and (now >= self._answer_by or not membership.alive(self._asked, now)):
            self._listen(now, REFUSED_SECONDS)
        if self.ready and self._asked is None and now >= self._asks_at:
            self._propose(now)
        own = self._answer_by if self._asked is not None else self._asks_at if self.ready else float("inf")
        self.deadline = min(membership.silent_at, own)
