"""The messages of daemons that form a group: msgpack structs, each the header of a frame.

A requester sends `JoinRequest` to the coordinator of its group, which answers `JoinAccepted` or `JoinRefused` and, in
the end, sends everyone `GroupFormed`. Answers name the join they answer by its ticket, so that late ones do no harm.
Peers that a coordinator waits for get an `Invitation`, and answer with their `Whereabouts`; peers of whom only a
record is known are asked theirs. Peers whose specs differ ask each other what theirs is: `SpecQuestion`, `SpecAnswer`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec

from equipoise.averaging.manifest import Join, Manifest, PeerName, RoundNumber, SpecHash, Ticket
from equipoise.averaging.matchmaking.group_builder import MAX_WAIT
from equipoise.averaging.options import Number, RunOptions, Word
from equipoise.averaging.ports import Buffer, parser
from equipoise.averaging.spec import (
    MARK_BYTES,
    MAX_GROUP_SIZE,
    MAX_MARKS,
    MAX_NAME_CHARS,
    MAX_TERM_VALUE_CHARS,
    MAX_TERMS,
    PROTOCOL_VERSION,
)

MAX_DETAIL_CHARS = 200
MAX_HOPS = 3
"""Most redirects that a join follows before it is kept where it is: two views differ by one, three are bad luck."""

MAX_PATIENCE = 86_400.0
"""Most seconds that a join may wait; longer is as good as for ever."""

MAX_COUNT = 1_000_000

MAX_PRESENCE = 1e9
"""Most seconds that a peer may say that it has been there: thirty years."""

MAX_NOTE_CHARS = 160
"""Longest description of a tensor, its name and shape: a line of a terminal."""

RunName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Detail = Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_CHARS, pattern=r"\A[ -~]*\Z")]
"""Printable ASCII: it ends up in logs and terminals."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Hops = Annotated[int, msgspec.Meta(ge=0, le=MAX_HOPS)]
Patience = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PATIENCE)]
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT)]
Value = Annotated[str, msgspec.Meta(max_length=MAX_TERM_VALUE_CHARS, pattern=r"\A[ -~]*\Z")]
Note = Annotated[str, msgspec.Meta(max_length=MAX_NOTE_CHARS, pattern=r"\A[ -~]*\Z")]
Marks = Annotated[bytes, msgspec.Meta(max_length=MARK_BYTES * MAX_MARKS)]
Presence = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PRESENCE)]


class Why(StrEnum):
    """Why a join is refused."""

    ELSEWHERE = "elsewhere"
    """Ask the peer in `redirect`."""
    ROUND_GONE = "round gone"
    """The round is over here; `round` is the next."""
    FULL = "full"
    """The group closed without it; `round` is the next."""
    OTHER_SPEC = "other spec"
    OTHER_VERSION = "other version"
    UNKNOWN_RUN = "unknown run"
    NOT_VALID = "not valid"
    """Forged, or its round is out of bounds."""
    BUSY = "busy"
    """More joins are parked here than may be."""


class JoinRequest(msgspec.Struct, frozen=True, tag=True):
    """Put me into your group.

    Attributes:
        run: Name of the run.
        join: The requester's signed join.
        patience: Seconds it is going to wait at all.
        hops: How many redirects it has followed; at `MAX_HOPS` it is not redirected again.
        version: Protocol version.
    """

    run: RunName
    join: Join
    patience: Patience = MAX_PATIENCE
    hops: Hops = 0
    version: int = PROTOCOL_VERSION


class JoinAccepted(msgspec.Struct, frozen=True, tag=True):
    """You are in the group that I am gathering.

    Attributes:
        run: Name of the run.
        ticket: Of the join.
        wait: Seconds until the group closes, or until I say more.
        ready: How many are in.
        target: How many I wait for.
        short: The joins that are in could not be a group: too few, or none of a peer that the others can dial.
    """

    run: RunName
    ticket: Ticket
    wait: Wait
    ready: Count
    target: Count
    short: bool = False


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """You are not in.

    Attributes:
        run: Name of the run.
        ticket: Of the join.
        why: The reason that machines read.
        detail: The reason that people read.
        round: The next round here.
        redirect: Whom to ask instead.
        wait: Seconds after which to ask again.
    """

    run: RunName
    ticket: Ticket
    why: Why
    detail: Detail
    round: RoundNumber = 0
    redirect: PeerName | None = None
    wait: Wait = 0.0


class LeaveRequest(msgspec.Struct, frozen=True, tag=True):
    """Forget my join."""

    run: RunName
    ticket: Ticket


class GroupFormed(msgspec.Struct, frozen=True, tag=True):
    """The group is closed. Goes to its members, and to those that were waited for in vain.

    Attributes:
        run: Name of the run.
        manifest: The group.
        lateness: Seconds from the first join to the last.
        absent: PeerIDs waited for in vain.
        reason: Why it closed.
    """

    run: RunName
    manifest: Manifest
    lateness: Wait
    absent: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = ()
    reason: Detail = ""


class Invitation(msgspec.Struct, frozen=True, tag=True):
    """I gather a group for this round and wait for you: are you there?"""

    run: RunName
    round: RoundNumber


class Whereabouts(msgspec.Struct, frozen=True, tag=True):
    """I am here, and this is my next round: the answer to an `Invitation`, and to one of these that asks.

    Attributes:
        run: Name of the run.
        round: The sender's next round.
        asks: Whether the sender wants to know the same of the receiver, of whom it knows only the record.
    """

    run: RunName
    round: RoundNumber
    asks: bool = False


class SpecQuestion(msgspec.Struct, frozen=True, tag=True):
    """My spec of this run is another than yours: what is yours?

    Attributes:
        run: Name of the run.
        spec: Hash of the asker's spec.
        marks: Of the asker's tensors; the answer names the first that differs.
    """

    run: RunName
    spec: SpecHash
    marks: Marks


class Description(msgspec.Struct, frozen=True, array_like=True):
    """A spec in brief.

    Attributes:
        version: Protocol version.
        options: As in the spec.
        terms: As in the spec.
        values: Values of all tensors, without padding.
        tensors: How many tensors it has.
        place: Place of the first tensor that differs; None if none does, as far as there are marks.
        note: Name, dtype and shape of the tensor at that place; empty if the run has no tensor there.
    """

    version: Number
    options: RunOptions
    terms: Annotated[tuple[tuple[Word, Value], ...], msgspec.Meta(max_length=MAX_TERMS)]
    values: Number
    tensors: Number
    place: Number | None
    note: Note


class SpecAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answers `SpecQuestion`.

    Attributes:
        run: Name of the run.
        spec: Hash of the spec that is described.
        seconds: For how long this peer has taken part with it.
        description: The spec in brief.
    """

    run: RunName
    spec: SpecHash
    seconds: Presence
    description: Description


MatchmakingMessage = (
    JoinRequest
    | JoinAccepted
    | JoinRefused
    | LeaveRequest
    | GroupFormed
    | Invitation
    | Whereabouts
    | SpecQuestion
    | SpecAnswer
)

encode: Callable[[MatchmakingMessage], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[Buffer], MatchmakingMessage] = parser(MatchmakingMessage, "a matchmaking message")
"""Parse and check a message that a peer sent; see `ports.parser`."""


def refuse_unknown_run(request: JoinRequest) -> JoinRefused:
    """The answer of a daemon that has no part in the run."""
    detail = f"no run named {request.run!a} here"[:MAX_DETAIL_CHARS]
    return JoinRefused(request.run, request.join.ticket, Why.UNKNOWN_RUN, detail)
