"""The group of a round, the events that its machine is told, and the actions that it asks for.

Events are in the past tense, actions in the imperative. Members are indices into the manifest, sets of members
bitmasks, parts indices into the partition. Events carry no bytes of tensors. The driver keeps contributions by (part,
member) and means by part. It checks sizes and values before it reports a contribution or a mean as received.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import msgspec

from equipoise.averaging.allreduce.messages import Decision, RoundMessage
from equipoise.averaging.partition import Part
from equipoise.averaging.weights import contributing, counted_weights, shares, shrinkage


@dataclass(frozen=True)
class Group:
    """A round as all its members know it from the manifest.

    Attributes:
        round_id: Binds digests to the round.
        names: One per member, for messages that people read.
        weights: The weight that each member claims.
        dialable: Bitmask of the members that may own parts and lead.
        parts: The partition.
        first_leader: The dialable member that leads the first ballot.
        cap: Most weight of one contributor that counts, in lower medians of all contributors' weights.
        quorum: Fewest contributors of a mean.
        least: Least weight of a contributor; see `weights.contributing`.
        encoded_size: Bytes of an encoded mean; 0 if no member is slow.
        norms: The 2-norm of each member's contribution, as signed; empty if they do not matter.
        norm_cap: The largest norm that counts, in lower medians of all contributors' norms.
    """

    round_id: bytes
    names: tuple[str, ...]
    weights: tuple[float, ...]
    dialable: int
    parts: tuple[Part, ...]
    first_leader: int
    cap: float = math.inf
    quorum: int = 2
    least: float = 0.0
    encoded_size: int = 0
    norms: tuple[float, ...] = ()
    norm_cap: float = math.inf

    @cached_property
    def size(self) -> int:
        """Number of members."""
        return len(self.weights)

    @cached_property
    def everyone(self) -> int:
        """Bitmask of all members."""
        return (1 << self.size) - 1

    @cached_property
    def contributors(self) -> int:
        """Bitmask of the members that contribute; the others observe."""
        return contributing(self.weights, self.least)

    def shares(self, contributors: int) -> dict[int, float]:
        """Member -> its share of the mean over `contributors`, in member order, without those of weight 0."""
        counted = self.counted(contributors)
        of_members = zip(counted, shares(counted, self.factors), strict=True)
        return {member: share for member, (weight, share) in enumerate(of_members) if weight}

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """The factor of each member's values, at most 1, that caps its norm."""
        norms = self.norms or (math.inf,) * self.size
        return shrinkage(self.weights, norms, self.contributors, self.norm_cap)

    def counted(self, contributors: int) -> tuple[float, ...]:
        """The part of each member's weight that counts in the mean over `contributors`; 0 for the others."""
        return counted_weights(self.weights, contributors, self.cap, self.contributors)


class ContributionReceived(msgspec.Struct, frozen=True):
    """The whole, checked contribution of `sender` to `part` has arrived."""

    sender: int
    part: int


class PartReduced(msgspec.Struct, frozen=True):
    """The driver has reduced `part` over `contributors` and keeps the encoded mean, whose BLAKE3 is `digest`."""

    part: int
    contributors: int
    digest: bytes


class MeanReceived(msgspec.Struct, frozen=True):
    """A whole, checked mean of `part` over `contributors` has arrived; the driver keeps it in place of any other."""

    sender: int
    part: int
    contributors: int
    digest: bytes


class BytesReceived(msgspec.Struct, frozen=True):
    """Bytes have come in from `sender`, partial frames included; reported at most once per heartbeat."""

    sender: int
    count: int


class MessageReceived(msgspec.Struct, frozen=True):
    """A control message has arrived."""

    sender: int
    message: RoundMessage


class PeerLost(msgspec.Struct, frozen=True):
    """No channel to a member can be opened, the member is silent, or it broke the protocol.

    Messages to the member are not lost: they arrive once a channel is open. A member that is `gone` takes no further
    part: its process has ended. A `silent` one has had the time in which a broken channel is opened again.
    """

    member: int
    reason: str
    gone: bool = False
    silent: bool = False


class PeerReturned(msgspec.Struct, frozen=True):
    """A member that was lost is heard again."""

    member: int


class Withdrew(msgspec.Struct, frozen=True):
    """This member must leave the round: its user cancelled it, or its own values cannot be encoded."""

    reason: str


class Woke(msgspec.Struct, frozen=True):
    """The machine's deadline has passed."""


ValueEvent = ContributionReceived | PartReduced | MeanReceived | BytesReceived
Event = ValueEvent | MessageReceived | PeerLost | PeerReturned | Withdrew | Woke


class Send(msgspec.Struct, frozen=True):
    """Send a control message to a member."""

    to: int
    message: RoundMessage


class SendContribution(msgspec.Struct, frozen=True):
    """Encode this member's values of `part` and send them."""

    to: int
    part: int


class Reduce(msgspec.Struct, frozen=True):
    """Reduce `part` over `contributors`, in member order; answer with `PartReduced`."""

    part: int
    contributors: int


class SendMean(msgspec.Struct, frozen=True):
    """Send the kept mean of `part`, which is over `contributors`, to a member."""

    to: int
    part: int
    contributors: int


class Finish(msgspec.Struct, frozen=True):
    """The round has succeeded: the kept means, all over the decision's contributors, are the result."""

    decision: Decision
    digest: bytes


class Fail(msgspec.Struct, frozen=True):
    """The round has failed for this member; its tensors stay untouched.

    Attributes:
        reason: Why, one line.
        in_doubt: Whether this member has voted for a mean, so that the others may have finished by its vote.
    """

    reason: str
    in_doubt: bool = False


class Release(msgspec.Struct, frozen=True):
    """Nobody needs the kept contributions and means any more."""


class Close(msgspec.Struct, frozen=True):
    """The machine has ended; forget it."""


Action = Send | SendContribution | Reduce | SendMean | Finish | Fail | Release | Close
