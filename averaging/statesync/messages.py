"""The messages between a newcomer and its donors: msgpack structs, each the header of a frame.

A newcomer sends `Ask` to every peer of its run and gets an `Answer` from each: now, and again whenever that peer would
answer otherwise. When enough of them offer the same image it asks one for `AskDigests`, and all of them for
`AskChunks`. Its ticket is in every message, so that messages of an earlier download are told apart. A peer that has
missed means asks for each in the same way. The votes that prove a mean come beside its image and not in it: each donor
knows of other votes, and the image must be the same at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.manifest import SpecHash, Ticket
from equipoise.averaging.matchmaking.messages import Detail, RunName
from equipoise.averaging.ports import Buffer, parser
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.averaging.statesync.chunks import MAX_CHUNKS, Digest, ImageId

MAX_WISHES = 2
"""Most epochs that are asked for at once: the one that donors hold, for as long as their step lasts, and the next."""

MAX_OFFERS = 2
"""Most images that a donor offers: it holds the last and one that is being downloaded."""

MAX_CHUNKS_ASKED = 16
"""Most chunks that one message asks for; a newcomer has at most 8 on their way from one donor."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Epochs = Annotated[tuple[Epoch, ...], msgspec.Meta(max_length=MAX_WISHES)]
ChunkIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A snapshot that a donor holds, or a mean.

    Attributes:
        state: What it is a snapshot of, or what the mean leads on from.
        image: Its bytes.
    """

    state: StateId
    image: ImageId


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Says of which download it is.

    Attributes:
        run: Name of the run.
        ticket: Of the download; a new one of the same peer takes the place of the one before.
    """

    run: RunName
    ticket: Ticket


class _ImageMessage(_Message, frozen=True, tag=True):
    """Says of which image it is."""

    digest: Digest


class Ask(_Message, frozen=True, tag=True):
    """Tell me what you have of this run's state; or, with `after`, what came next.

    Attributes:
        spec: Hash of the newcomer's RunSpec; only peers of the same spec are answered.
        at_least: The first epoch that is of use.
        wanted: Epochs of which the donor should take a snapshot, when it is there; empty only to hear what it has.
        after: A state: what is wanted is no snapshot, but the mean that the group applied to it.
    """

    spec: SpecHash
    at_least: Epoch
    wanted: Epochs = ()
    after: StateId | None = None


class Answer(_Message, frozen=True, tag=True):
    """This is what I have.

    Attributes:
        epoch: Where this donor stands; None if it holds no state.
        noted: Those of the wanted epochs that it will take a snapshot of, or is just taking.
        offers: The snapshots it holds, of epochs that are of use; or the mean that was asked for.
        proof: Of that mean: votes of its round's majority, up to 64 signatures of up to 128 bytes.
        left: Whether its trainer has left the run: it comes no further, and takes no snapshot.
    """

    epoch: Epoch | None
    noted: Epochs = ()
    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=MAX_OFFERS)] = ()
    proof: Commit | None = None
    left: bool = False


class Refusal(_Message, frozen=True, tag=True):
    """I do not serve you."""

    reason: Detail


class AskDigests(_ImageMessage, frozen=True, tag=True):
    """Send me the digests of that image's chunks."""


class Digests(_ImageMessage, frozen=True, tag=True):
    """The body holds the digests of all chunks, 32 bytes each."""


class AskChunks(_ImageMessage, frozen=True, tag=True):
    """Send me those chunks of that image."""

    chunks: Annotated[tuple[ChunkIndex, ...], msgspec.Meta(min_length=1, max_length=MAX_CHUNKS_ASKED)]


class Chunk(_ImageMessage, frozen=True, tag=True):
    """The body is that chunk of that image."""

    chunk: ChunkIndex


class Gone(_ImageMessage, frozen=True, tag=True):
    """I do not hold that image, or not any more."""

    reason: Detail


class Finished(_Message, frozen=True, tag=True):
    """I need nothing more of you; whatever I had wished for is off."""


AskBulk = AskDigests | AskChunks
ToDonor = Ask | AskBulk | Finished
ToNewcomer = Answer | Refusal | Digests | Chunk | Gone
Bulk = Digests | Chunk
"""The messages that have a body."""

TransferMessage = ToDonor | ToNewcomer

encode: Callable[[TransferMessage], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[Buffer], TransferMessage] = parser(TransferMessage, "a message of a transfer")
"""Parse and check a message that a peer sent; see `ports.parser`."""
