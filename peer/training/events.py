"""The events of a `Replica`, in the past tense, and its actions, in the imperative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from equipoise.averaging.state import StateId


class RoundSucceeded(NamedTuple):
    """A round ended in a mean.

    Attributes:
        group: The group's state before it; None if nobody claims one.
        states: The state that each claims to hold, by name.
        digest: The outcome's.
        weights: Of the contributors, by name.
        members: Names of all who took part, in an order that all of them see.
        missing: Number of known peers that did not take part.
    """

    group: StateId | None
    states: Mapping[str, StateId]
    digest: str
    weights: Mapping[str, float]
    members: Sequence[str]
    missing: int = 0


class RoundFailed(NamedTuple):
    """A round failed here; if a group had `formed`, that may hold a mean without this peer."""

    reason: str
    formed: bool = False


class ImageFetched(NamedTuple):
    """An image of this state is there, checked, ready to be loaded."""

    state: StateId


class FetchFailed(NamedTuple):
    """No image came, or none that fits."""

    reason: str


class MeanFetched(NamedTuple):
    """A mean that was missed is there.

    Attributes:
        before: The state that it leads on from.
        digest: The outcome's.
        counted: Whether this peer's contribution is in it.
    """

    before: StateId
    digest: str
    counted: bool


class RecoveryFailed(NamedTuple):
    """That mean is not to be had; unless all peers have `decided` so, some of them may still be in its round."""

    reason: str
    decided: bool = True


class OthersBegun(NamedTuple):
    """Other peers train already, for longer than this peer knows of."""


class Overdue(NamedTuple):
    """No peer has joined this peer's round for a while: the others may be further, or have ended."""


class Deserted(NamedTuple):
    """No other peer of the run is known any more; some may have left means behind that this peer missed."""


class Stopped(NamedTuple):
    """The download has been stopped; means that were fetched and not applied are given up."""


class Ending(NamedTuple):
    """This peer will make no more updates: is its state the group's last?"""


class Due(NamedTuple):
    """An update is due; `company` says whether any other peer is known."""

    company: bool


class SteppedAlone(NamedTuple):
    """This peer applied what it had itself; `digest` is of that."""

    digest: str


class Checked(NamedTuple):
    """The parameters have this digest now."""

    digest: str


class Interrupted(NamedTuple):
    """An update, or a load, has raised half-way; the means that were held are given up."""


Event = (
    RoundSucceeded
    | RoundFailed
    | ImageFetched
    | FetchFailed
    | MeanFetched
    | RecoveryFailed
    | OthersBegun
    | Overdue
    | Deserted
    | Stopped
    | Ending
    | Due
    | SteppedAlone
    | Checked
    | Interrupted
)


class Apply(NamedTuple):
    """Apply the mean that leads on from this state: the last round's, or one that was held."""

    before: StateId


class Check(NamedTuple):
    """Say what digest the parameters have (`Checked`)."""


class Hold(NamedTuple):
    """Keep the mean of the round that has just ended: it leads on from this state."""

    before: StateId


class Keep(NamedTuple):
    """Keep the mean that has just been fetched: it leads on from this state."""

    before: StateId


class DropGiven(NamedTuple):
    """Forget what was given to the round that failed: it is in the mean."""


class Forget(NamedTuple):
    """The mean that leads on from this state is no longer wanted."""

    before: StateId


class Fetch(NamedTuple):
    """Get an image of this epoch or a later one."""

    at_least: int


class Recover(NamedTuple):
    """Get the mean that the group applied to this state."""

    after: StateId


class Load(NamedTuple):
    """Load the image that was fetched."""


class Meet(NamedTuple):
    """Take part in a round."""


class StepAlone(NamedTuple):
    """Apply what this peer has accumulated itself."""


Action = Apply | Check | Hold | Keep | DropGiven | Forget | Fetch | Recover | Load | Meet | StepAlone
