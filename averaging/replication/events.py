"""The events of a `Follower`, in the past tense, and its actions, in the imperative."""

from __future__ import annotations

import msgspec

from equipoise.averaging.outcome import FetchOutcome, Outcome
from equipoise.averaging.state import StateId


class RoundEnded(msgspec.Struct, frozen=True):
    """A round of this peer ended. If it failed here after a group had formed, the others may hold a mean that it lacks.

    Attributes:
        outcome: The round's outcome.
        missing: If it is ok: number of known peers that might have taken part, and did not.
        elsewhere: Whether a peer that the follower's `Known` awaits is in the run, and has trained.
        most_missed: A peer that missed more means takes a snapshot, which is smaller; None leaves the number as it was.
    """

    outcome: Outcome
    missing: int = 0
    elsewhere: bool = False
    most_missed: int | None = None


class Fetched(msgspec.Struct, frozen=True):
    """The download has ended: with a snapshot, checked, ready to load; with a missed mean; or with neither.

    Attributes:
        outcome: Its outcome, not ok if the snapshot does not fit.
        values: The mean, encoded; the follower never looks at it.
    """

    outcome: FetchOutcome
    values: object = None


class Stopped(msgspec.Struct, frozen=True):
    """The download was stopped."""


class Overdue(msgspec.Struct, frozen=True):
    """No round has come for a while: the others may be at a later state, or have ended.

    Attributes:
        begun: If others have begun to train before this peer: the epoch of the first snapshot that is of use.
        placed: Whether this peer may be in their round; if not, only their answers tell.
    """

    begun: int | None = None
    placed: bool = True


class Deserted(msgspec.Struct, frozen=True):
    """No other peer of the run is known any more; some may have left means behind that this peer missed."""


class Ending(msgspec.Struct, frozen=True):
    """This peer will make no more updates: is its state the group's last?"""


class Due(msgspec.Struct, frozen=True):
    """An update is due.

    Attributes:
        company: Whether any other peer is known.
        placed: Whether this peer has a place in the group; without one it follows the state.
        whole: Whether this peer's contribution could be the update.
    """

    company: bool
    placed: bool = True
    whole: bool = True


class SteppedAlone(msgspec.Struct, frozen=True):
    """This peer applied its own mean, which has this digest."""

    digest: str


class Checked(msgspec.Struct, frozen=True):
    """The parameters now have this digest."""

    digest: str


class Interrupted(msgspec.Struct, frozen=True):
    """An update, or a load, has raised half-way."""


class Written(msgspec.Struct, frozen=True):
    """The script has written to the state, which has this digest now; `reason` says what it wrote, one line."""

    digest: str
    reason: str


OwnEvent = Stopped | Due | Overdue | Deserted | Ending | SteppedAlone | Checked | Interrupted | Written
Event = RoundEnded | Fetched | OwnEvent


class Commit(msgspec.Struct, frozen=True):
    """Apply a mean.

    Attributes:
        before: The state to which the group applied it.
        outcome: The outcome of its round.
        values: The mean, encoded, as it was fetched; None for the mean of the round that has just ended.
    """

    before: StateId
    outcome: Outcome
    values: object = None


class Check(msgspec.Struct, frozen=True):
    """Compute the digest of the parameters, and report `Checked`, after all other actions."""


class FetchSnapshot(msgspec.Struct, frozen=True):
    """Fetch a snapshot of this epoch or a later one."""

    at_least: int


class FetchMean(msgspec.Struct, frozen=True):
    """Fetch the mean that the group applied to this state."""

    after: StateId


class Heal(msgspec.Struct, frozen=True):
    """Load the snapshot that was fetched."""


class Meet(msgspec.Struct, frozen=True):
    """Take part in a round."""


class StepAlone(msgspec.Struct, frozen=True):
    """Apply the mean of this peer's own accumulated gradients, and report `SteppedAlone`."""


Action = Commit | Check | FetchSnapshot | FetchMean | Heal | Meet | StepAlone
