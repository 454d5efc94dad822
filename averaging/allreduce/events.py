"""What a round's machine knows before it starts, what it is told, and what it asks for.

Events are in the past tense, actions in the imperative. Members are indices into the manifest, sets of members
bitmasks, parts indices into the partition. No bytes of tensors come here: the driver keeps contributions by (part,
member) and means by part, and has checked sizes and values before it reports that something was received.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from equipoise.averaging.allreduce.messages import Decision, RoundMessage
from equipoise.averaging.partition import Part


@dataclass(frozen=True)
class Group:
    """A round as all its members know it from the manifest.

    Attributes:
        round_id: Binds digests to the round.
        names: One per member, for reasons that people read.
        weights: One per member.
        dialable: Bitmask of the members that may own parts and lead.
        parts: The partition.
        first_leader: Who leads the first ballot, a dialable member.
    """

    round_id: bytes
    names: tuple[str, ...]
    weights: tuple[float, ...]
    dialable: int
    parts: tuple[Part, ...]
    first_leader: int

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
        """Bitmask of the members with weight > 0; the others observe."""
        return sum(1 << index for index, weight in enumerate(self.weights) if weight > 0)


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """The whole, checked contribution of `sender` to `part` has arrived."""

    sender: int
    part: int


@dataclass(frozen=True, slots=True)
class PartReduced:
    """The driver has reduced `part` over `contributors` and keeps the encoded mean, whose SHA-256 is `digest`."""

    part: int
    contributors: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class MeanReceived:
    """A whole, checked mean of `part` over `contributors` has arrived; the driver keeps it in place of any other."""

    sender: int
    part: int
    contributors: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BytesReceived:
    """Bytes have come in from `sender`, those of frames under way included; told every heartbeat at most."""

    sender: int
    count: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A control message has arrived."""

    sender: int
    message: RoundMessage


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection to a member broke, it is silent, or it broke the protocol."""

    member: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerReturned:
    """A member that was lost is heard again."""

    member: int


@dataclass(frozen=True, slots=True)
class Withdrew:
    """This member must leave the round: its user cancelled it, or its own values cannot be encoded."""

    reason: str


@dataclass(frozen=True, slots=True)
class Woke:
    """The machine's deadline has passed."""


Event = (
    ContributionReceived
    | PartReduced
    | MeanReceived
    | BytesReceived
    | MessageReceived
    | PeerLost
    | PeerReturned
    | Withdrew
    | Woke
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message to a member."""

    to: int
    message: RoundMessage


@dataclass(frozen=True, slots=True)
class SendContribution:
    """Encode this member's values of `part` and send them."""

    to: int
    part: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce `part` over `contributors`, in member order; answer with `PartReduced`."""

    part: int
    contributors: int


@dataclass(frozen=True, slots=True)
class SendMean:
    """Send the kept mean of `part`, which is over `contributors`, to a member."""

    to: int
    part: int
    contributors: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The round has succeeded: the kept means, all over the decision's contributors, are the result."""

    decision: Decision
    digest: bytes


@dataclass(frozen=True, slots=True)
class Fail:
    """The round has failed for this member; its tensors stay untouched."""

    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs the kept contributions and means any more."""


@dataclass(frozen=True, slots=True)
class Close:
    """The machine has ended; forget it."""


Action = Send | SendContribution | Reduce | SendMean | Finish | Fail | Release | Close
