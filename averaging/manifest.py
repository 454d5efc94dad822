"""The group of one round: the joins that members sign, and the manifest made of them.

A coordinator collects signed joins. It can leave a member out, but it cannot speak for a member. The hash of the
manifest is the round's id, so members that got different manifests notice before they exchange a value.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

import msgspec

from equipoise.averaging.metrics import Report, Values
from equipoise.averaging.options import MAX_GROUP_SIZE, Needs
from equipoise.averaging.outcome import check_weight
from equipoise.averaging.state import StateId, group_state
from equipoise.averaging.weights import (
    ATTENDANCE_LIMIT,
    LEAST_CONTRIBUTION,
    MAX_WEIGHT,
    Weight,
    contributing,
)
from equipoise.limits import MAX_BANDWIDTH, MAX_CREDENTIAL_BYTES

MAX_PEER_CHARS = 64
"""Longest PeerID in base58: today's PeerIDs have 46 to 52 characters."""

MAX_ROUND = 2**53
"""Highest number of a round, which every msgpack reader can represent. No run gets there: from the highest number that
others can cause (`matchmaking.membership.MAX_JUMP`), a thousand skipped rounds a second take 285 years."""

NONCE_BYTES = 16
"""Length of a nonce: two joins of one peer must never be equal by chance."""

MAX_SIGNATURE_BYTES = 512
"""Longest signature: Ed25519 takes 64 bytes; RSA-4096 identities, which libp2p knows too, 512."""

WEIGHT_ERROR = 1e-6
"""Part of a run's `total` by which the sum of weights may differ: they are sums of floats, and some only attend."""

MAX_SUSPECTS = 4
"""Most peers that a join blames: 64 joins must fit into one header."""

ROUND_ID_BYTES = 16
DIMENSIONS = 16
"""Numbers of a sketch of a contribution (`sketch.sketch`)."""

SKETCH_BYTES = 2 * DIMENSIONS

UNIT = 4096
"""The length of a sketch, in steps of its numbers, i16."""

NEAR = 0.04
"""The distance of two sketches, of length 1, below which the contributions are nearly equal. Where int8 carries them,
gradients of the text model for one batch in bf16 and in fp32 are .005 to .044 apart; those for different batches .05 in
a first step of 16,384 tokens, .14 in one of 1,024, and from the sixth step on .26 or more."""

TICKET_BYTES = 8
"""Length of a ticket: enough to tell one peer's few joins apart. No decision trusts a ticket."""

DOMAIN = b"equipoise join 1\0"
"""Prefix of signed joins: no other bytes that an identity signs begin with it."""

PeerName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PEER_CHARS, pattern=r"\A[!-~]+\Z")]
SpecHash = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
RoundNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROUND)]
Bandwidth = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_BANDWIDTH)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_SIGNATURE_BYTES)]
Credential = Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)]
Norm = Annotated[float, msgspec.Meta(ge=0.0)]
Sketch = Annotated[bytes, msgspec.Meta(max_length=SKETCH_BYTES)]
Ticket = Annotated[bytes, msgspec.Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]

Sign = Callable[[bytes], bytes]
"""Signs with this peer's identity key."""

Verify = Callable[[str, bytes, bytes], bool]
"""(peer, data, signature) -> whether the identity key behind that PeerID signed the data."""


RoleOf = Callable[[str], str]
"""PeerID -> its role: `trainer`, `observer` (weight 0, no share) or `relay` (no run); or `banned`, which joins nothing
with this peer."""


class Identity(Protocol):
    """Signs what this peer says, and checks what others say."""

    def role(self, peer: str) -> str:
        """Return the role that an invitation gives `peer`."""

    def sign(self, data: bytes) -> bytes:
        """Sign with this peer's identity key."""

    def verify(self, peer: str, data: bytes, signature: bytes) -> bool:
        """Return whether the key behind `peer` signed `data`."""


class ManifestError(ValueError):
    """A peer must not act on a manifest; the message says what was expected and what came."""


