"""A round's encoded mean, kept for peers that missed the round, and the proof that it is the group's.

An image of a mean is the length of the manifest (u32, big-endian), the manifest in msgpack, the contributors (a
bitmask, u64, little-endian) and the encoded parts one after another. The lengths of the parts follow from the manifest
and the run's spec alone, as in the round. The mean's digest is over the manifest's hash, the contributors and the
digests of all parts: so it proves every byte of the image.

Votes travel beside the image. A mean is a round's result once more than half of the round's members have signed that
they hold it (`allreduce.vote_signatures`). The votes do not prove that the round was the group's: anybody can make up
identities that join, vote and sign. So this peer must have begun the round itself from the state that it holds, or more
than half of its `Circle`, the peers that vouch for that state, must have signed. Otherwise the peer refuses the mean
and takes a snapshot.

Two attacks remain. Liars that are more than half of a circle could also have outvoted the others in the round, or the
poll, from which the circle comes. And if the whole group goes back to an old checkpoint, its state has two successors,
and votes for the first remain valid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
from blake3 import blake3

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.part_table import mean_digest
from equipoise.averaging.allreduce.paxos import Vote, is_majority, members_of
from equipoise.averaging.allreduce.vote_signatures import signers
from equipoise.averaging.manifest import Manifest, Verify
from equipoise.averaging.ports import FrameRefused, parser
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.answers import counted

MAX_MANIFEST_BYTES = 256 * 1024
"""Most bytes of a manifest: 64 joins, each a credential of 1 KiB, a signature of 512 bytes, and some hundred bytes."""

MASK_BYTES = 8
"""Bytes of the contributors' mask: a group has up to 64 members."""

Prove = Callable[[], wire.Commit]
"""Returns all votes of a kept mean's round that are known by now, each with its signature."""

MAX_ROUNDS = 8
"""Most rounds from one state whose ids a circle keeps."""

_LENGTH = struct.Struct(">I")

_manifest = parser(Manifest, "a manifest")


class MeanError(ValueError):
    """These bytes are no mean of this run, or not proved to be the group's; the message says why."""


@dataclass(frozen=True, slots=True)
class EncodedMean:
    """The mean of one round.

    Attributes:
        manifest: The round's group.
        contributors: Bitmask of the members that are in the mean.
        parts: The parts, encoded by the run's codec, in order.
    """

    manifest: Manifest
    contributors: int
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(len(part) for part in self.parts)

    def image(self) -> bytearray:
        """The image, the same at every member. It is copied part by part, so that other threads have their turn."""
        manifest = msgspec.msgpack.encode(self.manifest)
        mask = self.contributors.to_bytes(MASK_BYTES, "little")
        image = bytearray(_LENGTH.pack(len(manifest)) + manifest + mask)
        for part in self.parts:
            image += part
        return image

    def digest(self) -> bytes:
        """The mean's digest, as in the round's votes."""
        digests = (blake3(part).digest() for part in self.parts)
        return mean_digest(self.manifest.id, self.contributors, digests)


def read_head(image: memoryview) -> tuple[Manifest, int, memoryview]:
    """The manifest, not checked, the contributors, and the encoded parts that follow.

    Raises:
        MeanError: The image does not begin with a manifest and contributors.
    """
    if len(image) < _LENGTH.size:
        raise MeanError(f"expected a mean, got {len(image)} bytes")
    (length,) = _LENGTH.unpack_from(image)
    begins = _LENGTH.size + length
    if length > MAX_MANIFEST_BYTES or begins + MASK_BYTES > len(image):
        raise MeanError(f"expected a manifest and a mean, got a length of {length} in {len(image)} bytes")
    try:
        manifest: Manifest = _manifest(image[_LENGTH.size : begins])
    except FrameRefused as error:
        raise MeanError(str(error)) from error
    contributors = int.from_bytes(image[begins : begins + MASK_BYTES], "little")
    members = manifest.members
    if not contributors or contributors >> len(members):
        raise MeanError(f"expected contributors among {len(members)} members, got {contributors:b}")
    return manifest, contributors, image[begins + MASK_BYTES :]


