"""The proof that a mean is the group's: the votes that come with it, from whatever donor.

A round has come to a mean once more than half of its members have signed that they hold it
(`allreduce.vote_signatures`). That proves what the round came to, and not that the round was the group's: anybody can
make up identities that join, vote and sign. So it must be a round that this peer began itself from the state that it
holds, or more than half of its `Circle` must have signed: of those by whom it knows that state. What is not sure is
refused, and a snapshot taken.

What this does not keep out: liars who are more than half of a circle, for they could as well have outvoted the others
in the round, or the poll, that it comes from. And means that the whole group went back behind: where all load an old
checkpoint together, its state has two successors, and votes for the first remain true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.paxos import Vote, is_majority, members_of
from equipoise.averaging.allreduce.vote_signatures import signers
from equipoise.averaging.manifest import Manifest, Verify
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.answers import counted
from equipoise.averaging.statesync.update import MeanError

Prove = Callable[[], wire.Commit]
"""Says which votes of a kept mean's round are known by now, each with its signature."""

MAX_ROUNDS = 8
"""Most rounds from one state of which a circle knows the ids: each took its group a while."""


@dataclass(frozen=True, slots=True)
class Circle:
    """The peers by which a peer knows the state that it holds.

    Attributes:
        state: That state; None if it knows it by nobody.
        peers: PeerIDs, without its own: who said in a round that they hold it too, or were polled for a snapshot of it.
        rounds: Ids of the last rounds that this peer began from it.
        left: Whether a mean has been applied to it since: then the circle is of the state of the next epoch, whose
            lineage only the trainer knows. Nobody is added on the way, so that no liar gains by it; where too many of
            a circle have left, the means after them are refused.
    """

    state: StateId | None = None
    peers: frozenset[str] = frozenset()
    rounds: tuple[bytes, ...] = ()
    left: bool = False

    def begun(self, manifest: Manifest, own: str) -> Circle:
        """After this peer has begun a round; one in which it says no state tells nothing of any."""
        held = manifest.states.get(own)
        if held is None:
            return self
        peers, rounds = (self.peers, self.rounds) if self.knows(held) else (frozenset[str](), ())
        # A round that did not come to be may have been of few: it takes nobody away.
        peers = peers or _agreed(manifest, held, own)
        return Circle(held, peers, (*rounds, manifest.id)[-MAX_ROUNDS:])

    def ended(self, before: StateId, manifest: Manifest, own: str) -> Circle:
        """After a round that this peer began has come to a mean, which leads on from `before`."""
        if before != self.state or manifest.id not in self.rounds:
            return self
        return replace(self, peers=_agreed(manifest, before, own) or self.peers, left=True)

    @classmethod
    def attended(cls, before: StateId, manifest: Manifest, own: str) -> Circle:
        """Of the peers that held `before` in a round that led on from there, which this peer attended from elsewhere.

        They vouch for what comes next once the trainer stands there: it has then taken their word for the state.
        """
        return cls(before, _agreed(manifest, before, own), left=True)

    def followed(self, before: StateId) -> Circle:
        """After this peer has got the mean that led on from `before`, and believed it."""
        return replace(self, state=before, left=True)

    def knows(self, state: StateId) -> bool:
        """True if it tells what came after `state`."""
        if self.state is None:
            return False
        return state == self.state or (self.left and state.epoch == self.state.epoch + 1)

    def check(self, manifest: Manifest, after: StateId, voters: frozenset[str]) -> None:
        """Require that a round from the state `after` was the group's, given whose votes for its mean are proved.

        Raises:
            MeanError: It may be a round of strangers.
        """
        known, rounds = (self.peers, self.rounds) if self.knows(after) else (frozenset[str](), ())
        voted = len(voters & known)
        if manifest.id in rounds or 2 * voted > len(known):
            return
        whose = f"the {counted(len(known))} by whom this one knows its state, {voted} of them voted"
        raise MeanError(f"expected votes of more than half of {whose}")


def _agreed(manifest: Manifest, held: StateId, own: str) -> frozenset[str]:
    """The members but `own` that hold the state `held`, if most do; as in `group_state`, newcomers have no say."""
    states = manifest.states
    alike = frozenset(peer for peer, state in states.items() if state == held)
    known = sum(state == held or state.epoch > 0 for state in states.values())
    return alike - {own} if 2 * len(alike) > known else frozenset()


def voters(
    manifest: Manifest, contributors: int, digest: bytes, proofs: Iterable[wire.Commit], verify: Verify
) -> frozenset[str]:
    """PeerIDs of those whose votes prove that a round came to a mean: more than half of its members.

    Args:
        manifest: The round's, checked.
        contributors: Bitmask of the members that are in the mean.
        digest: The mean's.
        proofs: What was given to prove it; each may be made up.
        verify: Checks signatures.

    Raises:
        MeanError: No vote for that mean is signed by so many.
    """
    cast: dict[Vote, int] = {}
    for proof in proofs:
        if (proof.decision.contributors, proof.digest) == (contributors, digest):
            vote = Vote(proof.ballot, proof.decision, proof.digest)
            cast[vote] = cast.get(vote, 0) | signers(manifest.id, manifest.peers, proof, verify)
    size = len(manifest.members)
    # A round may decide the same in two ballots; votes of one do not add to another's.
    won = [signed for signed in cast.values() if is_majority(signed, size)]
    if not won:
        most = max((signed.bit_count() for signed in cast.values()), default=0)
        raise MeanError(f"expected votes of more than half of its round's {size} members, {most} signed")
    return frozenset(manifest.peers[member] for signed in won for member in members_of(signed))
