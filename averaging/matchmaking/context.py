"""Where a peer stands in a run: what both sides of its matchmaking, asking and convening, know and write to."""

from __future__ import annotations

from dataclasses import dataclass, field

from equipoise.averaging.manifest import MAX_ROUND, Join, Manifest, Sign, Verify
from equipoise.averaging.matchmaking.events import Action, BecameReady, Send
from equipoise.averaging.matchmaking.lateness import Lateness
from equipoise.averaging.matchmaking.membership import LEAP, MAX_JUMP, Membership
from equipoise.averaging.matchmaking.messages import GroupFormed, MatchmakingMessage, Whereabouts


@dataclass(slots=True)
class Context:
    """One peer in one run.

    Attributes:
        run: Name of the run.
        spec: Hash of its RunSpec.
        peer: This peer's PeerID.
        group_size: Most peers in a group.
        sign: Signs with this peer's identity key.
        verify: Checks another peer's signature.
        quorum: Fewest contributors of a mean.
        membership: The others.
        lateness: How late they are.
        round: Number of this peer's next round.
        floor: The lowest number that may still be: one beyond the last round that formed with this peer.
        out: Actions of the event that is being handled.
    """

    run: str
    spec: str
    peer: str
    group_size: int
    sign: Sign
    verify: Verify
    quorum: int = 2
    membership: Membership = field(init=False)
    lateness: Lateness = field(default_factory=Lateness)
    round: int = 0
    floor: int = 0
    out: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.membership = Membership(self.peer, self.spec, self.group_size)

    def send(self, peer: str, message: MatchmakingMessage) -> None:
        """Ask for a message to be sent."""
        self.out.append(Send(peer, message))

    def whereabouts(self, asks: bool = False) -> Whereabouts:
        """Where this peer is; `asks` to be told the same."""
        return Whereabouts(self.run, self.round, asks)

    def join(self, ready: BecameReady, round: int | None = None) -> Join:
        """This peer's signed join of its next round, or of the one with this number."""
        return Join.create(
            self.sign,
            peer=self.peer,
            spec=self.spec,
            round=self.round if round is None else round,
            weight=ready.weight,
            bandwidth=ready.bandwidth,
            credential=ready.credential,
            dialable=ready.dialable,
            nonce=ready.nonce,
            state=ready.state,
        )

    def check(self, manifest: Manifest, own: Join | None) -> None:
        """Refuse a manifest of this run that this peer must not act on; `own` must be in it, unless it is None.

        Raises:
            ManifestError: Naming the first thing that is wrong.
        """
        manifest.check(self.verify, spec=self.spec, group_size=self.group_size, own=own, quorum=self.quorum)

    def meet(self, now: float) -> None:
        """Ask those of whom only a record is known whether they are there."""
        for peer in self.membership.to_ask(now):
            self.membership.ask(peer, now)
            self.send(peer, self.whereabouts(asks=True))

    def believed_round(self, now: float) -> int | None:
        """The round of the others, as far as this peer follows them at a time; None if nobody is there."""
        believed = self.membership.believed_round(now)
        if believed is None:
            return None
        # One that has had no round yet has nothing to lose by a jump.
        return min(believed, max(self.round + LEAP, MAX_JUMP if self.floor == 0 else 0))

    def within_reach(self, round: int, now: float) -> bool:
        """Whether one peer's word is enough for a round of this number."""
        return round <= min(max(self.round, self.believed_round(now) or 0) + LEAP, MAX_ROUND - 1)

    def learn(self, formed: GroupFormed) -> None:
        """Take from a checked manifest which peers are beyond its round, and how late they were."""
        self.lateness.learn(formed.lateness)
        self.learn_members(formed.manifest)
        planned = set(self.membership.group(self.peer, formed.manifest.round))
        self.membership.miss(planned.intersection(formed.absent))

    def learn_members(self, manifest: Manifest) -> None:
        """Take from a checked manifest that its members are beyond its round."""
        for peer in manifest.peers:
            self.membership.welcome(peer, manifest.round + 1)
            self.membership.note_ready(peer, False)

    def advance(self, manifest: Manifest) -> None:
        """This peer takes part in a round: its next is a later one."""
        self.membership.shared(manifest.peers)
        self.floor = manifest.round + 1
        self.round = max(self.round, self.floor)
