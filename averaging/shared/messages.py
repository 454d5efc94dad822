"""The messages of shared tables, which travel between scripts by `Run.send`: items of one view, with tensors beside.

A peer heeds only items of the view that it has entered: this is the fence.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from equipoise.averaging.manifest import PeerName
from equipoise.averaging.options import MAX_GROUP_SIZE

SHARDS = 16
"""Number of shards, each with every 16th row of each table: enough to spread over ten peers, few enough for a push."""

MAX_ITEMS = 4096
"""Most items in one message, and most workers that a shard remembers."""

MAX_EARLIER = 32
"""Most sets of members that a peer enters after a view that was active, while no further one is."""

Members = Annotated[tuple[PeerName, ...], msgspec.Meta(min_length=1, max_length=MAX_GROUP_SIZE)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Number = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=SHARDS)]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Entered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sender has entered the view, and heeds no earlier one from now on.

    Attributes:
        last: Number of the last view that was active here; 0 for none.
        first: Number of the first view that its script entered.
        earlier: Its views that may be active, as (number, members): the last that was, and those that it entered since.
        clock: Its clock, 0 for a newcomer.
        held: Its shards, each with the number of the view in which it was whole, and its version there.
        known: The latest (view, version) of each shard when the last view began.
        left: Peers that have left, as `Left` tells, each with the number of its last view.
    """

    last: Count = 0
    first: Count = 0
    earlier: Annotated[tuple[tuple[Count, Members], ...], msgspec.Meta(max_length=MAX_EARLIER)] = ()
    clock: Count = 0
    held: Annotated[tuple[tuple[Index, Count, Count], ...], msgspec.Meta(max_length=SHARDS)] = ()
    known: Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=SHARDS)] = ()
    left: Annotated[tuple[tuple[PeerName, Count], ...], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = ()


class Left(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sender's script ends: it serves no more, and enters no later view."""


class Clock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The view is active here, and all pushes that the sender made before this clock are settled."""

    clock: Count


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks the owner of a shard to apply gradients made for rows of the clock `base`; or, with -1, for rows."""

    shard: Index
    number: Count
    base: Number


class Answer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All holders have the version, with the push, or which the rows are of; with a reason, the push is refused."""

    shard: Index
    number: Count
    version: Count
    reason: Annotated[str, msgspec.Meta(max_length=300)] = ""


class Copy(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The push of a worker that makes this version, for a copy to apply; without a worker, asks what it has."""

    shard: Index
    version: Count
    worker: Name = ""
    number: Count = 0


class Has(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sender has all pushes up to this version; with -1 it needs the state."""

    shard: Index
    version: Number


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A whole shard, with the number of the last push of each worker in it."""

    shard: Index
    version: Count
    seen: Annotated[tuple[tuple[Name, Count], ...], msgspec.Meta(max_length=MAX_ITEMS)]


Item = Entered | Left | Clock | Ask | Answer | Copy | Has | State


class Message(msgspec.Struct, frozen=True):
    """The fields of a message in the sender's view; without items, it calls for a round that replaces the view."""

    view: Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,16}\.[0-9a-f]{8}\Z")]
    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_ITEMS)]


msgspec.convert({"view": "0.00000000", "items": ()}, Message)  # Two threads must not be the first to need it.
