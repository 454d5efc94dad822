"""The events of the matchmaking machine (past tense), and its actions (imperative)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking.messages import MAX_PATIENCE, MatchmakingMessage
from equipoise.averaging.metrics import Report, Values
from equipoise.averaging.ports import Candidate
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT


class CandidatesSeen(msgspec.Struct, frozen=True):
    """The directory was read, as it is several times a second: the peers of the run."""

    candidates: Sequence[Candidate]


class BecameReady(msgspec.Struct, frozen=True):
    """This peer has something to average and wants a group.

    Attributes:
        weight: Of its contribution; 0 observes.
        nonce: 16 fresh random bytes.
        bandwidth: Upload rate, bytes per second; 0 if unknown.
        credential: Data with which others open direct channels to it; empty if it has none.
        dialable: Whether others can open channels to it.
        patience: Seconds after which the caller gives up; 0 to 86,400.
        state: The state of the run that it holds; None if it does not say.
        fit: The metrics of its training.
        evaluation: The scores of that state on its data; None if it has not evaluated it.
    """

    weight: float
    nonce: bytes
    bandwidth: float = 0.0
    credential: bytes = b""
    dialable: bool = True
    patience: float = MAX_PATIENCE
    state: StateId | None = None
    fit: Values = ()
    evaluation: Report | None = None

    @property
    def bound(self) -> StateId | None:
        """See `Join.bound`."""
        return self.state if self.weight > ATTENDANCE_LIMIT else None


class Withdrew(msgspec.Struct, frozen=True):
    """This peer no longer wants a group; any manifest that still comes is ignored."""


class MessageReceived(msgspec.Struct, frozen=True):
    """A message of this run came on a channel whose other end is `peer`."""

    peer: str
    message: MatchmakingMessage


class RoundHeard(msgspec.Struct, frozen=True):
    """`peer` is in a round whose manifest is unknown here: the coordinator may have died before it told all members."""

    peer: str


class PeerLost(msgspec.Struct, frozen=True):
    """No channel to `peer` can be opened, or its process was replaced: messages to it may be lost."""

    peer: str


class Woke(msgspec.Struct, frozen=True):
    """The deadline has passed."""


class RoundEnded(msgspec.Struct, frozen=True):
    """The round that `Form` began is over; `ok` says whether this peer has its mean."""

    round: int
    ok: bool = False


Event = CandidatesSeen | BecameReady | Withdrew | MessageReceived | RoundHeard | PeerLost | Woke | RoundEnded


class Send(msgspec.Struct, frozen=True):
    """Send a message on the open channel to `peer`, else on a new one.

    A peer that cannot be dialled is answered on the channel that it opened. `PeerLost` reports a failure to send.
    """

    peer: str
    message: MatchmakingMessage


class Form(msgspec.Struct, frozen=True):
    """Begin the round of this manifest, which has been checked and has this peer among its members."""

    manifest: Manifest
    reason: str


class Late(msgspec.Struct, frozen=True):
    """End the search: the group that this peer's contribution was made for closed `seconds` before it came."""

    seconds: float
    reason: str


class Decline(msgspec.Struct, frozen=True):
    """Tell `peer`, which sent a manifest, that this peer takes no part in its round."""

    peer: str
    round_id: bytes


class Announce(msgspec.Struct, frozen=True):
    """Publish this peer's state in the directory."""

    ready: bool
    round: int
    reason: str


Action = Send | Form | Late | Decline | Announce