class Join(msgspec.Struct, frozen=True, array_like=True):
    """One member's statement about itself for one round, signed by its identity key.

    Attributes:
        peer: The member's PeerID.
        spec: Hash of its RunSpec in hex.
        round: Number of the round that it joins.
        weight: Weight of its contribution; 0 observes.
        bandwidth: Upload rate, bytes per second; 0 if unknown.
        dialable: Whether others can open channels to it.
        nonce: 16 random bytes, new each time it becomes ready.
        credential: Data to open direct channels with it; the transport checks it. Empty if the member has none.
        state: The state of the run that it holds; None if it claims none, such as a newcomer or a peer of `average`.
        signature: Signature over all other fields.
        fit: The metrics of its training; they count with the weight of its contribution.
        evaluation: The scores of the state that it holds on its data; None if it has not evaluated it.
        sketch: `sketch.sketch` of its contribution; empty if that is not compared with the others'.
        download: Download rate, bytes per second; 0 if unknown, and then taken to be the upload rate.
        norm: The 2-norm of its contribution; infinite if unsaid.
        suspects: PeerIDs of peers that it blames for faults in rounds; see `deeds`.
    """

    peer: PeerName
    spec: SpecHash
    round: RoundNumber
    weight: Weight
    bandwidth: Bandwidth
    dialable: bool
    nonce: Nonce
    credential: Credential
    state: StateId | None
    signature: Signature
    fit: Values = {}
    evaluation: Report | None = None
    sketch: Sketch = b""
    download: Bandwidth = 0.0
    norm: Norm = math.inf
    suspects: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_SUSPECTS)] = ()

    def signed(self, sign: Sign) -> Join:
        """Return the join with its signature; the configuration and the transport bound the other values.

        Raises:
            ValueError: The caller's weight is out of its range.
        """
        if check_weight(self.weight) > MAX_WEIGHT:
            raise ValueError(f"expected a weight of at most {MAX_WEIGHT:g}, got {self.weight!r}")
        rates = {"bandwidth": float(self.bandwidth), "download": float(self.download)}
        unsigned = msgspec.structs.replace(self, weight=float(self.weight), **rates)
        return msgspec.structs.replace(unsigned, signature=sign(unsigned.content))

    @property
    def content(self) -> bytes:
        """The signed bytes."""
        return DOMAIN + msgspec.msgpack.encode(msgspec.structs.replace(self, signature=b""))

    @property
    def bound(self) -> StateId | None:
        """The state that the contribution was made for; None if it adds nothing, or fits any state."""
        return self.state if self.weight > ATTENDANCE_LIMIT else None

    @property
    def ticket(self) -> bytes:
        """8 bytes that name this join in answers to it."""
        return hashlib.sha256(self.content).digest()[:TICKET_BYTES]

    def breach(self, role: str) -> str:
        """Return what a peer of this role may not join with, one line; empty if it may join so."""
        if role == "banned":
            return f"{self.peer} is banned by this daemon"
        if role == "relay":
            return f"{self.peer} was invited as a relay, which joins no run"
        if role == "observer" and (self.weight > ATTENDANCE_LIMIT or self.dialable):
            return f"{self.peer} was invited as an observer, with weight 0 and no share; it claims {self.weight:g}"
        return ""

    def is_near(self, other: Join) -> bool:
        """Whether the two contributions are nearly equal."""
        alike = self.norm == other.norm or math.isclose(self.norm, other.norm, rel_tol=NEAR)
        return alike and are_near(self.sketch, other.sketch)

    def genuine(self, verify: Verify) -> bool:
        """True if the named peer signed this join."""
        return verify(self.peer, self.content, self.signature)


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The members of one round's group.

    Attributes:
        spec: Hash of the RunSpec in hex, and of the protocol's version with it.
        round: The round's number.
        coordinator: PeerID of the peer that put it together; not always a member.
        members: Their joins, sorted by PeerID.
        drawn: PeerIDs of the peers that were drawn to train for a federated round, in the order of the draw; members or
            not. The coordinator's word.
    """

    spec: SpecHash
    round: RoundNumber
    coordinator: PeerName
    members: Annotated[tuple[Join, ...], msgspec.Meta(min_length=2, max_length=MAX_GROUP_SIZE)]
    drawn: Annotated[tuple[PeerName, ...], msgspec.Meta(max_length=MAX_GROUP_SIZE)] = ()

    @classmethod
    def of(cls, coordinator: str, joins: list[Join], drawn: tuple[str, ...] = ()) -> Manifest:
        """Put joins of one spec and one round together."""
        members = tuple(sorted(joins, key=lambda join: join.peer))
        return cls(members[0].spec, members[0].round, coordinator, members, drawn)

    @property
    def states(self) -> dict[str, StateId]:
        """PeerID -> claimed state, of the members that claim one."""
        return {join.peer: join.state for join in self.members if join.state is not None}

    @property
    def before(self) -> StateId | None:
        """The state that the round's mean changes: of most contributions to a state or, without any, of most claims.
        None without claims."""
        return self._bound or group_state(self.states.values())

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each member; 0 if its contribution was made for another state than `before`: it observes."""
        bound = self._bound
        fits = (bound in (None, join.state) or join.weight <= ATTENDANCE_LIMIT for join in self.members)
        return tuple(join.weight if fit else 0.0 for join, fit in zip(self.members, fits, strict=True))

    @property
    def _bound(self) -> StateId | None:
        """The state of most contributions. Claims of members that only attend do not count: they would cost nothing."""
        return group_state(filter(None, (join.bound for join in self.members)))

    @property
    def twins(self) -> set[tuple[str, str]]:
        """PeerIDs of members with nearly equal contributions: each of them with the first such member."""
        given = [join for join in self.members if join.sketch]
        firsts = (next(one for one in given if one is join or one.is_near(join)) for join in given)
        return {(one.peer, join.peer) for one, join in zip(firsts, given, strict=True) if one is not join}

    def peers_of(self, state: StateId | None) -> tuple[str, ...]:
        """PeerIDs of the members that claim this state, in member order; with None, of those that claim none."""
        return tuple(join.peer for join in self.members if join.state == state)

    @property
    def id(self) -> bytes:
        """The round's id: 16 bytes of SHA-256 over the manifest in msgpack, whose maps keep their order."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:ROUND_ID_BYTES]

    @property
    def peers(self) -> tuple[str, ...]:
        """PeerIDs in member order."""
        return tuple(join.peer for join in self.members)

    def check(
        self,
        verify: Verify,
        *,
        spec: str,
        needs: Needs,
        own: Join | None,
        role: RoleOf = lambda peer: "trainer",
    ) -> None:
        """Refuse a manifest that this peer must not act on.

        Args:
            verify: Checks the signature of each join except the own.
            spec: Hash of this peer's RunSpec.
            needs: The needs of a group of the run.
            own: The join that must be among the members, unaltered; None for a manifest of others.
            role: The roles of the members.

        Raises:
            ManifestError: Naming the first thing that is wrong.
        """
        if problem := self._misfit(spec, needs.group_size) or shortfall(self.members, needs):
            raise ManifestError(problem)
        if own is not None and own not in self.members:
            raise ManifestError(
                f"expected this peer's own join of round {own.round} unaltered, it is not there"
            )
        for join in self.members:
            if not join.genuine(verify):
                raise ManifestError(f"expected a join signed by {join.peer}, the signature is not its own")
            if breach := join.breach(role(join.peer)):
                raise ManifestError(breach)

    def _misfit(self, spec: str, group_size: int) -> str:
        """Return the first fault of the manifest's form, one line; empty if the form is right."""
        if self.spec != spec:
            return f"expected the spec {spec[:12]}, got {self.spec[:12]}"
        if not 2 <= len(self.members) <= group_size:
            return f"expected 2 to {group_size} members, got {len(self.members)}"
        if any(first >= second for first, second in itertools.pairwise(self.peers)):
            return "expected members sorted by PeerID, each once, they are not"
        if len(set(self.drawn)) < len(self.drawn):
            return "expected each drawn peer once, one is there twice"
        for join in self.members:
            if (join.spec, join.round) != (self.spec, self.round):
                return f"expected joins of this spec and round {self.round}, {join.peer}'s differs"
        return ""


