"""Readiness records: what a peer says of itself in a run, signed with the key that its PeerID contains.

On the wire a record is msgpack `{payload, signature}`, payload being the msgpack of `Readiness`, a map whose unknown
fields are ignored. The signature covers a domain, the run and the payload. Nothing in a record is believed
beyond its author's own state: shapes, weights and manifests are agreed elsewhere.

`RecordStore` keeps the newest per author and run, void a bounded time after its first arrival. Clocks of a swarm may be
off by any amount: a record's life is counted from when it first arrived here, on this machine's monotonic clock. Pure:
`now` is an argument.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec

from equipoise.dht.address import MAX_ADDRESS_CHARACTERS
from equipoise.dht.identity import Identity, verify
from equipoise.dht.sanitize import Malformed, decode, printable
from equipoise.dht.state import PROTOCOL_VERSION, ReachState
from equipoise.limits import Candidate, Count

MAX_RECORD_BYTES = 4352
"""Longest record. A usual one takes 700 bytes; long addresses, a whole credential and all tags fit."""
TTL_SECONDS = 25.0
"""Longest time that the dead are listed, counted from a record's first arrival."""
MAX_RUN_BYTES = 128
MAX_WHY_CHARACTERS = 160
MAX_ADDRESSES = 4
MAX_RUNS_PER_PEER = 132
"""Most runs that one peer may have records in. A daemon's own bounds follow from it: `peer.daemon.service.MAX_RUNS`."""
SHARDS = 4
"""A run's records are spread over so many keys: one key with 300 records takes 0.3 s to read."""
MAX_BYTES = 10 * 1024 * 1024
"""Most memory of all records: about 3,600 usual ones. The record renewed longest ago goes first. Void records stay as
long as there is memory: their sequences refuse replays. A replayed record only names a peer, which must answer."""
ENTRY_BYTES = 1700
"""Memory of one record besides its own bytes: its names, and its places in three indices."""

Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...],
    msgspec.Meta(max_length=MAX_ADDRESSES),
]

_DOMAIN = "readiness"

_K = TypeVar("_K")
_V = TypeVar("_V")


class Forged(Malformed):
    """A record is not signed by the peer that it names; no peer that verifies records passes such a one on."""


class Readiness(Candidate, frozen=True, kw_only=True, omit_defaults=True):
    """A peer's statement of itself in one run.

    Attributes:
        version: `PROTOCOL_VERSION` of its author.
        run: Name of the run.
        sequence: Grows with every record of the author, over restarts.
        reach: How others reach it, as far as it knows.
        why: Why it believes that, one line.
        addresses: Where it listens, in the form that `--join` takes.
    """

    version: int
    run: str
    sequence: Count
    reach: ReachState = "unknown"
    why: Annotated[str, msgspec.Meta(max_length=MAX_WHY_CHARACTERS)] = ""
    addresses: Addresses = ()


class Kept(msgspec.Struct, frozen=True):
    """A record as it travels and is kept.

    Attributes:
        subkey: Its author's PeerID.
        data: Its signed bytes.
        remaining: Seconds until it is void, by the peer that passes it on: durations travel, clocks do not.
    """

    subkey: str
    data: bytes
    remaining: float


class Envelope(msgspec.Struct, frozen=True):
    """The encoded record and its signature."""

    payload: bytes
    signature: bytes


_envelopes = msgspec.msgpack.Decoder(Envelope)
_records = msgspec.msgpack.Decoder(Readiness)
_encode = msgspec.msgpack.Encoder().encode


def shard_of(peer: str) -> int:
    """Return the shard that a peer's records belong to."""
    return hashlib.sha256(peer.encode()).digest()[0] % SHARDS


def key_of(run: str, shard: int, swarm: bytes = b"") -> bytes:
    """Return the 20-byte DHT key of one shard of a run's records, in the private swarm with this key if any."""
    name = f"equipoise/{PROTOCOL_VERSION}/readiness/{shard}/{run}"
    return hashlib.sha256(swarm + name.encode()).digest()[:20]


