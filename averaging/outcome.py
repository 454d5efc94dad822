"""Results of rounds and of downloads as values; `RunState` is the state of the next round."""

from __future__ import annotations

import math

import msgspec

from equipoise.averaging.state import StateId, group_state
from equipoise.averaging.weights import ATTENDANCE_LIMIT, shares

SHOWN_CHARS = 8
"""Characters of a PeerID (its last: the first are alike) and of a digest that tell them apart in a line for people."""

MAX_CAPS = 3
"""Most capped contributors that a reason names."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one round, for this member.

    If not ok, this member's tensors are unchanged. The others may still have succeeded: a member that was cut off, or
    stopped, after its contribution was whole may be among the contributors of a mean that the others hold, without
    knowing it. If it contributes the same again in a later round, that contribution counts twice.

    A member asks for the mean until its timeout while it can reach any other, and members that finished answer for some
    seconds. So this happens only to members that reach no majority for a whole stall, or for the rest of the round. It
    cannot be ruled out: with any protocol, the last message may be lost (the two generals; Gray, "Notes on Data Base
    Operating Systems", 1978). A peer that cannot tolerate it takes the group's state after a failed round.

    Attributes:
        ok: Whether the tensors now hold the exact weighted mean over `contributors`; if not they are untouched.
        reason: The reason for the result, one line.
        run: The run's name.
        round: The round's number within the run.
        group: PeerIDs of all members of the group, in member order; empty if no group formed.
        contributors: PeerID -> counted weight, of the members whose contribution is in the mean; empty if not ok. A
            member that only attends is among them, with a weight that changes nothing; `givers` are the others.
        capped: PeerID -> claimed weight, of the contributors that counted for less; see `RunSpec.weights`.
        left_out: PeerIDs of the members that were to contribute and are not in the mean; empty if not ok. `events` says
            by whose word.
        shrunk: PeerID -> factor, of the contributors whose values counted times that, to cap their norm.
        digest: SHA-256 in hex over the round's manifest, contributors and encoded mean; equal on all ok members.
        bytes_sent: Bytes of frames sent for the round.
        bytes_received: Bytes of frames received for the round.
        seconds: Duration by phase: `matchmaking`, `scatter`, `decide`, `gather`, `commit`, `total`. The script
            that asked for the round sees two more, beyond `total`: that of encoding its values (`encode`), and that of
            decoding the mean (`decode`).
        compression_ratio: fp32 bytes over encoded bytes of the vector.
        states: PeerID -> claimed state, of the members that claimed one, whether or not ok.
        drawn: PeerIDs of the peers that were drawn to train for a federated round, by its coordinator's word, in the
            order of the draw; alike at all members.
        events: What went wrong on the way (a peer lost, an owner replaced), one line each, oldest first.
        started: When this member asked for the round, in unix seconds of its own clock.
        apart: For an exchange of two that is ok, their distance before it: the norm of their difference over the norm
            of the mean. None for all other rounds, and beside a newcomer, whose weight is next to nothing.
        metrics: The metrics of the contributors' training, averaged by counted weight; equal on all ok members.
        evaluation: The scores of the state before the round on the data of the members that hold it and reported them,
            averaged by the weights of their reports; equal on all ok members. Both are medians where the run's rule is
            not the mean.
        medians: The lower and the upper median of each number, whatever the reports weigh: of the evaluations, or of
            the training where no evaluation has it; equal on all ok members.
        reports: PeerID -> metrics of its training, and scores of its state, of the members that only attend: none of
            their metrics is in an average. Equal on all ok members.
        late: Seconds by which this peer's contribution came too late for the round that it was made for. The group has
            closed without it, so it counts nowhere. 0 if it was not late. A coordinator says so or, in a federated run,
            the donors of the round's mean, if this peer downloads the mean first.
        faults: PeerID -> why, of members that were lost by their own fault as this one saw it: their values did not
            decode, they owed a share of the mean, or their share was another one than the group's.
        waits: By phase, `matchmaking` or `exchange`: the PeerID of the peer that the others waited for (to join, or for
            its values), which may be this one, and seconds. Only waits of a tenth of a second and of `total` or more.
        in_doubt: Whether this member has voted for a mean that it did not get, so that the others may have it; also
            if its script cannot know, because the daemon was lost after it had begun the round. False if ok.
    """

    ok: bool
    reason: str
    run: str = ""
    round: int = 0
    group: tuple[str, ...] = ()
    contributors: dict[str, float] = {}
    capped: dict[str, float] = {}
    left_out: tuple[str, ...] = ()
    shrunk: dict[str, float] = {}
    digest: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: dict[str, float] = {}
    compression_ratio: float = 1.0
    states: dict[str, StateId] = {}
    drawn: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    started: float = 0.0
    apart: float | None = None
    metrics: dict[str, float] = {}
    evaluation: dict[str, float] = {}
    medians: dict[str, tuple[float, float]] = {}
    reports: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    late: float = 0.0
    in_doubt: bool = False
    waits: dict[str, tuple[str, float]] = {}
    faults: dict[str, str] = {}

    def __bool__(self) -> bool:
        """True if the round is ok."""
        return self.ok

    def __repr__(self) -> str:
        """One line for people: PeerIDs and the digest are shortened."""
        who = ", ".join(f"...{peer[-SHOWN_CHARS:]}: {self.weight(peer)}" for peer in self.givers)
        told = [
            f"<Outcome {'ok' if self.ok else 'failed'}: run {self.run!r}, round {self.round}: {self.reason}",
            *([f"contributors {who}"] if who else []),
            *(["in doubt: the others may hold a mean"] if self.in_doubt else []),
            *([self.waited()] if self.waits else []),
            *([f"digest {self.digest[:SHOWN_CHARS]}"] if self.digest else []),
            *([f"{self.seconds['total']:.3f} s"] if "total" in self.seconds else []),
            *self.events,
        ]
        return "; ".join(told) + ">"

    def weight(self, peer: str) -> str:
        """A contributor's weight, for people: the counted weight, and the claimed weight if that was more."""
        claimed = f" of {self.capped[peer]:g}" if peer in self.capped else ""
        return f"{self.contributors[peer]:g}{claimed}"

    def counted(self, peer: str) -> bool:
        """True if `peer`'s contribution is in the mean."""
        return self.ok and peer in self.contributors

    @property
    def givers(self) -> tuple[str, ...]:
        """PeerIDs of the contributors that count: not of those that only attend, to meet others or to catch up."""
        return tuple(peer for peer, weight in self.contributors.items() if weight > ATTENDANCE_LIMIT)

    @property
    def before(self) -> StateId | None:
        """The state that the mean changes: that of its `givers`, maybe not the group's. None if they claim none."""
        return group_state(filter(None, map(self.states.get, self.givers)))

    @property
    def shares(self) -> list[float]:
        """The shares of the contributors in the mean, in member order, without those of weight 0."""
        counted = {peer: weight for peer, weight in self.contributors.items() if weight}
        return shares(counted.values(), [self.shrunk.get(peer, 1.0) for peer in counted])

    @property
    def tally(self) -> str:
        """The number of members that count, and of those that only attend, for people."""
        count, attend = len(self.givers), len(self.contributors) - len(self.givers)
        if not attend:
            return f"mean over {count} of {len(self.group)} members"
        others = "the other" if attend == count == 1 else f"{attend} others"
        why = f"{others} caught up" if count else "they meet"
        return f"{count} of {len(self.group)} counted, {why}"

    @property
    def caps(self) -> str:
        """The members that counted for less than they claimed, or not, for people; with `; ` before each."""
        told = [f"..{peer[-SHOWN_CHARS:]} counts {self.weight(peer)}" for peer in self.capped]
        told += [
            f"the values of ..{peer[-SHOWN_CHARS:]} count times {by:.3g}" for peer, by in self.shrunk.items()
        ]
        told += [f"without ..{peer[-SHOWN_CHARS:]}" for peer in self.left_out]
        return "".join(f"; {one}" for one in told[:MAX_CAPS])

    def waited(self, me: str = "") -> str:
        """The peers that the round waited for, for people; empty if it waited for none."""
        told = []
        for phase, (peer, seconds) in self.waits.items():
            one = "this peer" if peer == me else f"..{peer[-SHOWN_CHARS:]}"
            whom = f"{one} to join" if phase == "matchmaking" else f"the values of {one}"
            told.append(f"waited {seconds:.2f} s for {whom}")
        return ", ".join(told)

    @property
    def state(self) -> StateId | None:
        """The group's state: the most common of `states`, computed alike by all members; None without claims."""
        return group_state(self.states.values())


class FetchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a download.

    Attributes:
        ok: Whether the memory now holds the snapshot's image, or the encoded mean, every byte of it proved.
        reason: The reason for the result, in one line.
        state: The state of the snapshot, or the state before the mean; None if not ok.
        size: Bytes of the image or the mean.
        sources: PeerID -> bytes that came from it.
        seconds: Time from the first question to the last byte.
        voters: PeerIDs of all peers that had a vote on which snapshot to take, whether they offered one or not.
        behind: After a failed search for a mean: number of peers that are not as far as this one.
        unheard: After a failed search for a mean: number of peers that have not said whether they have it.
        beyond: After a failed search for a mean: the later epoch that most peers of the circle have reached, or 0.
        age: Of a mean: seconds since the group of its round closed, by the word of its donors.
        round: Of a mean: the outcome of its round, as its members see it; None if not ok.
    """

    ok: bool
    reason: str
    state: StateId | None = None
    size: int = 0
    sources: dict[str, int] = {}
    seconds: float = 0.0
    voters: tuple[str, ...] = ()
    behind: int = 0
    unheard: int = 0
    beyond: int = 0
    age: float = 0.0
    round: Outcome | None = None


class NoPeers(msgspec.Struct, frozen=True, tag=True):
    """No other peer of the run is known."""

    reason: str = "no other peer of this run is known"


class Gathering(msgspec.Struct, frozen=True, tag=True):
    """Waiting for a group: `ready` of `target` peers are ready.

    In a federated run, `drawn` are the PeerIDs of the peers that are to train, in the order of the draw, and
    `contributed` those whose contributions are in.
    """

    ready: int
    target: int
    reason: str = ""
    drawn: tuple[str, ...] = ()
    contributed: tuple[str, ...] = ()


class Exchanging(msgspec.Struct, frozen=True, tag=True):
    """A round is going on in a group of `members` peers."""

    members: int
    round: int


class Idle(msgspec.Struct, frozen=True, tag=True):
    """No round is wanted now; `peers` others are known."""

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
