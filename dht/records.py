"""Readiness records: what a peer says of itself in a run, signed with the key that its PeerID contains.

On the wire a record is msgpack `{payload, signature}`, payload being the msgpack of `Readiness`, a map whose unknown
fields are ignored. The signature covers a domain, the run and the payload. Nothing in a record is believed
beyond its author's own state: shapes, weights and manifests are agreed elsewhere.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Annotated, NamedTuple

import msgspec

from equipoise.dht.address import MAX_ADDRESS_CHARACTERS
from equipoise.dht.identity import Identity, verify
from equipoise.dht.sanitize import Malformed, decode, printable
from equipoise.dht.state import PROTOCOL_VERSION, Part, ReachState

MAX_RECORD_BYTES = 4096
"""A usual record takes 1,100 bytes; four long addresses, a long reason and the largest credential fit."""
MAX_TTL_SECONDS = 60.0
"""How long anybody keeps a record after its first arrival, whatever it asks for."""
MAX_RUN_BYTES = 128
MAX_REASON_CHARACTERS = 200
MAX_WHY_CHARACTERS = 160
MAX_PROGRAM_CHARACTERS = 64
MAX_NAME_CHARACTERS = 64
MAX_SPEC_CHARACTERS = 128
"""Hex of a hash of at most 512 bits."""
MAX_ADDRESSES = 4
MAX_CREDENTIAL_BYTES = 1024
"""Equal to `direct.credential.MAX_CREDENTIAL_BYTES`, which this light module does not import; checked by a test."""
MAX_SEQUENCE = 2**63 - 1
MAX_RUNS_PER_PEER = 128
"""Runs that one peer may have records in: 64 sessions of a daemon, with a run for each of their two purposes."""
SHARDS = 4
"""A run's records are spread over so many keys: one key with 300 records takes 0.3 s to read."""

Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...],
    msgspec.Meta(max_length=MAX_ADDRESSES),
]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCE)]
_Finite = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]

_DOMAIN = "readiness"


class RecordError(ValueError):
    """A record is refused; the message says why, in one line."""


class Forged(RecordError):
    """A record is not signed by the peer that it names; nobody who verifies records passes such a one on."""


class Readiness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one peer says of itself in one run.

    Attributes:
        version: `PROTOCOL_VERSION` of its author.
        peer: PeerID of its author.
        run: Name of the run.
        sequence: Grows with every record of the author, over restarts.
        state: `ready` waits for a group now, `joined` computes, `left` has left the run and serves what it kept,
            `offline` has left the run.
        spec: Hash of its RunSpec in hex.
        reason: Why it is in this state.
        round: Number of its next round.
        accumulated: Weight accumulated towards its next contribution.
        bandwidth: Bytes per second that it can send; 0 if unknown.
        dialable: Whether others can open connections to it.
        reach: How others reach it, as far as it knows.
        why: Why it believes that, one line.
        addresses: Where it listens, in the form that `--join` takes.
        ttl: Seconds after its arrival until it is void.
        issued: The author's idea of the swarm's clock, seconds since 1970.
        program: Name and version of the program.
        name: What people call it.
        credential: What others need to open direct channels with it (`direct.credential`); verified when it is used.
    """

    version: int
    peer: str
    run: str
    sequence: _Count
    state: Part
    ttl: Annotated[float, msgspec.Meta(ge=0, le=MAX_TTL_SECONDS)]
    issued: _Finite
    spec: Annotated[str, msgspec.Meta(max_length=MAX_SPEC_CHARACTERS)] = ""
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)] = ""
    round: _Count = 0
    accumulated: _Finite = 0.0
    bandwidth: _Finite = 0.0
    dialable: bool = False
    reach: ReachState = "unknown"
    why: Annotated[str, msgspec.Meta(max_length=MAX_WHY_CHARACTERS)] = ""
    addresses: Addresses = ()
    program: Annotated[str, msgspec.Meta(max_length=MAX_PROGRAM_CHARACTERS)] = ""
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    credential: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""

    @property
    def ready(self) -> bool:
        """Whether it waits for a group now."""
        return self.state == "ready"

    @property
    def left(self) -> bool:
        """Whether it takes part no more, and serves what it kept."""
        return self.state == "left"


Key = Annotated[bytes, msgspec.Meta(min_length=20, max_length=20)]


class Kept(msgspec.Struct, frozen=True):
    """A record as it travels and is kept.

    Attributes:
        key: DHT key that it belongs under.
        subkey: Its author's PeerID.
        data: Its signed bytes.
        remaining: Seconds until it is void, by whoever passes it on: durations travel, clocks do not.
    """

    key: Key
    subkey: str
    data: bytes
    remaining: float


class _Envelope(msgspec.Struct, frozen=True):
    payload: bytes
    signature: bytes


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_records = msgspec.msgpack.Decoder(Readiness)
_encode = msgspec.msgpack.Encoder().encode


def shard_of(peer: str) -> int:
    """Return the shard that a peer's records belong to."""
    return hashlib.sha256(peer.encode()).digest()[0] % SHARDS


def key_of(run: str, shard: int) -> bytes:
    """Return the 20-byte DHT key of one shard of a run's records."""
    name = f"equipoise/{PROTOCOL_VERSION}/readiness/{shard}/{run}"
    return hashlib.sha256(name.encode()).digest()[:20]


def seal(record: Readiness, identity: Identity) -> bytes:
    """Sign and encode a record; raises RecordError if it breaks a bound."""
    payload = _encode(record)
    _read(payload)
    data = _encode(_Envelope(payload, identity.sign(_DOMAIN, _signed(record.run, payload))))
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"expected a record of at most {MAX_RECORD_BYTES} bytes, got {len(data)}")
    return data


class Claim(NamedTuple):
    """A record whose signature has not been verified."""

    record: Readiness
    payload: bytes
    signature: bytes

    def verify(self) -> Readiness:
        """Return the record; raises Forged if it is not signed by the peer that it names."""
        record = self.record
        if not verify(record.peer, _DOMAIN, _signed(record.run, self.payload), self.signature):
            raise Forged(f"the record is not signed by {printable(record.peer, 64)}")
        return record


def unseal(data: bytes) -> Claim:
    """Decode a record without verifying its signature; raises RecordError if it is malformed, or breaks a bound."""
    try:
        envelope = decode(_envelopes, data, MAX_RECORD_BYTES)
    except Malformed as error:
        raise RecordError(f"malformed record: {error}") from None
    return Claim(_read(envelope.payload), envelope.payload, envelope.signature)


def reread(data: bytes) -> Readiness:
    """Decode a record that was checked and verified before."""
    return _records.decode(_envelopes.decode(data).payload)


def _signed(run: str, payload: bytes) -> bytes:
    name = run.encode()
    return len(name).to_bytes(2, "big") + name + payload


def _read(payload: bytes) -> Readiness:
    """Decode what is signed; its types are its bounds."""
    try:
        record = decode(_records, payload, MAX_RECORD_BYTES)
    except Malformed as error:
        raise RecordError(f"malformed record: {error}") from None
    if record.version != PROTOCOL_VERSION:
        raise RecordError(f"expected protocol version {PROTOCOL_VERSION}, got {record.version}")
    if not 1 <= len(record.run.encode()) <= MAX_RUN_BYTES:
        raise RecordError(f"expected a run's name of 1 to {MAX_RUN_BYTES} bytes")
    return record