def seal(record: Readiness, identity: Identity) -> bytes:
    """Sign and encode a record; raises Malformed if it breaks a bound."""
    payload = _encode(record)
    _read(payload)
    data = _encode(Envelope(payload, identity.sign(_DOMAIN, _signed(record.run, payload))))
    if len(data) > MAX_RECORD_BYTES:
        raise Malformed(f"expected a record of at most {MAX_RECORD_BYTES} bytes, got {len(data)}")
    return data


def unseal(data: bytes) -> tuple[Readiness, Envelope]:
    """Decode a record that `check` has not seen yet; raises Malformed if it is malformed, or breaks a bound."""
    envelope = decode(_envelopes, data, MAX_RECORD_BYTES, "record")
    return _read(envelope.payload), envelope


def check(record: Readiness, envelope: Envelope) -> None:
    """Verify the signature of a record; raises Forged if it is not signed by the peer that it names."""
    if not verify(record.peer, _DOMAIN, _signed(record.run, envelope.payload), envelope.signature):
        raise Forged(f"the record is not signed by {printable(record.peer, 64)}")


def _signed(run: str, payload: bytes) -> bytes:
    name = run.encode()
    return len(name).to_bytes(2, "big") + name + payload


def _read(payload: bytes) -> Readiness:
    """Decode a signed payload; its types are its bounds."""
    record = decode(_records, payload, MAX_RECORD_BYTES, "record")
    if record.version != PROTOCOL_VERSION:
        raise Malformed(f"expected protocol version {PROTOCOL_VERSION}, got {record.version}")
    if not 1 <= len(record.run.encode()) <= MAX_RUN_BYTES:
        raise Malformed(f"expected a run's name of 1 to {MAX_RUN_BYTES} bytes")
    return record


@dataclass(frozen=True, slots=True)
class Entry:
    """A current record, kept as it came: decoded, it would take several times the memory.

    Attributes:
        data: Its signed bytes.
        sequence: Its place among its author's records.
        offline: Whether its author has left the run.
        arrived: When it first came, on the monotonic clock; a lifetime ago if its author was found to be gone since.
        expires: When it is void, on the monotonic clock.
        newcomer: Whether its author was not current in its run before.
    """

    data: bytes
    sequence: int
    offline: bool
    arrived: float
    expires: float
    newcomer: bool = False

    @property
    def record(self) -> Readiness:
        """The decoded record; it was checked and verified when it came."""
        return _records.decode(_envelopes.decode(self.data).payload)


