"""The events of the two machines of a transfer, and their actions.

Events are in the past tense, actions in the imperative. Events carry no bytes of images. The driver keeps the bytes,
checks every size, and reports only whether a body had the right digest.
"""

from __future__ import annotations

import msgspec

from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication.chunks import ImageId
from equipoise.averaging.replication.messages import Item, ToDonor, ToNewcomer, TransferMessage
from equipoise.averaging.state import StateId


class PeerLost(msgspec.Struct, frozen=True):
    """A peer cannot be reached, and frames to or from it are lost."""

    peer: str
    reason: str


class Woke(msgspec.Struct, frozen=True):
    """The machine's deadline has passed."""


# ---- a donor's ----


class AskReceived(msgspec.Struct, frozen=True):
    """A peer of the run, of the same spec, has sent a message to this peer as a donor."""

    peer: str
    message: ToDonor


class EpochReached(msgspec.Struct, frozen=True):
    """This donor's trainer is at that epoch."""

    epoch: int


class TrainerLeft(msgspec.Struct, frozen=True):
    """This peer's trainer has left the run: the donor serves what it keeps, and takes no more snapshots."""


class FetchChanged(msgspec.Struct, frozen=True):
    """This peer has begun or ended a fetch of a state; during the fetch, its own state is of no use to others."""

    fetching: bool


class SnapshotTaken(msgspec.Struct, frozen=True):
    """The trainer has handed a snapshot over; its digest is being computed."""

    state: StateId


class SnapshotReady(msgspec.Struct, frozen=True):
    """The driver holds a snapshot's bytes and digests."""

    state: StateId
    image: ImageId


class RoundBegan(msgspec.Struct, frozen=True):
    """The members of a round from the state `before` exchange values now."""

    before: StateId


class RoundOver(msgspec.Struct, frozen=True):
    """That round has ended here; if it succeeded, the driver keeps the mean by now."""


class MeanKept(msgspec.Struct, frozen=True):
    """A round from the state `before` has succeeded; the driver keeps its mean, of `size` bytes.

    The round's group closed now, or `age` seconds before. All kept means together take at most `most` bytes; the last
    mean is kept whatever its size.
    """

    before: StateId
    size: int
    most: int
    age: float = 0.0


class MeanReady(msgspec.Struct, frozen=True):
    """The driver has made an image of the mean after the state `before`."""

    before: StateId
    image: ImageId


class BodySent(msgspec.Struct, frozen=True):
    """A body has left for a peer; `busy` says whether a round exchanges at this donor now."""

    peer: str
    busy: bool


class RoundsSeen(msgspec.Struct, frozen=True):
    """Whether a round exchanges at this donor now; reported in place of `Woke`."""

    busy: bool


TrainerEvent = EpochReached | TrainerLeft | FetchChanged | SnapshotTaken | SnapshotReady
RoundEvent = RoundBegan | RoundOver | RoundsSeen | MeanKept | MeanReady
DonorEvent = AskReceived | BodySent | PeerLost | Woke | TrainerEvent | RoundEvent


class Send(msgspec.Struct, frozen=True):
    """Send a message to a peer."""

    to: str
    message: TransferMessage


class SendBody(msgspec.Struct, frozen=True):
    """Send a message with its body, after the frames of rounds; report `BodySent`, unless the body is lost."""

    to: str
    message: Item


class Release(msgspec.Struct, frozen=True):
    """No newcomer needs that image any more."""

    image: ImageId


class MakeImage(msgspec.Struct, frozen=True):
    """Make an image of the mean after this state, as a peer missed it; report `MeanReady`."""

    before: StateId


class Drop(msgspec.Struct, frozen=True):
    """Drop the mean after this state, with its image if it has one."""

    before: StateId


class Forget(msgspec.Struct, frozen=True):
    """Forget a peer that the donor no longer serves: work for that peer alone can end."""

    peer: str


DonorAction = Send | SendBody | Release | MakeImage | Drop | Forget


# ---- a newcomer's ----


class PeersSeen(msgspec.Struct, frozen=True):
    """The peers of the run with the same spec, without this one."""

    peers: tuple[str, ...]


class AnswerReceived(msgspec.Struct, frozen=True):
    """A donor has sent a message to this newcomer."""

    peer: str
    message: ToNewcomer


class MemoryReady(msgspec.Struct, frozen=True):
    """The driver has memory for an image of that size."""

    size: int


class BodyReceived(msgspec.Struct, frozen=True):
    """A body that the machine expects has come from a donor, with the right digest if `genuine`.

    The driver has put a genuine chunk into its place.
    """

    peer: str
    message: Item
    genuine: bool


class ProtocolBroken(msgspec.Struct, frozen=True):
    """A donor has sent a body of a wrong size, or more than it was asked for."""

    peer: str
    reason: str


class Withdrew(msgspec.Struct, frozen=True):
    """The caller does not want the image any more, or has no memory for it."""

    reason: str


FetchEvent = (
    PeersSeen | AnswerReceived | BodyReceived | ProtocolBroken | PeerLost | MemoryReady | Withdrew | Woke
)


class Allocate(msgspec.Struct, frozen=True):
    """Allocate memory for an image; report `MemoryReady` or `Withdrew`. Bytes of an earlier image may be lost."""

    image: ImageId


class Finish(msgspec.Struct, frozen=True):
    """The download is over; if its outcome is ok, the image is complete."""

    outcome: FetchOutcome


FetchAction = Send | Allocate | Finish
