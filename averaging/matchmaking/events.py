"""The events of the matchmaking machine (past tense), and its actions (imperative)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.matchmaking.messages import MAX_PATIENCE, MatchmakingMessage
from equipoise.averaging.outcome import Outcome
from equipoise.limits import Candidate


class CandidatesSeen(msgspec.Struct, frozen=True):
    """The directory was read, as it is several times a second: the peers of the run."""

    candidates: Sequence[Candidate]


class BecameReady(msgspec.Struct, frozen=True):
    """This peer has something to average and wants a group, or states its join anew while it seeks one.

    Attributes:
        join: Its statement about itself. `Context.join` adds the round's number and the signature.
        patience: Seconds after which the caller gives up; 0 to 86,400.
    """

    join: Join
    patience: float = MAX_PATIENCE


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
    """The round that `Form` began is over.

    Attributes:
        round: Its number.
        ok: Whether this peer has its mean.
        faults: See `Outcome.faults`.
    """

    round: int
    ok: bool = False
    faults: dict[str, str] = {}


class MeanHeld(msgspec.Struct, frozen=True):
    """This peer has the mean of a round, from the round itself or from others; `outcome` says who made it."""

    outcome: Outcome


Event = (
    CandidatesSeen
    | BecameReady
    | Withdrew
    | MessageReceived
    | RoundHeard
    | PeerLost
    | Woke
    | RoundEnded
    | MeanHeld
)


class Send(msgspec.Struct, frozen=True):
    """Send a message on the open channel to `peer`, else on a new one.

    A peer that cannot be dialled is answered on the channel that it opened. `PeerLost` reports a failure to send.
    """

    peer: str
    message: MatchmakingMessage


class Form(msgspec.Struct, frozen=True):
    """Begin the round of this manifest, which has been checked and has this peer among its members.

    By the coordinator's word, the group waited for the peer `last`, for `waited` seconds.
    """

    manifest: Manifest
    reason: str
    last: str | None = None
    waited: float = 0.0


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


Action = Send | Form | Late | Decline | Announce
