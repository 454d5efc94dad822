"""What the matchmaking machine is told (past tense), and what it asks for (imperative)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.averaging.manifest import Manifest
from equipoise.averaging.matchmaking.messages import MAX_PATIENCE, MatchmakingMessage
from equipoise.averaging.ports import Candidate
from equipoise.averaging.state import StateId


@dataclass(frozen=True, slots=True)
class CandidatesSeen:
    """The directory has answered: the peers of the run."""

    candidates: Sequence[Candidate]


@dataclass(frozen=True, slots=True)
class BecameReady:
    """This peer has something to average and wants a group.

    Attributes:
        weight: Of its contribution; 0 observes.
        nonce: 16 fresh random bytes.
        bandwidth: What it can send, bytes per second; 0 if unknown.
        credential: What others need to open direct channels with it; empty if it has none.
        dialable: Whether others can open channels to it.
        patience: Seconds after which the caller gives up; 0 to 86,400.
        state: Which state of the run it holds; None if it does not say.
    """

    weight: float
    nonce: bytes
    bandwidth: float = 0.0
    credential: bytes = b""
    dialable: bool = True
    patience: float = MAX_PATIENCE
    state: StateId | None = None


@dataclass(frozen=True, slots=True)
class Withdrew:
    """This peer no longer wants a group; any manifest that still comes is ignored."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A message of this run came on a channel whose other end is `peer`."""

    peer: str
    message: MatchmakingMessage


@dataclass(frozen=True, slots=True)
class RoundHeard:
    """`peer` speaks of a round whose manifest has not come here: its coordinator may have died before it told all."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A channel to `peer` broke, could not be opened, or a `Send` to it failed, and no newer channel to it is open."""

    peer: str


@dataclass(frozen=True, slots=True)
class Woke:
    """The deadline has passed."""


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """The round that `Form` began is over, whatever it came to."""

    round: int


Event = CandidatesSeen | BecameReady | Withdrew | MessageReceived | RoundHeard | PeerLost | Woke | RoundEnded


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message, on the channel that is open to `peer` or, if there is none, on a new one.

    A peer that cannot be dialled is answered on the channel it came by. Tell `PeerLost` if it cannot be sent.
    """

    peer: str
    message: MatchmakingMessage


@dataclass(frozen=True, slots=True)
class Form:
    """Begin the round of this manifest, which has been checked and has this peer among its members."""

    manifest: Manifest
    reason: str


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell `peer`, which sent a manifest, that this peer takes no part in its round."""

    peer: str
    round_id: bytes


@dataclass(frozen=True, slots=True)
class Announce:
    """Publish this peer's state in the directory."""

    ready: bool
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the directory, and tell `CandidatesSeen` when it has answered; not again while one is going on."""

    reason: str


Action = Send | Form | Decline | Announce | LookUp
