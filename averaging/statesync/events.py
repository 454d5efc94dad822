"""What the two machines of a transfer are told, and what they ask for.

Events are in the past tense, actions in the imperative. No bytes of images come here: the driver keeps them, has
checked every size, and says only whether what came had the right digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.chunks import ImageId
from equipoise.averaging.statesync.messages import Bulk, ToDonor, ToNewcomer, TransferMessage


@dataclass(frozen=True, slots=True)
class AskReceived:
    """A peer of the run, of the same spec, has said something to this peer as a donor."""

    peer: str
    message: ToDonor


@dataclass(frozen=True, slots=True)
class AnswerReceived:
    """A donor has said something to this newcomer."""

    peer: str
    message: ToNewcomer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Frames to or from a peer may have been lost, and the peer cannot be reached."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Woke:
    """The machine's deadline has passed."""


# ---- a donor's ----


@dataclass(frozen=True, slots=True)
class EpochReached:
    """This donor's trainer stands at that epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class TrainerLeft:
    """This peer's trainer has left the run: the donor serves what it keeps, and takes no more snapshots."""


@dataclass(frozen=True, slots=True)
class FetchBegan:
    """This peer fetches a state itself: its own is of use to nobody."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """It fetches none any more."""


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """The trainer has handed a snapshot over; its digest is being computed."""

    state: StateId


@dataclass(frozen=True, slots=True)
class SnapshotReady:
    """The driver holds a snapshot's bytes and digests."""

    state: StateId
    image: ImageId


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Values are exchanged in a round of this run that leads on from the state `before`."""

    before: StateId


@dataclass(frozen=True, slots=True)
class RoundOver:
    """That round has ended here; if it came to a mean, that is kept by now."""


@dataclass(frozen=True, slots=True)
class MeanKept:
    """A round has come to a mean, of `size` bytes, which leads on from the state `before`; the driver holds it.

    Those kept take `most` bytes together, but for the last, which is kept whatever its size.
    """

    before: StateId
    size: int
    most: int


@dataclass(frozen=True, slots=True)
class MeanReady:
    """The driver has made an image of that mean; None where it has not the memory.

    Attributes:
        before: What the mean leads on from.
        image: Its image.
    """

    before: StateId
    image: ImageId | None


@dataclass(frozen=True, slots=True)
class BodySent:
    """A body has left for a peer.

    Attributes:
        peer: Whom it was for.
        busy: Whether a round exchanges at this donor now.
    """

    peer: str
    busy: bool


@dataclass(frozen=True, slots=True)
class RoundsSeen:
    """Told in place of `Woke`: whether a round exchanges at this donor now."""

    busy: bool


DonorEvent = (
    AskReceived
    | PeerLost
    | Woke
    | EpochReached
    | TrainerLeft
    | FetchBegan
    | FetchEnded
    | SnapshotTaken
    | SnapshotReady
    | RoundBegan
    | RoundOver
    | MeanKept
    | MeanReady
    | BodySent
    | RoundsSeen
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer."""

    to: str
    message: TransferMessage


@dataclass(frozen=True, slots=True)
class SendBody:
    """Send a message with its body, after whatever rounds have to send; answer with `BodySent`, unless it is lost."""

    to: str
    message: Bulk


@dataclass(frozen=True, slots=True)
class Release:
    """Nobody needs that image any more."""

    image: ImageId


@dataclass(frozen=True, slots=True)
class MakeImage:
    """Somebody missed the mean that leads on from this state: make an image of it; answer with `MeanReady`."""

    before: StateId


@dataclass(frozen=True, slots=True)
class Drop:
    """That mean, and its image if there is one, are no longer kept."""

    before: StateId


DonorAction = Send | SendBody | Release | MakeImage | Drop


# ---- a newcomer's ----


@dataclass(frozen=True, slots=True)
class PeersSeen:
    """The peers of the run with the same spec, without this one."""

    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryReady:
    """There is room for an image of that size."""

    size: int


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """There is none."""

    reason: str


@dataclass(frozen=True, slots=True)
class DigestsReceived:
    """A donor's list of digests has come; `genuine` says whether it is that image's."""

    peer: str
    image: ImageId
    genuine: bool


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """A chunk that was asked for has come; if `genuine`, the driver has put it into its place."""

    peer: str
    image: ImageId
    chunk: int
    genuine: bool


@dataclass(frozen=True, slots=True)
class ProtocolBroken:
    """A donor has sent what no donor sends: of a wrong size, or more than it was asked for."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What a look at a whole mean came to.

    Attributes:
        problem: Why it is not the group's, as far as the proofs tell that were given; empty if it is.
    """

    problem: str


@dataclass(frozen=True, slots=True)
class Withdrew:
    """The image is not wanted any more."""

    reason: str


FetchEvent = (
    PeersSeen
    | AnswerReceived
    | PeerLost
    | MemoryReady
    | MemoryRefused
    | DigestsReceived
    | ChunkReceived
    | ProtocolBroken
    | Checked
    | Withdrew
    | Woke
)


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make room for an image; answer with `MemoryReady` or `MemoryRefused`. What was in it may be lost."""

    image: ImageId


@dataclass(frozen=True, slots=True)
class Check:
    """The image of a mean is complete: find out whether the group came to it; answer with `Checked`.

    Attributes:
        proofs: What those who offer it gave to prove it.
    """

    proofs: tuple[Commit, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The image is complete; if it is a mean, it is the group's.

    Attributes:
        state: What it is a snapshot of.
        image: Its name.
        sources: PeerID -> chunks that came from it.
        voters: Of a snapshot: all who had a say in which one to take, whether they offered any or not.
        reason: How it came about, in one line.
    """

    state: StateId
    image: ImageId
    sources: dict[str, int]
    voters: frozenset[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """There is no image to be had.

    Attributes:
        reason: Why, in one line.
        behind: Of a mean: how many peers are not as far as whoever asks for it.
        unheard: Of a mean: how many peers have not said whether they have it.
    """

    reason: str
    behind: int = 0
    unheard: int = 0


FetchAction = Send | Allocate | Check | Finish | Fail
