"""Whether a mean is the group's, told by the votes that come with it, whoever gives it.

A round has come to a mean once more than half of its members have signed that they hold it (`allreduce.notary`). That
proves what the round came to, and not that the round was the group's: anybody can make up identities that join, vote
and sign. So it must be a round that this peer was in itself, or more than half of its `Circle` must have signed: of
those by whom it knows the state that it holds. Liars who are that many could as well have lied in that round, or have
given it another state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.ballot import Vote, is_majority, members_of
from equipoise.averaging.allreduce.notary import signers
from equipoise.averaging.manifest import Manifest, Verify
from equipoise.averaging.state import group_state
from equipoise.averaging.transfer.answers import counted

Prove = Callable[[], wire.Commit]
"""Says which votes of a kept mean's round are known by now, each with its signature."""


class VotesError(ValueError):
    """The votes that came with a mean do not prove it; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Circle:
    """By whom a peer knows the state that it holds.

    Attributes:
        peers: PeerIDs, without its own: who held the group's state in the last round that it was in, or gave it a
            snapshot. Newcomers to a round are none of them: they do not know the state themselves.
        round: Id of that round; empty if it was none.
    """

    peers: frozenset[str] = frozenset()
    round: bytes = b""

    @classmethod
    def of(cls, manifest: Manifest, own: str) -> Circle:
        """As one knows it who was in that round, or knows that it was the group's."""
        states = {join.peer: join.state for join in manifest.members if join.state is not None}
        before = group_state(states.values())
        return cls(
            frozenset(peer for peer, one in states.items() if one == before and peer != own), manifest.id
        )

    def check(self, manifest: Manifest, voters: frozenset[str]) -> None:
        """Require that a round was the group's, given whose votes for its mean are proved.

        Raises:
            VotesError: It may be a round of strangers.
        """
        voted, known = len(voters & self.peers), len(self.peers)
        if manifest.id == self.round or 2 * voted > known:
            return
        whose = f"the {counted(known)} by whom this one knows its state, {voted} of them voted"
        raise VotesError(f"expected votes of more than half of {whose}")


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
        VotesError: No vote for that mean is signed by so many.
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
        raise VotesError(f"expected votes of more than half of its round's {size} members, {most} signed")
    return frozenset(manifest.peers[member] for signed in won for member in members_of(signed))


def without_forged(proof: wire.Commit, manifest: Manifest, verify: Verify) -> wire.Commit:
    """A proof without the signatures that prove nothing, which liars in the round may have given with their votes.

    Raises:
        VotesError: What is left is no majority.
    """
    holders = signers(manifest.id, manifest.peers, proof, verify)
    if not is_majority(holders, len(manifest.members)):
        left = f"{holders.bit_count()} of {len(manifest.members)}"
        raise VotesError(f"expected votes of more than half of its round's members, {left} are signed")
    signed = tuple(one for one in proof.signatures if holders >> one[0] & 1)
    return wire.Commit(proof.ballot, proof.decision, proof.digest, holders, signed)
