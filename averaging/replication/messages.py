"""The messages between a newcomer and its donors: msgpack structs, each the header of a frame.

A newcomer sends `Ask` to every peer of its run. Each peer sends an `Answer`, and another whenever its answer changes.
When enough peers offer the same image, the newcomer asks one of them for item 0, the list of digests, then all of them
for the chunks, the other items. Each message carries the newcomer's ticket, which sets it apart from messages of an
earlier download. A peer that has missed means asks for each in the same way: the image of a mean is the same at all
donors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from equipoise.averaging.manifest import SpecHash, Ticket
from equipoise.averaging.matchmaking.messages import Detail, RunName, Span
from equipoise.averaging.ports import Buffer, parser
from equipoise.averaging.replication.chunks import MAX_CHUNKS, Digest, ImageId
from equipoise.averaging.state import MAX_EPOCH, StateId

MAX_WISHES = 2
"""Most epochs in one wish: the donors' present epoch, while their step lasts, and the next."""

MAX_OFFERS = 2
"""Most images that a donor offers: the last one, and one that is being downloaded."""

MAX_ITEMS_ASKED = 16
"""Most items that one message asks for; a newcomer has at most 8 on their way from one donor."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Epochs = Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_WISHES)]
ItemIndex = Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNKS)]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot that a donor holds, or a mean.

    Attributes:
        state: The state of the snapshot, or the state to which the mean was applied.
        image: The name of its bytes.
    """

    state: StateId
    image: ImageId


class _Message(msgspec.Struct, frozen=True, tag=True):
    """A message of one download.

    Attributes:
        run: Name of the run.
        ticket: Ticket of the download; a peer's new ticket replaces its earlier one.
    """

    run: RunName
    ticket: Ticket


class Ask(_Message, frozen=True, tag=True):
    """The newcomer asks for snapshots of this run's state or, with `after`, for the mean that followed a state.

    Attributes:
        spec: Hash of the newcomer's RunSpec; only peers of the same spec are answered.
        at_least: The first epoch that is of use.
        wanted: Epochs of which the donor should take a snapshot when it reaches them; may be empty.
    """

    spec: SpecHash
    at_least: Epoch
    wanted: Epochs = ()
    after: StateId | None = None


class Answer(_Message, frozen=True, tag=True):
    """The donor tells what it holds.

    Attributes:
        epoch: The donor's epoch; None if it holds no state.
        noted: The wanted epochs of which the donor will take a snapshot, or is just taking one.
        offers: The snapshots that it holds, of epochs that are of use; or the mean that was asked for.
        left: Whether its trainer has left the run: its epoch stays, and it takes no snapshot.
        age: Of an offered mean, the seconds since the group of its round closed; 0 without one.
    """

    epoch: Epoch | None
    noted: Epochs = ()
    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=MAX_OFFERS)] = ()
    left: bool = False
    age: Span = 0.0


class Refusal(_Message, frozen=True, tag=True):
    """The donor does not serve the newcomer, or sends no more of an image."""

    reason: Detail


class AskItems(_Message, frozen=True, tag=True):
    """The newcomer asks for items of the image of this digest; see `ImageId`."""

    digest: Digest
    items: Annotated[tuple[ItemIndex, ...], msgspec.Meta(min_length=1, max_length=MAX_ITEMS_ASKED)]


class Item(_Message, frozen=True, tag=True):
    """The body is that item of that image."""

    digest: Digest
    item: ItemIndex


class Finished(_Message, frozen=True, tag=True):
    """The newcomer needs nothing more of the donor, which may forget its wishes."""


ToDonor = Ask | AskItems | Finished
ToNewcomer = Answer | Refusal | Item
TransferMessage = ToDonor | ToNewcomer

encode: Callable[[TransferMessage], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[Buffer], TransferMessage] = parser(TransferMessage, "a message of a transfer")
"""Parse and check a message that a peer sent; see `ports.parser`."""
