"""Which records are current: newest per author and run, void a bounded time after their first arrival.

Clocks of a swarm may be off by a day, so a record's life is counted from when it first arrived
here, on this machine's monotonic clock; `issued` only bounds how old a replay can be once its successor is
forgotten. Pure: `now` and the swarm's clock are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TypeVar

from equipoise.dht.clock import MAX_OFFSET_SECONDS
from equipoise.dht.records import (
    MAX_RUNS_PER_PEER,
    MAX_TTL_SECONDS,
    Kept,
    Readiness,
    RecordError,
    key_of,
    reread,
    shard_of,
    unseal,
)

_K = TypeVar("_K")
_V = TypeVar("_V")

MAX_BYTES = 10 * 1024 * 1024
"""Memory of all records: about 3,600 usual ones. The one that was renewed longest ago goes first."""
ENTRY_BYTES = 1700
"""Memory of one record besides its own bytes: its names, and its places in four indices."""
CLOCK_TOLERANCE_SECONDS = 2 * MAX_OFFSET_SECONDS + 600.0
"""How far an author's idea of the swarm's clock may be from this peer's: a day off here and a day off there."""
REMEMBER_SECONDS = 2 * CLOCK_TOLERANCE_SECONDS
"""After so long a replay of a forgotten author's record is refused by its `issued`. Until then, and as long as there
is memory, the author's void record is kept, whose sequence refuses it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A current record, kept as it came: decoded, it would take several times the memory.

    Attributes:
        data: Its signed bytes.
        sequence: Its place among its author's records.
        offline: Whether its author has left the run.
        arrived: When it first came, on the monotonic clock.
        expires: When it is void, on the monotonic clock.
        newcomer: Whether its author was not current in its run before.
        buried: Whether its author was found to be gone after it came.
    """

    data: bytes
    sequence: int
    offline: bool
    arrived: float
    expires: float
    newcomer: bool = False
    buried: bool = False

    @property
    def record(self) -> Readiness:
        """What it says."""
        return reread(self.data)


class RecordStore:
    """The newest record of every author in every run, void ones included for as long as a replay could revive them."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._runs: dict[str, set[str]] = {}
        self._peers: dict[str, set[str]] = {}
        self._keys: dict[bytes, set[tuple[str, str]]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def accept(self, found: Kept, now: float, swarm_time: float) -> Entry | None:
        """Take a record; return its entry if it is news, None if it is known already.

        `now` is this machine's monotonic clock, `swarm_time` the swarm's, in seconds since 1970.

        Raises:
            Forged: It is not signed by its author.
            RecordError: Malformed, misplaced, replayed, void, or one too many of its author.
        """
        if not 0 < found.remaining <= MAX_TTL_SECONDS:
            raise RecordError(f"expected 0 to {MAX_TTL_SECONDS:.0f} s left to live, got {found.remaining}")
        if self.knows(found, now):
            return None
        claim = unseal(found.data)
        record = claim.record
        if record.peer != found.subkey:
            raise RecordError("expected the subkey to be the record's author")
        if key_of(record.run, shard_of(record.peer)) != found.key:
            raise RecordError("the record belongs to another key")
        if abs(record.issued - swarm_time) > CLOCK_TOLERANCE_SECONDS:
            raise RecordError(f"issued {record.issued - swarm_time:+.0f} s from now by the swarm's clock")
        known = self._entries.get((record.peer, record.run))
        if known is not None and record.sequence <= known.sequence:
            raise RecordError(f"sequence {record.sequence} is not after {known.sequence}")
        return self._enter(claim.verify(), found, now)

    def current(self, run: str, now: float) -> list[Entry]:
        """Return the entries of `run` that are not void and whose authors have not left, sorted by PeerID."""
        entries = (self._entries[peer, run] for peer in sorted(self._peers.get(run, ())))
        return [entry for entry in entries if entry.expires > now and not entry.offline]

    def newest(self, peer: str) -> Readiness | None:
        """Return the record of `peer` that arrived last, in whichever run; void ones included."""
        entries = [self._entries[peer, run] for run in self._runs.get(peer, ())]
        return max(entries, key=lambda entry: entry.arrived).record if entries else None

    def under(self, key: bytes, now: float) -> list[Kept]:
        """Return the unexpired records that belong under `key`, those of authors who have left included."""
        return [
            Kept(key, peer, entry.data, entry.expires - now)
            for peer, run in self._keys.get(key, ())
            if (entry := self._entries[peer, run]).expires > now
        ]

    def bury(self, peer: str, now: float) -> None:
        """Make all records of `peer` void; what others still pass on revives none, and its next record counts."""
        for run in self._runs.get(peer, ()):
            entry = self._entries[peer, run]
            self._entries[peer, run] = replace(entry, expires=min(entry.expires, now), buried=True)

    def forget(self, now: float) -> None:
        """Drop what no replay can revive any more."""
        for name in [name for name, entry in self._entries.items() if entry.arrived + REMEMBER_SECONDS < now]:
            self._remove(name)

    def knows(self, found: Kept, now: float) -> bool:
        """Whether this very record is kept already, which needs no signature; takes over what is left of its life."""
        for run in self._runs.get(found.subkey, ()):
            entry = self._entries[found.subkey, run]
            if entry.data == found.data and entry.buried:
                return True
            if entry.data == found.data:
                # Whoever passed it on first may have understated what was left.
                ttl = entry.record.ttl
                expires = max(entry.expires, min(entry.arrived + ttl, now + found.remaining))
                self._entries[found.subkey, run] = replace(entry, expires=expires)
                return True
        return False

    def _enter(self, record: Readiness, found: Kept, now: float) -> Entry:
        name = (record.peer, record.run)
        known = self._entries.get(name)
        if known is None:
            self._make_room(record.peer, now)
        newcomer = known is None or known.expires <= now or known.offline
        entry = Entry(
            data=found.data,
            sequence=record.sequence,
            offline=record.state == "offline",
            arrived=now,
            expires=now + min(record.ttl, found.remaining),
            newcomer=newcomer,
        )
        self._bytes += _size(entry) - (_size(known) if known is not None else 0)
        self._entries[name] = entry
        self._entries.move_to_end(name)
        self._runs.setdefault(record.peer, set()).add(record.run)
        self._peers.setdefault(record.run, set()).add(record.peer)
        self._keys.setdefault(found.key, set()).add(name)
        while self._bytes > MAX_BYTES:
            self._remove(next(iter(self._entries)))
        return entry

    def _make_room(self, peer: str, now: float) -> None:
        runs = self._runs.get(peer, set())
        if len(runs) < MAX_RUNS_PER_PEER:
            return
        entries = [(self._entries[peer, run], run) for run in runs]
        left = [(entry.arrived, run) for entry, run in entries if entry.offline or entry.expires <= now]
        if not left:
            raise RecordError(f"{peer} has records in {MAX_RUNS_PER_PEER} runs already, the maximum")
        self._remove((peer, min(left)[1]))

    def _remove(self, name: tuple[str, str]) -> None:
        self._bytes -= _size(self._entries.pop(name))
        peer, run = name
        _discard(self._runs, peer, run)
        _discard(self._peers, run, peer)
        _discard(self._keys, key_of(run, shard_of(peer)), name)


def _size(entry: Entry) -> int:
    return ENTRY_BYTES + len(entry.data)


def _discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]
