"""The standing of a peer in a run: the knowledge and the refusals that joining and coordinating share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from equipoise.averaging.deeds import Deeds, suspected
from equipoise.averaging.manifest import Join, RoleOf, Sign, Verify
from equipoise.averaging.matchmaking import messages as wire
from equipoise.averaging.matchmaking.events import Action, Send
from equipoise.averaging.matchmaking.group_builder import StragglerWait
from equipoise.averaging.matchmaking.membership import Membership
from equipoise.averaging.matchmaking.next_round import NextRound
from equipoise.averaging.options import Needs
from equipoise.averaging.outcome import Outcome
from equipoise.limits import Allowance

JOINS_SECONDS, MAX_JOINS, MAX_JOINS_OF_ONE = 1.0, 2000, 100
"""Time, and most joins checked within it, in all and of one peer: each signature costs 0.15 ms. A run has at most some
tens of rounds a second, and each takes a join or two of a member."""


@dataclass(slots=True)
class Context:
    """One peer in one run.

    Attributes:
        run: Name of the run.
        spec: Hash of its RunSpec.
        peer: This peer's PeerID.
        needs: The needs of a group.
        sign: Signs with this peer's identity key.
        verify: Checks another peer's signature.
        role: The role of each peer.
        membership: This peer's knowledge of the others.
        straggler_wait: The time for which to wait for late peers.
        next_round: The number of this peer's next round.
        out: Actions of the current event.
        deeds: The peers that this one blames.
    """

    run: str
    spec: str
    peer: str
    needs: Needs
    sign: Sign
    verify: Verify
    role: RoleOf = field(default=lambda peer: "trainer")
    membership: Membership = field(init=False)
    straggler_wait: StragglerWait = field(default_factory=StragglerWait)
    next_round: NextRound = field(init=False)
    out: list[Action] = field(default_factory=list)
    deeds: Deeds = field(default_factory=Deeds)
    _looked_at: Allowance = field(
        default_factory=lambda: Allowance(JOINS_SECONDS, MAX_JOINS, MAX_JOINS_OF_ONE)
    )

    def __post_init__(self) -> None:
        self.membership = Membership(self.peer, self.spec, self.needs.group_size, self.needs.places)
        self.next_round = NextRound(self.peer, self.membership)

    @property
    def round(self) -> int:
        """Number of this peer's next round."""
        return self.next_round.number

    def send(self, peer: str, message: wire.MatchmakingMessage) -> None:
        """Ask for a message to be sent."""
        self.out.append(Send(peer, message))

    def refuse(self, peer: str, join: Join, reason: str, **fields: Any) -> None:
        """Refuse a join that `peer` sent; the other arguments are those of `JoinRefused`."""
        self.send(peer, wire.JoinRefused(self.run, join.ticket, reason[: wire.MAX_DETAIL_CHARS], **fields))

    def whereabouts(self, asks: bool = False) -> wire.Whereabouts:
        """This peer's round as a message; with `asks`, the receiver answers with its own."""
        return wire.Whereabouts(self.run, self.round, asks, self.membership.placed)

    def join(self, stated: Join, round: int | None = None) -> Join:
        """This peer's statement, as its signed join of its next round, or of the round with this number."""
        number = self.round if round is None else round
        own = {"peer": self.peer, "spec": self.spec, "round": number, "suspects": self.deeds.suspects}
        return msgspec.structs.replace(stated, **own).signed(self.sign)

    def objection(self, peer: str, join: Join, now: float) -> str:
        """Return why a join on the channel of `peer` does not count; empty if `peer` signed it, and for this spec."""
        if join.spec != self.spec:
            return (
                f"expected spec {self.spec[:12]}, got {join.spec[:12]}: schema or options of the run differ"
            )
        if not self._looked_at.admits(peer, now):
            return "more joins have come than are looked at in a second"
        if join.peer != peer or not join.genuine(self.verify):
            return f"expected a join signed by {peer}"
        return join.breach(self.role(peer))

    def ask(self, peers: Iterable[str], now: float) -> None:
        """Ask peers whether they are there, and for their round."""
        for peer in peers:
            self.membership.ask(peer, now)
            self.send(peer, self.whereabouts(asks=True))

    def learn(self, formed: wire.GroupFormed) -> None:
        """Take from a checked manifest which peers are beyond its round, and how late they were."""
        self.straggler_wait.learn(formed.lateness)
        manifest = formed.manifest
        for peer in manifest.peers:
            self.membership.welcome(peer, manifest.round + 1, ready=False)
        for peer in suspected(manifest.members):  # A peer that lost the others blames them all, alone.
            self.membership.shun(peer, self.deeds.now)
        planned = set(self.membership.group(self.peer, manifest.round))
        self.membership.miss(planned.intersection(formed.absent))

    def note_mean(self, outcome: Outcome, now: float) -> None:
        """Take from a round that has changed the state which peers have the places of the next, and its number."""
        before = outcome.before
        if before is None:
            return
        held = (peer for peer in outcome.contributors if outcome.states.get(peer) == before)
        self.membership.seat(held, before.epoch + 1, own=self.peer in outcome.group)
        if self.needs.places and self.next_round.within_reach(outcome.round, now):
            self.next_round.reach(outcome.round + 1)