def cut(payload: memoryview, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Cut the payload into parts of these sizes.

    Raises:
        MeanError: The sizes do not add up to the payload's.
    """
    if len(payload) != sum(sizes):
        raise MeanError(f"expected {sum(sizes)} bytes of encoded values, got {len(payload)}")
    return tuple(payload[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Circle:
    """The peers that vouch for the state that this peer holds.

    Attributes:
        state: That state; None if no peer vouches for it.
        peers: PeerIDs, without this peer's: peers that held the state in a round too, or were polled for its snapshot.
        rounds: Ids of the last rounds that this peer began from it.
        left: Whether a mean has been applied to the state since. Then the circle vouches for the state of the next
            epoch, whose lineage only the trainer knows. No peer joins the circle on the way, so no liar gains by it.
            If too many peers of a circle have left, this peer refuses the means that follow.
    """

    state: StateId | None = None
    peers: frozenset[str] = frozenset()
    rounds: tuple[bytes, ...] = ()
    left: bool = False

    def begun(self, manifest: Manifest, own: str) -> Circle:
        """The circle after this peer has begun a round; unchanged if this peer states no state in the round."""
        held = manifest.states.get(own)
        if held is None:
            return self
        peers, rounds = (self.peers, self.rounds) if self.knows(held) else (frozenset[str](), ())
        # A round that failed may have had few members: it removes no peer from the circle.
        peers = peers or _agreed(manifest, held, own)
        return Circle(held, peers, (*rounds, manifest.id)[-MAX_ROUNDS:])

    def ended(self, before: StateId, manifest: Manifest, own: str) -> Circle:
        """The circle after a round that this peer began from `before` has succeeded."""
        if before != self.state or manifest.id not in self.rounds:
            return self
        return replace(self, peers=_agreed(manifest, before, own) or self.peers, left=True)

    @classmethod
    def attended(cls, before: StateId, manifest: Manifest, own: str) -> Circle:
        """The circle of the peers that held `before` in a round, which this peer attended from another state.

        They vouch for the next state once the trainer holds it: it has then taken the state from them.
        """
        return cls(before, _agreed(manifest, before, own), left=True)

    def followed(self, before: StateId) -> Circle:
        """The circle after this peer has fetched and believed the mean that the group applied to `before`."""
        return replace(self, state=before, left=True)

    def knows(self, state: StateId) -> bool:
        """True if this circle vouches for `state`."""
        if self.state is None:
            return False
        return state == self.state or (self.left and state.epoch == self.state.epoch + 1)

    def check(self, manifest: Manifest, after: StateId, voters: frozenset[str]) -> None:
        """Require that a round from the state `after` was the group's; the votes of `voters` for its mean are proved.

        Raises:
            MeanError: It may be a round of strangers.
        """
        known, rounds = (self.peers, self.rounds) if self.knows(after) else (frozenset[str](), ())
        voted = len(voters & known)
        if manifest.id in rounds or 2 * voted > len(known):
            return
        whose = f"the {counted(len(known))} from which this peer has its state, {voted} of them voted"
        raise MeanError(f"expected votes of more than half of {whose}")


def _agreed(manifest: Manifest, held: StateId, own: str) -> frozenset[str]:
    """The members but `own` that hold the state `held`, if most do; as in `group_state`, newcomers do not count."""
    states = manifest.states
    alike = frozenset(peer for peer, state in states.items() if state == held)
    known = sum(state == held or state.epoch > 0 for state in states.values())
    return alike - {own} if 2 * len(alike) > known else frozenset()


def voters(
    manifest: Manifest, contributors: int, digest: bytes, proofs: Iterable[wire.Commit], verify: Verify
) -> frozenset[str]:
    """PeerIDs of the members whose votes prove a mean as their round's result: more than half of all members.

    Args:
        manifest: The round's manifest, checked.
        contributors: Bitmask of the members that are in the mean.
        digest: The mean's digest.
        proofs: The proofs that donors gave; each may be made up.
        verify: Checks signatures.

    Raises:
        MeanError: No vote for that mean has the signatures of more than half.
    """
    cast: dict[Vote, int] = {}
    for proof in proofs:
        if (proof.decision.contributors, proof.digest) == (contributors, digest):
            vote = Vote(proof.ballot, proof.decision, proof.digest)
            cast[vote] = cast.get(vote, 0) | signers(manifest.id, manifest.peers, proof, verify)
    size = len(manifest.members)
    # Two ballots of a round may decide the same; the votes of one ballot do not count in the other.
    won = [signed for signed in cast.values() if is_majority(signed, size)]
    if not won:
        most = max((signed.bit_count() for signed in cast.values()), default=0)
        raise MeanError(f"expected votes of more than half of its round's {size} members, {most} signed")
    return frozenset(manifest.peers[member] for signed in won for member in members_of(signed))
