"""Readiness records: what a peer says of itself in a run, signed with the key that its PeerID contains.

On the wire a record is msgpack `{payload, signature}`, payload being the msgpack of `Readiness`, a map whose unknown
fields are ignored. The signature covers a domain, the run and the payload. Nothing in a record is believed
beyond its author's own state: shapes, weights and manifests are agreed elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, NamedTuple

import msgspec

from equipoise.dht import msgpack_guard
from equipoise.dht.address import MAX_ADDRESS_CHARACTERS
from equipoise.dht.escaping import printable
from equipoise.dht.identity import Identity, verify
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
    sequence: int
    state: Part
    ttl: float
    issued: float
    spec: str = ""
    reason: str = ""
    round: int = 0
    accumulated: float = 0.0
    bandwidth: float = 0.0
    dialable: bool = False
    reach: ReachState = "unknown"
    why: str = ""
    addresses: tuple[str, ...] = ()
    program: str = ""
    name: str = ""
    credential: bytes = b""

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


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_readiness = msgspec.msgpack.Decoder(Readiness).decode
_encode = msgspec.msgpack.Encoder().encode


def shard_of(peer: str) -> int:
    """Return the shard that a peer's records belong to."""
    return hashlib.sha256(peer.encode()).digest()[0] % SHARDS


def key_of(run: str, shard: int) -> bytes:
    """Return the 20-byte DHT key of one shard of a run's records."""
    name = f"equipoise/{PROTOCOL_VERSION}/readiness/{shard}/{run}"
    return hashlib.sha256(name.encode()).digest()[:20]


def seal(record: Readiness, identity: Identity) -> bytes:
    """Sign and encode a record.

    Raises:
        RecordError: It breaks a bound.
    """
    _check(record)
    payload = _encode(record)
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
        """Return the record.

        Raises:
            Forged: It is not signed by the peer that it names.
        """
        record = self.record
        if not verify(record.peer, _DOMAIN, _signed(record.run, self.payload), self.signature):
            raise Forged(f"the record is not signed by {printable(record.peer, 64)}")
        return record


def unseal(data: bytes) -> Claim:
    """Decode a record and check its bounds, but not yet its signature.

    Raises:
        RecordError: It is malformed, or breaks a bound.
    """
    try:
        msgpack_guard.check(data, MAX_RECORD_BYTES)
        envelope = _decode_envelope(data)
        msgpack_guard.check(envelope.payload, MAX_RECORD_BYTES)
        record = _decode_readiness(envelope.payload)
    except (msgspec.MsgspecError, msgpack_guard.Unsafe, UnicodeDecodeError) as error:
        raise RecordError(f"malformed record: {printable(str(error))}") from None
    _check(record)
    return Claim(record, envelope.payload, envelope.signature)


def reread(data: bytes) -> Readiness:
    """Decode a record that was checked and verified before."""
    return _decode_readiness(_decode_envelope(data).payload)


def _signed(run: str, payload: bytes) -> bytes:
    name = run.encode()
    return len(name).to_bytes(2, "big") + name + payload


def _check(record: Readiness) -> None:
    if record.version != PROTOCOL_VERSION:
        raise RecordError(f"expected protocol version {PROTOCOL_VERSION}, got {record.version}")
    if not 1 <= len(record.run.encode(errors="replace")) <= MAX_RUN_BYTES:
        raise RecordError(f"expected a run's name of 1 to {MAX_RUN_BYTES} bytes")
    for name, limit in (
        ("reason", MAX_REASON_CHARACTERS),
        ("why", MAX_WHY_CHARACTERS),
        ("program", MAX_PROGRAM_CHARACTERS),
        ("name", MAX_NAME_CHARACTERS),
        ("spec", MAX_SPEC_CHARACTERS),
    ):
        if len(getattr(record, name)) > limit:
            raise RecordError(f"expected a {name} of at most {limit} characters")
    if len(record.credential) > MAX_CREDENTIAL_BYTES:
        raise RecordError(f"expected a credential of at most {MAX_CREDENTIAL_BYTES} bytes")
    if len(record.addresses) > MAX_ADDRESSES or any(
        len(one) > MAX_ADDRESS_CHARACTERS for one in record.addresses
    ):
        raise RecordError(
            f"expected at most {MAX_ADDRESSES} addresses of {MAX_ADDRESS_CHARACTERS} characters"
        )
    _check_numbers(record)


def _check_numbers(record: Readiness) -> None:
    for name in ("accumulated", "bandwidth", "ttl", "issued"):
        value = getattr(record, name)
        if not (math.isfinite(value) and value >= 0):
            raise RecordError(f"expected a finite {name} >= 0, got {value}")
    for name in ("sequence", "round"):
        value = getattr(record, name)
        if not 0 <= value <= MAX_SEQUENCE:
            raise RecordError(f"expected a {name} from 0 to {MAX_SEQUENCE}, got {value}")
    if record.ttl > MAX_TTL_SECONDS:
        raise RecordError(f"expected a ttl of at most {MAX_TTL_SECONDS:.0f} s, got {record.ttl}")