def shortfall(joins: Sequence[Join], needs: Needs) -> str:
    """Return what these joins lack for a group whose round can succeed; empty if nothing."""
    quorum, least = needs.quorum, needs.least
    contributors = contributing([join.weight for join in joins], least).bit_count()
    if contributors < quorum:
        are, above = "is" if contributors == 1 else "are", f"of at least {least:g}" if least else "above 0"
        return f"expected at least {quorum} members with a weight {above}, there {are} {contributors}"
    weight, total = math.fsum(join.weight for join in joins), needs.total
    if total and weight > LEAST_CONTRIBUTION and abs(weight - total) > WEIGHT_ERROR * total:
        return f"expected weights that sum to {total:g}, they sum to {weight:.7g}"
    norms = [join.norm for join in joins if join.weight > ATTENDANCE_LIMIT and 0 < join.norm < math.inf]
    if norms and max(norms) > needs.apart * min(norms):
        return (
            f"expected norms at most {needs.apart:g} times apart, got {min(norms):.3g} and {max(norms):.3g}"
        )
    if not any(join.dialable for join in joins):
        return "expected at least 1 member that the others can dial, got 0"
    return ""


def are_near(first: bytes, second: bytes) -> bool:
    """Whether two sketches are those of nearly equal contributions; an empty one is near no other."""
    if not len(first) == len(second) == SKETCH_BYTES:
        return False
    pairs = zip(_numbers.unpack(first), _numbers.unpack(second), strict=True)
    return bool(sum((one - other) ** 2 for one, other in pairs) < (NEAR * UNIT) ** 2)


_numbers = struct.Struct(f"<{DIMENSIONS}h")
