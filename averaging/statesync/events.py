"""The events of the two machines of a transfer, and their actions.

Events are in the past tense, actions in the imperative. No bytes of images come here: the driver keeps them, has
checked every size, and says only whether what came had the right digest.
"""

from __future__ import annotations

import msgspec

from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.chunks import ImageId
from equipoise.averaging.statesync.messages import Bulk, ToDonor, ToNewcomer, TransferMessage


class PeerLost(msgspec.Struct, frozen=True):
    """A peer cannot be reached, and frames to or from it are lost."""

    peer: str
    reason: str


class Woke(msgspec.Struct, frozen=True):
    """The machine's deadline has passed."""


# ---- a donor's ----


class AskReceived(msgspec.Struct, frozen=True):
    """A peer of the run, of the same spec, has said something to this peer as a donor."""

    peer: str
    message: ToDonor


class EpochReached(msgspec.Struct, frozen=True):
    """This donor's trainer stands at that epoch."""

    epoch: int


class TrainerLeft(msgspec.Struct, frozen=True):
    """This peer's trainer has left the run: the donor serves what it keeps, and takes no more snapshots."""


class FetchChanged(msgspec.Struct, frozen=True):
    """This peer fetches a state itself, or does so no longer: while it does, its own is of use to nobody."""

    fetching: bool


class SnapshotTaken(msgspec.Struct, frozen=True):
    """The trainer has handed a snapshot over; its digest is being computed."""

    state: StateId


class SnapshotReady(msgspec.Struct, frozen=True):
    """The driver holds a snapshot's bytes and digests."""

    state: StateId
    image: ImageId


class RoundBegan(msgspec.Struct, frozen=True):
    """Values are exchanged in a round of this run that leads on from the state `before`."""

    before: StateId


class RoundOver(msgspec.Struct, frozen=True):
    """That round has ended here; if it came to a mean, the driver keeps the mean by now."""


class MeanKept(msgspec.Struct, frozen=True):
    """A round has come to a mean, of `size` bytes, which leads on from the state `before`; the driver keeps it.

    All kept means together take `most` bytes, but for the last, which is kept whatever its size.
    """

    before: StateId
    size: int
    most: int


class MeanReady(msgspec.Struct, frozen=True):
    """The driver has made an image of the mean that leads on from `before`; None where it has not the memory."""

    before: StateId
    image: ImageId | None


class BodySent(msgspec.Struct, frozen=True):
    """A body has left for a peer; `busy` says whether a round exchanges at this donor now."""

    peer: str
    busy: bool


class RoundsSeen(msgspec.Struct, frozen=True):
    """Told in place of `Woke`: whether a round exchanges at this donor now."""

    busy: bool


TrainerEvent = EpochReached | TrainerLeft | FetchChanged | SnapshotTaken | SnapshotReady
RoundEvent = RoundBegan | RoundOver | RoundsSeen | MeanKept | MeanReady
DonorEvent = AskReceived | BodySent | PeerLost | Woke | TrainerEvent | RoundEvent


class Send(msgspec.Struct, frozen=True):
    """Send a message to a peer."""

    to: str
    message: TransferMessage


class SendBody(msgspec.Struct, frozen=True):
    """Send a message with its body, after whatever rounds have to send; answer with `BodySent`, unless it is lost."""

    to: str
    message: Bulk


class Release(msgspec.Struct, frozen=True):
    """Nobody needs that image any more."""

    image: ImageId


class MakeImage(msgspec.Struct, frozen=True):
    """Somebody missed the mean that leads on from this state: make an image of it; answer with `MeanReady`."""

    before: StateId


class Drop(msgspec.Struct, frozen=True):
    """That mean, and its image if there is one, are no longer kept."""

    before: StateId


class Forget(msgspec.Struct, frozen=True):
    """The server serves a peer no longer: what was begun for it alone can end."""

    peer: str


DonorAction = Send | SendBody | Release | MakeImage | Drop | Forget


# ---- a newcomer's ----


class PeersSeen(msgspec.Struct, frozen=True):
    """The peers of the run with the same spec, without this one."""

    peers: tuple[str, ...]


class AnswerReceived(msgspec.Struct, frozen=True):
    """A donor has said something to this newcomer."""

    peer: str
    message: ToNewcomer


class MemoryReady(msgspec.Struct, frozen=True):
    """There is room for an image of that size."""

    size: int


class MemoryRefused(msgspec.Struct, frozen=True):
    """There is no room for it."""

    reason: str


class BodyReceived(msgspec.Struct, frozen=True):
    """A body that the machine expects has come from a donor, with the right digest if `genuine`.

    The driver has put a genuine chunk into its place.
    """

    peer: str
    message: Bulk
    genuine: bool


class ProtocolBroken(msgspec.Struct, frozen=True):
    """A donor has sent what no donor sends: of a wrong size, or more than it was asked for."""

    peer: str
    reason: str


class Checked(msgspec.Struct, frozen=True):
    """A whole mean was looked at: `problem` says why the given proofs do not make it the group's; empty if they do."""

    problem: str


class Withdrew(msgspec.Struct, frozen=True):
    """The image is not wanted any more."""

    reason: str


SourceEvent = AnswerReceived | BodyReceived | ProtocolBroken | PeerLost
FetchEvent = PeersSeen | SourceEvent | MemoryReady | MemoryRefused | Checked | Withdrew | Woke


class Allocate(msgspec.Struct, frozen=True):
    """Make room for an image; answer with `MemoryReady` or `MemoryRefused`. What was in it may be lost."""

    image: ImageId


class Check(msgspec.Struct, frozen=True):
    """The image of a mean is complete: find out whether it is the group's, by these proofs; answer with `Checked`."""

    proofs: tuple[Commit, ...]


class Finish(msgspec.Struct, frozen=True):
    """The download is over.

    Attributes:
        outcome: What it came to. If it is ok, the image is complete; a mean is then the group's.
        voters: Of a snapshot: all who had a say in which one to take, whether they offered any or not.
    """

    outcome: FetchOutcome
    voters: frozenset[str] = frozenset()


FetchAction = Send | Allocate | Check | Finish