class RecordStore:
    """The newest record of every author in every run, void ones included."""

    def __init__(self, swarm: bytes = b"") -> None:
        """`swarm` is the key of the private swarm whose records these are."""
        self._swarm = swarm
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._runs: dict[str, set[str]] = {}
        self._keys: dict[bytes, set[tuple[str, str]]] = {}
        self._bytes = 0

    def examine(self, found: Kept) -> tuple[Readiness, Envelope]:
        """Decode a record, and check everything that is cheaper than its signature, which `check` verifies.

        Raises Malformed if the record is another peer's, replayed or void.
        """
        if not 0 < found.remaining <= TTL_SECONDS:
            raise Malformed(f"expected 0 to {TTL_SECONDS:.0f} s left to live, got {found.remaining}")
        record, envelope = unseal(found.data)
        if record.peer != found.subkey:
            raise Malformed("expected the subkey to be the record's author")
        self._check_sequence(record)
        return record, envelope

    def enter(self, found: Kept, record: Readiness, now: float) -> Entry:
        """Keep a record whose author is certain, at `now` on this machine's monotonic clock; return its entry.

        Raises Malformed if a later record of the author has come meanwhile, or it has records in too many runs.
        """
        self._check_sequence(record)
        name = (record.peer, record.run)
        known = self._entries.get(name)
        if known is None:
            self._make_room(record.peer, now)
        entry = Entry(
            data=found.data,
            sequence=record.sequence,
            offline=record.state == "offline",
            arrived=now,
            expires=now + found.remaining,
            newcomer=known is None or known.expires <= now or known.offline,
        )
        self._bytes += _size(entry) - (_size(known) if known is not None else 0)
        self._entries[name] = entry
        self._entries.move_to_end(name)
        self._runs.setdefault(record.peer, set()).add(record.run)
        self._keys.setdefault(self._key(record.run, record.peer), set()).add(name)
        while self._bytes > MAX_BYTES:
            self._remove(next(iter(self._entries)))
        return entry

    def _check_sequence(self, record: Readiness) -> None:
        known = self._entries.get((record.peer, record.run))
        if known is not None and record.sequence <= known.sequence:
            raise Malformed(f"sequence {record.sequence} is not after {known.sequence}")

    def keys_of(self, run: str) -> list[bytes]:
        """Return the DHT keys of a run's records, by shard."""
        return [key_of(run, shard, self._swarm) for shard in range(SHARDS)]

    def _key(self, run: str, peer: str) -> bytes:
        return key_of(run, shard_of(peer), self._swarm)

    def has(self, peer: str) -> bool:
        """Tell whether a record of `peer` is kept, void ones included."""
        return peer in self._runs

    def current(self, run: str, now: float) -> list[Entry]:
        """Return the entries of `run` that are not void and whose authors have not left, sorted by PeerID."""
        return [self._entries[peer, run] for peer in sorted(self.peers(run, now))]

    def peers(self, run: str, now: float) -> Iterator[str]:
        """Yield the authors of the current entries of `run`, in any order; no record is decoded for it."""
        for key in self.keys_of(run):
            for name in self._keys.get(key, ()):
                entry = self._entries[name]
                if entry.expires > now and not entry.offline:
                    yield name[0]

    def mates(self, peer: str, now: float) -> list[Readiness]:
        """Return the current records of all others in the runs that `peer` has not left."""
        own = [run for run in self._runs.get(peer, ()) if not self._entries[peer, run].offline]
        found = (entry.record for run in own for entry in self.current(run, now))
        return [record for record in found if record.peer != peer]

    def newest(self, peer: str) -> Readiness | None:
        """Return the record of `peer` that arrived last, in whichever run; void ones included."""
        entries = [self._entries[peer, run] for run in self._runs.get(peer, ())]
        return max(entries, key=lambda entry: entry.arrived).record if entries else None

    def under(self, key: bytes, now: float) -> list[Kept]:
        """Return the unexpired records that belong under `key`, those of authors that have left included."""
        return [
            Kept(peer, entry.data, entry.expires - now)
            for peer, run in self._keys.get(key, ())
            if (entry := self._entries[peer, run]).expires > now
        ]

    def bury(self, peer: str, now: float) -> None:
        """Make all records of `peer` void; what others still pass on revives none, and its next record counts."""
        for run in self._runs.get(peer, ()):
            entry = self._entries[peer, run]
            arrived = min(entry.arrived, now - TTL_SECONDS)
            self._entries[peer, run] = replace(entry, arrived=arrived, expires=min(entry.expires, now))

    def knows(self, found: Kept, now: float) -> bool:
        """Tell whether this very record is kept, which needs no signature; take over what is left of its life."""
        for run in self._runs.get(found.subkey, ()):
            entry = self._entries[found.subkey, run]
            if entry.data == found.data:
                # The peer that passed it on first may have understated what was left.
                expires = max(entry.expires, min(entry.arrived + TTL_SECONDS, now + found.remaining))
                self._entries[found.subkey, run] = replace(entry, expires=expires)
                return True
        return False

    def _make_room(self, peer: str, now: float) -> None:
        if len(runs := self._runs.get(peer, set())) < MAX_RUNS_PER_PEER:
            return
        entries = [(self._entries[peer, run], run) for run in runs]
        left = [(entry.arrived, run) for entry, run in entries if entry.offline or entry.expires <= now]
        if not left:
            raise Malformed(f"{peer} has records in {MAX_RUNS_PER_PEER} runs already, the maximum")
        self._remove((peer, min(left)[1]))

    def _remove(self, name: tuple[str, str]) -> None:
        self._bytes -= _size(self._entries.pop(name))
        peer, run = name
        _discard(self._runs, peer, run)
        _discard(self._keys, self._key(run, peer), name)


def _size(entry: Entry) -> int:
    return ENTRY_BYTES + len(entry.data)


def _discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]
