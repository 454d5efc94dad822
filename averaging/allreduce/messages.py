"""The messages between the members of a group in a round: msgpack structs, the headers of frames.

Members are indices into the manifest. Sets of members are bitmasks (bit i is member i), sets of parts little-endian
bitmaps. `decode` ignores unknown fields and refuses everything else that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from equipoise.averaging.options import MAX_PARTS
from equipoise.averaging.ports import Buffer, parser

MAX_BALLOT = 2**40
"""Highest ballot that a message may name, a hostile Prepare too. No honest round needs a millionth of it."""

MAX_REASON_CHARS = 200

MAX_LATE_SECONDS = 86_400.0
"""Longest wait that a member tells: no round takes a day."""

Ballot = Annotated[int, msgspec.Meta(ge=0, le=MAX_BALLOT)]
Members = Annotated[int, msgspec.Meta(ge=0)]
PartIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_PARTS)]
PartBits = Annotated[bytes, msgspec.Meta(max_length=MAX_PARTS // 8)]
MemberIndex = Annotated[int, msgspec.Meta(ge=0, lt=64)]
Signature = Annotated[bytes, msgspec.Meta(max_length=128)]
Signatures = Annotated[tuple[tuple[MemberIndex, Signature], ...], msgspec.Meta(max_length=64)]
Late = tuple[MemberIndex, Annotated[float, msgspec.Meta(ge=0.0, le=MAX_LATE_SECONDS)]]
"""A member that others waited for, and seconds."""

Shares = Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=4)], ...], msgspec.Meta(max_length=64)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS, pattern=r"\A[ -~]*\Z")]
"""Printable ASCII: it ends in logs and on terminals."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages of a round."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The agreement of a group: the contributors of the mean, and the owners that reduce.

    The bytes of the mean follow from the contributors alone. The owners compute and send them.
    """

    contributors: Members
    owners: Members


class Vote(msgspec.Struct, frozen=True, array_like=True):
    """One member's word that it holds the whole mean of `decision`, proposed in `ballot`, with this digest."""

    ballot: Ballot
    decision: Decision
    digest: Digest


class Prepare(Message, frozen=True):
    """A leader opens a ballot. It asks members to promise to take part in no lower one, and for what they hold."""

    ballot: Ballot


class Promise(Message, frozen=True):
    """The answer to `Prepare`: the highest ballot in which this member held a whole mean, with its decision, if any."""

    ballot: Ballot
    held_ballot: Ballot | None = None
    held: Decision | None = None


class Refuse(Message, frozen=True):
    """This member has promised `ballot`, or still trusts its leader."""

    ballot: Ballot


class Plan(Message, frozen=True):
    """The owners of a ballot: contributors send them the parts that they lack. The highest sequence counts."""

    ballot: Ballot
    sequence: Ballot
    owners: Members


class Report(Message, frozen=True):
    """An owner tells the leader which members' contributions it holds whole under a plan."""

    ballot: Ballot
    sequence: Ballot
    whole: Members


class Waiting(Message, frozen=True):
    """The sender waits for a member that delivers, and so is not stalled itself."""


class Propose(Message, frozen=True):
    """The leader's decision for a ballot. `holders` hold its mean already, from an earlier ballot."""

    ballot: Ballot
    decision: Decision
    holders: Members = 0


class Votes(Message, frozen=True):
    """These members have cast the vote, as their signatures prove (`vote_signatures`): the sender alone, or a majority.

    The votes of a majority say that the round has succeeded. `shares` has 4 bytes of a digest of each member's share of
    the mean, as the sender holds it: members that hold different means see by it which owner gave them. `late` is the
    member whose values came last to the sender, for people.
    """

    vote: Vote
    voters: Members
    signatures: Signatures = ()
    late: Late | None = None
    shares: Shares = ()


class Fetch(Message, frozen=True):
    """The sender asks for the means of these parts over these contributors, as far as the receiver holds them."""

    contributors: Members
    parts: PartBits


class GiveUp(Message, frozen=True):
    """This member has left the round."""

    reason: Reason

    @classmethod
    def because(cls, reason: str) -> GiveUp:
        """Make any text a reason that `decode` accepts."""
        plain = reason.encode("ascii", "backslashreplace").decode()
        return cls("".join(char if char.isprintable() else " " for char in plain)[:MAX_REASON_CHARS])


class Heartbeat(Message, frozen=True):
    """This member is alive. If it `asks`, a member that is silent because all hold the mean answers."""

    asks: bool = True


class Contribution(Message, frozen=True):
    """The frame's body is the sender's encoded contribution to a part."""

    part: PartIndex


class Mean(Message, frozen=True):
    """The frame's body is the encoded mean of a part over these contributors."""

    part: PartIndex
    contributors: Members


PaxosMessage = Prepare | Promise | Refuse | Plan | Report | Propose | Votes
RoundMessage = PaxosMessage | Waiting | Fetch | GiveUp | Heartbeat | Contribution | Mean

encode: Callable[[RoundMessage], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[Buffer], RoundMessage] = parser(RoundMessage, "a message of a round")
"""Parse and check a message that a peer sent; see `ports.parser`."""


def to_bits(parts: set[int] | frozenset[int] | list[int]) -> bytes:
    """A set of part indices as a bitmap."""
    bits = bytearray(max(parts, default=-1) // 8 + 1)
    for part in parts:
        bits[part // 8] |= 1 << part % 8
    return bytes(bits)


def from_bits(bits: bytes) -> list[int]:
    """The part indices in a bitmap, ascending."""
    # Byte by byte: shifts of the whole number would take time quadratic in the bytes that a peer sent.
    return [8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]
