"""The standing of a daemon in its swarm, as values that `status` shows."""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 4
"""Of everything this package puts on the wire; peers of different versions do not understand each other."""

State = Literal["offline", "searching", "joined", "ready"]

AddressState = Literal[
    "malformed",
    "trying",
    "connected",
    "refused",
    "timeout",
    "unresolved",
    "no network",
    "wrong peer",
    "other version",
    "not admitted",
    "failed",
]


ReachState = Literal["unknown", "direct", "relayed", "unreachable"]
"""The way to a peer: nobody has tried yet, by dialling it, through a relay, or none at all."""


class BootstrapStatus(msgspec.Struct, frozen=True):
    """The standing of one way into the swarm.

    Attributes:
        address: The address as given to `--join`; the PeerID of a peer met before.
        state: The result of the last attempt.
        reason: The same in words, one line.
        attempts: How often it has been tried since it was last connected.
        next_attempt: Seconds until it is tried again; None while it is connected, or being tried.
    """

    address: str
    state: AddressState
    reason: str
    attempts: int
    next_attempt: float | None = None


class DirectStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of direct channels.

    Attributes:
        channel: How this peer has frames carried where it dials: `aead` or `tls`.
        listening: Where others reach this peer's direct channels, `host:port`; empty in client mode.
        channels: Number of open ones.
        refused: Connections and credentials that were refused, by reason.
        last_refusal: The latest of them in words, one line; empty before there is one.
    """

    channel: str
    listening: tuple[str, ...] = ()
    channels: int = 0
    refused: dict[str, int] = {}
    last_refusal: str = ""


class RelayStatus(msgspec.Struct, frozen=True):
    """A snapshot of the relaying for others.

    Attributes:
        bandwidth: Bytes a second at most, all circuits together.
        reservations: Peers that may be reached through this one.
        circuits: Connections that go through it now.
        bytes: Bytes that it has relayed.
        refused: Requests that it has refused.
    """

    bandwidth: float
    reservations: int
    circuits: int
    bytes: int
    refused: int


class ReachStatus(msgspec.Struct, frozen=True):
    """The way in which others reach this peer.

    Attributes:
        state: How.
        reason: Why, one line.
        relays: PeerIDs of the relays that others reach it through.
        relaying: What it relays for others; None if it does not.
    """

    state: ReachState
    reason: str
    relays: tuple[str, ...] = ()
    relaying: RelayStatus | None = None


class SwarmStatus(msgspec.Struct, frozen=True):
    """One snapshot of a swarm's member.

    Attributes:
        state: offline (no libp2p, or no network), searching (no peer met yet), joined, ready (in some run).
        reason: Why, one line.
        peer: Own PeerID.
        addresses: Where others reach this peer, in the form that `--join` takes.
        dialable: Whether others can open connections to this peer.
        bootstrap: Each `--join` address.
        returning: Each peer met before, while this one is alone and tries them again.
        connected: PeerIDs of the peers in contact with this one now, sorted.
        p2pd_pid: Process id of p2pd; None while it is not running.
        p2pd_restarts: How often p2pd has been started again.
        reach: How others reach this peer.
        direct: Its direct channels.
        warnings: What a person should put right, one line each with its next step.
        name: What people call the private swarm; empty in the open one, as are the next four.
        key: The private swarm's public key, in hex.
        role: This member's role there: `trainer`, `observer` or `relay`.
        until: When this member's invitation ends, in seconds since 1970.
        members: PeerIDs of the other members that are admitted here.
    """

    state: State
    reason: str
    peer: str
    addresses: tuple[str, ...]
    dialable: bool
    bootstrap: tuple[BootstrapStatus, ...]
    connected: tuple[str, ...]
    p2pd_pid: int | None
    p2pd_restarts: int
    direct: DirectStatus
    reach: ReachStatus
    warnings: tuple[str, ...] = ()
    returning: tuple[BootstrapStatus, ...] = ()
    name: str = ""
    key: str = ""
    role: str = ""
    until: float = 0.0
    members: tuple[str, ...] = ()
