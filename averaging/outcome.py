"""Results of rounds and of downloads as values; `RunState` says where the next round stands."""

from __future__ import annotations

import math

import msgspec

from equipoise.averaging.state import StateId, group_state

SHOWN_CHARS = 8
"""Characters of a PeerID, and of a digest, that tell them apart in a line for people."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one round, for this member.

    Not ok says that this member's tensors are as they were. It does not say that the others failed too: a member that
    was cut off, or stopped, after its contribution was whole may be among the contributors of a mean that the others
    hold and that it never learnt of. To contribute the same again in a later round counts it twice there.

    While a member can reach anyone it asks for the mean until its timeout, and those that finished answer for some
    seconds, so this befalls only members that reach no majority for a whole stall, or for the rest of the round. It
    cannot be ruled out: whatever is agreed, the last message may be the one that is lost (the two generals; Gray,
    "Notes on Data Base Operating Systems", 1978). A peer that cannot bear it takes the group's state after a failed
    round.

    Attributes:
        ok: Whether the tensors now hold the exact weighted mean over `contributors`; if not they are untouched.
        reason: Why it ended so, one line.
        run: The run's name.
        round: The round's number within the run.
        group: PeerIDs of all members of the group, in member order; empty if none formed.
        contributors: PeerID -> weight of those whose contribution is in the mean, as it counted; empty if not ok.
        capped: PeerID -> weight that it claimed, of the contributors that counted as less; see `RunSpec.weights`.
        digest: SHA-256 in hex over the round's manifest, contributors and encoded mean; equal on all ok members.
        bytes_sent: Bytes of frames sent for the round.
        bytes_received: Bytes of frames received for the round.
        seconds: Duration by phase: `matchmaking`, `scatter`, `decide`, `gather`, `commit`, `total`.
        compression_ratio: fp32 bytes over encoded bytes of the vector.
        states: PeerID -> state that it said it holds, of the members that said one, whether or not ok.
        events: What went wrong on the way (a peer lost, an owner replaced), one line each, oldest first.
        started: When this member asked for the round, in unix seconds of its own clock.
        apart: Of an exchange of two that is ok, how far they were apart before: the norm of their difference over that
            of the mean; else None.
        in_doubt: Whether this member has voted for a mean that it did not get, so that the others may have it. Never so
            where ok.
    """

    ok: bool
    reason: str
    run: str = ""
    round: int = 0
    group: tuple[str, ...] = ()
    contributors: dict[str, float] = {}
    capped: dict[str, float] = {}
    digest: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: dict[str, float] = {}
    compression_ratio: float = 1.0
    states: dict[str, StateId] = {}
    events: tuple[str, ...] = ()
    started: float = 0.0
    apart: float | None = None
    in_doubt: bool = False

    def __bool__(self) -> bool:
        """True if it is ok."""
        return self.ok

    def __repr__(self) -> str:
        """One line for people: PeerIDs and the digest are shortened."""
        who = ", ".join(f"...{peer[-SHOWN_CHARS:]}: {self.weight(peer)}" for peer in self.contributors)
        told = [
            f"<Outcome {'ok' if self.ok else 'failed'}: run {self.run!r}, round {self.round}: {self.reason}",
            *([f"contributors {who}"] if who else []),
            *(["in doubt: the others may hold a mean"] if self.in_doubt else []),
            *([f"digest {self.digest[:SHOWN_CHARS]}"] if self.digest else []),
            *([f"{self.seconds['total']:.3f} s"] if "total" in self.seconds else []),
            *self.events,
        ]
        return "; ".join(told) + ">"

    def weight(self, peer: str) -> str:
        """A contributor's weight, for people: what counted, and what it claimed if that was more."""
        claimed = f" of {self.capped[peer]:g}" if peer in self.capped else ""
        return f"{self.contributors[peer]:g}{claimed}"

    def counted(self, peer: str) -> bool:
        """True if `peer`'s contribution is in the mean."""
        return self.ok and peer in self.contributors

    @property
    def state(self) -> StateId | None:
        """The group's state: the most common of `states`, which all members compute alike; None if none said one."""
        return group_state(self.states.values())


class FetchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a download.

    Attributes:
        ok: Whether the memory now holds the image, every byte of it proved.
        reason: Why it ended so, in one line.
        state: What the image is a snapshot of; None if not ok.
        size: Bytes of the image.
        sources: PeerID -> bytes that came from it.
        seconds: From the first question to the last byte.
        behind: Of a mean that is not to be had: how many peers are not as far as this one.
        unheard: Of one: how many peers have not said whether they have it.
    """

    ok: bool
    reason: str
    state: StateId | None = None
    size: int = 0
    sources: dict[str, int] = {}
    seconds: float = 0.0
    behind: int = 0
    unheard: int = 0


class MeanOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search for a mean that was missed.

    Attributes:
        round: The round's outcome, as its members see it; not ok if its mean is not to be had.
        sources: PeerID -> bytes that came from it.
        behind: If not ok: how many peers are not as far as this one.
        unheard: If not ok: how many have not said whether they have it: a round may still be going on there.
    """

    round: Outcome
    sources: dict[str, int] = {}
    behind: int = 0
    unheard: int = 0


class NoPeers(msgspec.Struct, frozen=True, tag=True):
    """No other peer of the run is known."""

    reason: str = "no other peer of this run is known"


class Gathering(msgspec.Struct, frozen=True, tag=True):
    """Waiting for a group: `ready` of `target` peers are ready."""

    ready: int
    target: int
    reason: str = ""


class Exchanging(msgspec.Struct, frozen=True, tag=True):
    """A round is going on in a group of `members` peers."""

    members: int
    round: int


class Idle(msgspec.Struct, frozen=True, tag=True):
    """Nothing is asked of the run now; `peers` others are known."""

    peers: int


RunState = NoPeers | Gathering | Exchanging | Idle


def check_weight(weight: float) -> float:
    """Return `weight` as a float.

    Raises:
        ValueError: It is not a finite number >= 0.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"expected a weight that is a finite number >= 0, got {weight!r}")
    return float(weight)
