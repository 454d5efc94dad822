"""The messages of daemons that form a group: msgpack structs, each the header of a frame.

A joiner sends `JoinRequest` to the coordinator of its group. The coordinator answers `JoinAccepted` or `JoinRefused`;
when the group closes, it sends `GroupFormed` to all. Answers carry the join's ticket, so that late ones do no harm. A
coordinator sends an `Invitation` to peers that it waits for; they answer with their `Whereabouts`, as do peers that
were known only by their records. Peers with different specs ask for each other's: `SpecQuestion`, `SpecAnswer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from equipoise.averaging.manifest import Join, Manifest, PeerName, RoundNumber, SpecHash, Ticket
from equipoise.averaging.options import (
    MARK_BYTES,
    MAX_GROUP_SIZE,
    MAX_MARKS,
    MAX_NAME_CHARS,
    MAX_PARKED_GROUPS,
    MAX_TERM_VALUE_CHARS,
    MAX_TERMS,
    Number,
    Word,
)
from equipoise.averaging.ports import Buffer, parser
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import MAX_WAIT

MAX_DETAIL_CHARS = 200
MAX_HOPS = 3
"""Most redirects that a join follows; the next coordinator keeps it. Two differing views cause one; three are rare."""

MAX_PATIENCE = 86_400.0
"""Most seconds that a join may wait: in effect, for ever."""

MAX_COUNT = 1_000_000

MAX_PRESENCE = 1e9
"""Most seconds for which a peer may claim to have been there: thirty years."""

MAX_ROWS = MAX_TERMS + 16
"""Most rows of a spec's table: its terms, its options, and its tensors in two."""

RunName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Detail = Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_CHARS, pattern=r"\A[ -~]*\Z")]
"""Printable ASCII: it ends up in logs and terminals."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Hops = Annotated[int, msgspec.Meta(ge=0, le=MAX_HOPS)]
Patience = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PATIENCE)]
Wait = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT)]
Span = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PATIENCE)]
Value = Annotated[str, msgspec.Meta(max_length=MAX_TERM_VALUE_CHARS, pattern=r"\A[ -~]*\Z")]
Marks = Annotated[bytes, msgspec.Meta(max_length=MARK_BYTES * MAX_MARKS)]
Presence = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PRESENCE)]


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message about one run, which it names."""

    run: RunName


class JoinRequest(_Message, frozen=True, tag=True):
    """The joiner asks the coordinator to put it into its group.

    Attributes:
        join: The joiner's signed join.
        patience: Seconds that the joiner will wait in all.
        hops: Number of redirects followed; at `MAX_HOPS` the join is not redirected again.
    """

    join: Join
    patience: Patience = MAX_PATIENCE
    hops: Hops = 0


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """A federated round as its coordinator sees it.

    Attributes:
        state: The state of most parked joins, from which the drawn peers train; None if none claims one.
        drawn: PeerIDs of the drawn peers, in the order of the draw.
        contributed: PeerIDs of the peers whose contributions are in, drawn or not.
    """

    state: StateId | None
    drawn: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_GROUP_SIZE)]
    contributed: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_PARKED_GROUPS * MAX_GROUP_SIZE)]


class JoinAccepted(_Message, frozen=True, tag=True):
    """The coordinator has parked the join in the group that it gathers.

    Attributes:
        ticket: Of the join.
        wait: Seconds until the group closes, or until the coordinator says more.
        ready: Number of joins that are in.
        target: Number of joins that the coordinator waits for.
        short: Whether the joins that are in could not be a group: too few, or no peer that the others can dial.
        closes: Seconds until the group closes without the peers that are missing; None if it waits for them.
        standing: The drawn and the contributed peers of a federated run; None if they are as before.
    """

    ticket: Ticket
    wait: Wait
    ready: Count
    target: Count
    short: bool = False
    closes: Span | None = None
    standing: Standing | None = None


class JoinRefused(_Message, frozen=True, tag=True):
    """The coordinator refuses the join.

    Attributes:
        ticket: Of the join.
        detail: The reason, for people.
        round: The coordinator's next round: the joiner goes on to it if its own is over.
        redirect: The coordinator to ask instead.
        wait: Seconds after which the joiner may ask again; 0 if the reason does not pass.
        late: Seconds by which the joiner's contribution came too late for the group that it was made for; 0 if it did
            not, or the coordinator does not know.
        group: PeerIDs of that group, which will show whether its round has failed.
    """

    ticket: Ticket
    detail: Detail
    round: RoundNumber = 0
    redirect: PeerName | None = None
    wait: Wait = 0.0
    late: Span = 0.0
    group: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = ()


class LeaveRequest(_Message, frozen=True, tag=True):
    """The joiner asks the coordinator to forget its join."""

    ticket: Ticket


class GroupFormed(_Message, frozen=True, tag=True):
    """The group is closed. Its members get this.

    Attributes:
        manifest: The group.
        lateness: Seconds from the first join to the last.
        absent: PeerIDs waited for in vain.
        reason: Why the group closed.
        last: PeerID of the peer that the group waited for: the last to join, or the first that did not.
        waited: Seconds from the first join until the last, or until the group closed without that peer.
        late: If the run learns its grace: seconds after the quorum of each member, in order, and of each absent peer.
    """

    manifest: Manifest
    lateness: Wait
    absent: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = ()
    reason: Detail = ""
    last: PeerName | None = None
    waited: Span = 0.0
    late: Annotated[tuple[Wait, ...], msgspec.Meta(max_length=2 * MAX_GROUP_SIZE)] = ()


class Invitation(_Message, frozen=True, tag=True):
    """The coordinator gathers a group for this round, and asks whether the receiver is there.

    Attributes:
        round: The round's number.
        closes: See `JoinAccepted`.
        standing: The drawn and the contributed peers of a federated round, for the status of peers that still train.
    """

    round: RoundNumber
    closes: Span | None = None
    standing: Standing | None = None


class Whereabouts(_Message, frozen=True, tag=True):
    """The sender is there, and tells its next round: the answer to an `Invitation`, or to a `Whereabouts` that asks.

    Attributes:
        round: The sender's next round.
        asks: Whether the receiver should answer in kind: the sender knows only its record.
        placed: Whether the sender has helped to make the state of a run in which all peers hold one.
    """

    round: RoundNumber
    asks: bool = False
    placed: bool = False


class SpecQuestion(_Message, frozen=True, tag=True):
    """The sender's spec of this run differs from the receiver's: it asks for the receiver's.

    Attributes:
        spec: Hash of the asker's spec.
        marks: Of the asker's tensors; the answer names the first that differs.
    """

    spec: SpecHash
    marks: Marks


class SpecAnswer(_Message, frozen=True, tag=True):
    """Answers `SpecQuestion`.

    Attributes:
        spec: Hash of the described spec.
        seconds: Time for which this peer has taken part with it.
        version: Protocol version.
        place: Place of the first tensor that differs; None if all tensors with marks are alike.
        table: The spec by names and values, for people.
    """

    spec: SpecHash
    seconds: Presence
    version: Number
    place: Number | None
    table: Annotated[tuple[tuple[Word, Value], ...], msgspec.Meta(max_length=MAX_ROWS)]


JoinMessage = JoinRequest | JoinAccepted | JoinRefused | LeaveRequest | GroupFormed | Invitation | Whereabouts
SpecMessage = SpecQuestion | SpecAnswer
MatchmakingMessage = JoinMessage | SpecMessage

encode: Callable[[MatchmakingMessage], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[Buffer], MatchmakingMessage] = parser(MatchmakingMessage, "a matchmaking message")
"""Parse and check a message that a peer sent; see `ports.parser`."""
