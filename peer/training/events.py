"""The events of a `Replica`, in the past tense, and its actions, in the imperative."""

from __future__ import annotations

import msgspec

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId


class RoundEnded(msgspec.Struct, frozen=True):
    """A round of this peer ended. If it failed here after a group had formed, the others may hold a mean that it lacks.

    Attributes:
        outcome: The round's outcome.
        missing: If it is ok: number of known peers that did not take part.
    """

    outcome: Outcome
    missing: int = 0


class ImageFetched(msgspec.Struct, frozen=True):
    """An image of this state is here, checked, ready to load; `voters` had a vote on which snapshot to take."""

    state: StateId
    voters: tuple[str, ...] = ()


class FetchFailed(msgspec.Struct, frozen=True):
    """No image came, or the image does not fit."""

    reason: str


class MeanFetched(msgspec.Struct, frozen=True):
    """A missed mean is here.

    Attributes:
        before: The state to which the group applied the mean.
        digest: The outcome's digest.
        counted: Whether this peer's contribution is in the mean.
        makers: PeerIDs of the peers that held that state and contributed.
    """

    before: StateId
    digest: str
    counted: bool
    makers: tuple[str, ...] = ()


class RecoveryFailed(msgspec.Struct, frozen=True):
    """The mean could not be fetched; unless all peers have answered (`decided`), some may still be in its round.

    `beyond` is the later epoch that most peers of the circle have reached; 0 if they have reached none.
    """

    reason: str
    decided: bool = True
    beyond: int = 0


class OthersBegun(msgspec.Struct, frozen=True):
    """Other peers have begun to train before this peer, and may offer a snapshot of epoch `at_least`."""

    at_least: int


class Overdue(msgspec.Struct, frozen=True):
    """No peer has joined this peer's round for a while: the others may be at a later state, or have ended.

    Unless it is `placed`, a draw decides whether this peer ever sees their round, so only their answers tell.
    """

    placed: bool = True


class Deserted(msgspec.Struct, frozen=True):
    """No other peer of the run is known any more; some may have left means behind that this peer missed."""


class Stopped(msgspec.Struct, frozen=True):
    """The download was stopped; the replica drops means that were fetched and not applied."""


class Ending(msgspec.Struct, frozen=True):
    """This peer will make no more updates: is its state the group's last?"""


class Due(msgspec.Struct, frozen=True):
    """An update is due.

    Attributes:
        company: Whether any other peer is known.
        placed: Whether this peer has a place in the group; without one it follows the state.
    """

    company: bool
    placed: bool = True


class SteppedAlone(msgspec.Struct, frozen=True):
    """This peer applied its own mean, which has this digest."""

    digest: str


class Checked(msgspec.Struct, frozen=True):
    """The parameters now have this digest."""

    digest: str


class Interrupted(msgspec.Struct, frozen=True):
    """An update, or a load, has raised half-way; the replica drops the held means."""


class Written(msgspec.Struct, frozen=True):
    """The script has written to the state, which has this digest now; `reason` says what it wrote, one line."""

    digest: str
    reason: str


OthersEvent = RoundEnded | OthersBegun | Overdue | Deserted
DownloadEvent = ImageFetched | FetchFailed | MeanFetched | RecoveryFailed | Stopped
OwnEvent = Due | Ending | SteppedAlone | Checked | Interrupted | Written
Event = OthersEvent | DownloadEvent | OwnEvent


class Apply(msgspec.Struct, frozen=True):
    """Apply the mean after this state: the held mean or, without one, the last round's."""

    before: StateId


class Check(msgspec.Struct, frozen=True):
    """Compute the digest of the parameters; report `Checked`."""


class Hold(msgspec.Struct, frozen=True):
    """Keep the mean of the round that has just ended, as the mean after this state."""

    before: StateId


class Keep(msgspec.Struct, frozen=True):
    """Keep the mean that has just been fetched, as the mean after this state."""

    before: StateId


class DropGiven(msgspec.Struct, frozen=True):
    """Drop the contribution to the failed round: it is in the mean."""


class Forget(msgspec.Struct, frozen=True):
    """Drop the mean after this state."""

    before: StateId


class Fetch(msgspec.Struct, frozen=True):
    """Fetch an image of this epoch or a later one."""

    at_least: int


class Recover(msgspec.Struct, frozen=True):
    """Fetch the mean that the group applied to this state."""

    after: StateId


class Load(msgspec.Struct, frozen=True):
    """Load the image that was fetched."""


class Meet(msgspec.Struct, frozen=True):
    """Take part in a round."""


class StepAlone(msgspec.Struct, frozen=True):
    """Apply the mean of this peer's own accumulated gradients."""


Action = Apply | Check | Hold | Keep | DropGiven | Forget | Fetch | Recover | Load | Meet | StepAlone
