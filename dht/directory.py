"""The members of each run, as `equipoise.averaging.ports.Directory` asks for them.

A record is kept by the peers nearest to its key, and also sent straight to everyone known to be in the run: where the
DHT alone would show a change at the next look-up, run-mates learn it within one message.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from equipoise.dht import records
from equipoise.dht.autonat import Reach
from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.identity import Identity
from equipoise.dht.options import SwarmOptions
from equipoise.dht.protocol import REPLICAS, CallError, RecordProtocol
from equipoise.dht.records import Entry, Kept, Readiness, seal, shard_of
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.limits import MAX_NAME_CHARACTERS, Part, Stand
from equipoise.tasks import TaskSet, end, sleep_until

MAX_TARGETS = 64
"""Most peers told of a change directly; others find it in the DHT."""
MAX_UNCONNECTED = 16
"""Most targets that this peer must dial first: records of absent peers are cheap, and must not delay others' news."""

RENEW_SECONDS, MAX_RENEW_SECONDS = 5.0, records.TTL_SECONDS / 2
"""Shortest and longest time between two publications of a record that has not changed."""
LIFETIME_SECONDS = 3 * RENEW_SECONDS
"""Shortest life of a record: two renewals in a row may be lost, or one where they are `MAX_RENEW_SECONDS` apart."""
TOLD_A_SECOND = 3
"""Most peers told in a second of a record that has not changed, as far as `MAX_RENEW_SECONDS` allows. A message costs
4 ms of processors at both ends."""
MAX_TOLD_AT_ONCE = 8
"""Most peers, drawn anew each time, that are told at once that this peer begins to wait, or of its progress. The others
learn it by a later change or renewal."""
PROGRESS_SECONDS = 1.0
"""Time until the next such change is told where there are more peers."""
MAX_CALLED_AT_ONCE = 2
"""Most of them that are called, in such a large run: the others have a session open, or learn it later too."""
GAP_SECONDS = 0.1
"""Shortest time between two publications, or two searches, of one run: changes closer together are handled as one."""
REFRESH_SECONDS, MAX_REFRESH_SECONDS = 2.0, 30.0
"""Shortest and longest time between two searches of the DHT for peers that do not know this one; it doubles while they
find nobody new, as one search asks dozens of peers. The others tell this peer themselves."""
STALE_SECONDS = 5.0
"""`peers` of a run that is not announced searches first if the last search is older."""
RETRY_SECONDS = 0.3
"""Time after which a farewell that did not arrive is sent again."""
WITHDRAW_SECONDS = 1.0
"""Longest farewell."""

Send = Callable[[str, Sequence[Kept]], Awaitable[None]]
"""Has a peer keep records; raises CallError if it does not answer."""

_log = logging.getLogger(__name__)


class Publisher:
    """Sends the newest version of a record to many peers: a slow or dead one delays nobody, and gets only the last.

    A peer that cannot be told is told at the next renewal, if it is still one to be told.
    """

    def __init__(self, send: Send, connected: Callable[[], Container[str]]) -> None:
        """`connected` tells the PeerIDs that need not be dialled."""
        self._send = send
        self._connected = connected
        self._newest: Kept | None = None
        self._closes = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sending = TaskSet()
        self._again: set[str] = set()

    def publish(self, newest: Kept, targets: Iterable[str]) -> None:
        """Send `newest` to `targets`, at once to those not being sent to, afterwards to the others."""
        self._newest = newest
        connected = self._connected()
        targets = sorted(targets, key=lambda peer: peer not in connected)[:MAX_TARGETS]
        unconnected = sum(peer not in connected for peer in self._tasks)
        for peer in targets:
            if peer in self._tasks:
                self._again.add(peer)
                continue
            if peer not in connected:
                if unconnected >= MAX_UNCONNECTED:
                    break
                unconnected += 1
            self._tasks[peer] = self._sending.spawn(self._deliver(peer))

    async def close(self, seconds: float = 0.0) -> None:
        """Stop sending, once all is sent, or after so many seconds."""
        self._closes = True
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=seconds)
        await end(set(self._tasks.values()))

    async def _deliver(self, peer: str) -> None:
        try:
            while self._newest is not None:
                self._again.discard(peer)
                try:
                    await self._send(peer, [self._newest])
                except CallError:
                    if self._closes:  # No renewal follows a farewell.
                        await asyncio.sleep(RETRY_SECONDS)
                        continue
                if peer not in self._again:
                    return
        finally:
            del self._tasks[peer]


@dataclass
class _Own:
    """This peer's part in one run.

    Attributes:
        grows: Whether a peer has come since the last search.
        for_all: Whether all peers must be told of what has changed.
        told_at: When all were told last, on the monotonic clock.
        pause: Seconds from then to the next renewal, by the number of peers that are told.
    """

    publisher: Publisher
    record: Readiness
    kept: Kept
    replicas: tuple[str, ...] = ()
    grows: bool = False
    for_all: bool = True
    told_at: float = float("-inf")
    pause: float = RENEW_SECONDS
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    search: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: TaskSet = field(default_factory=TaskSet)


class RunDirectory:
    """Announces this peer in its runs, and knows the others (`averaging.ports.Directory`)."""

    def __init__(
        self,
        identity: Identity,
        options: SwarmOptions,
        protocol: RecordProtocol,
        reach: Reach,
        direct: DirectTransport,
        sequence: int,
    ) -> None:
        """`sequence` is above those of all records that this peer has made before."""
        self.carry: Callable[[str, bytes], bool] = lambda peer, data: False
        self._identity = identity
        self._options = options
        self._protocol = protocol
        self._reach = reach
        self._direct = direct
        self._sequence = itertools.count(sequence)
        self._own: dict[str, _Own] = {}
        self._searched: dict[str, float] = {}
        protocol.intake.on_record = self._on_record

    @property
    def runs(self) -> dict[str, Part]:
        """This peer's part in each run that it is announced in."""
        return {run: own.record.state for run, own in self._own.items()}

    async def announce(self, run: str, stand: Stand) -> None:
        """Publish how this peer stands in `run`, until withdrawn, without waiting; raises Malformed beyond a bound."""
        before = self._own.get(run)
        is_routine = (
            before is not None and before.record.left == stand.left and before.record.spec == stand.spec
        )
        self._publish(self._record(run, stand), for_all=not is_routine)

    async def withdraw(self, run: str) -> None:
        """Stop announcing this peer in `run`, and tell the others, waiting at most `WITHDRAW_SECONDS`."""
        own = self._own.pop(run, None)
        if own is None:
            return
        await own.tasks.stop()
        gone = Stand(state="offline", spec=own.record.spec, round=own.record.round)
        last = self._seal(self._record(run, gone))
        own.publisher.publish(last, self._targets(own))
        self._protocol.intake.keep(last)
        await own.publisher.close(WITHDRAW_SECONDS)

    async def peers(self, run: str) -> Sequence[Readiness]:
        """Return the verified, unexpired records of `run`, this peer's own included if announced, sorted by PeerID."""
        if run not in self._own and time.monotonic() - self._searched.get(run, float("-inf")) > STALE_SECONDS:
            await self._search(run)
        return [record for record in self._records(run) if not self._protocol.bans(record.peer)]

    def banned(self, run: str) -> Sequence[Readiness]:
        """Return the records of `run` that `peers` leaves out, because this daemon has banned their authors."""
        return [record for record in self._records(run) if self._protocol.bans(record.peer)]

    def renew(self) -> None:
        """Publish what has changed of this peer itself in every run."""
        for own in self._own.values():
            self._renew(own)

    def meet(self, peer: str) -> None:
        """Ask `peer`, which is new to this one, for the members of every run, and have it keep records if it should."""
        for run, own in self._own.items():
            if len(own.replicas) < REPLICAS:
                own.search.set()
            # A search would ask dozens of peers for each of the many that a large swarm shows at first. A member that
            # is known tells of itself; it may only have been slow to answer.
            elif peer not in self._members(run):
                own.tasks.spawn(self._protocol.ask(peer, self._protocol.intake.store.keys_of(run)))

    def receive(self, peer: str, data: bytes) -> None:
        """Take the records that another peer's `carry` has sent."""
        self._protocol.receive(peer, data)

    async def stop(self) -> None:
        """Withdraw from every run."""
        await asyncio.gather(*(self.withdraw(run) for run in list(self._own)))

    def _record(self, run: str, stand: Stand) -> Readiness:
        protocol, reach = self._protocol, self._reach.status()
        return Readiness(
            version=PROTOCOL_VERSION,
            peer=self._identity.peer,
            run=run,
            sequence=next(self._sequence),
            dialable=self._reach.dialable,
            reach=reach.state,
            why=reach.reason[: records.MAX_WHY_CHARACTERS],
            addresses=protocol.addresses,
            name=self._options.name[:MAX_NAME_CHARACTERS],
            tags=tuple(sorted(set(self._options.tags))),
            credential=self._direct.credential,
            **{name: getattr(stand, name) for name in Stand.__struct_fields__},
        )

    def _publish(self, record: Readiness, for_all: bool = True) -> None:
        kept = self._seal(record)
        own = self._own.get(record.run)
        if own is None:
            publisher = Publisher(self._protocol.store, lambda: self._protocol.dialer.connected)
            own = self._own[record.run] = _Own(publisher, record, kept)
            own.tasks.keep(lambda: self._keep_published(own))
            own.tasks.keep(lambda: self._keep_searched(own))
        own.record, own.kept = record, kept
        own.for_all |= for_all
        self._protocol.intake.keep(kept)
        own.changed.set()

    def _seal(self, record: Readiness) -> Kept:
        own = self._own.get(record.run)
        lifetime = LIFETIME_SECONDS if own is None else max(LIFETIME_SECONDS, 2 * own.pause)
        return Kept(record.peer, seal(record, self._identity), lifetime)

    def _records(self, run: str) -> list[Readiness]:
        return [entry.record for entry in self._protocol.intake.store.current(run, time.monotonic())]

    def _members(self, run: str) -> list[str]:
        found = self._protocol.intake.store.peers(run, time.monotonic())
        return [peer for peer in found if not self._protocol.bans(peer)]

    def _targets(self, own: _Own) -> list[str]:
        peers = dict.fromkeys((*self._members(own.record.run), *own.replicas))
        return [peer for peer in peers if peer != self._identity.peer]

    async def _keep_published(self, own: _Own) -> None:
        while True:
            await sleep_until(own.changed, own.told_at + own.pause - time.monotonic())
            if not own.changed.is_set():
                self._renew(own)
            own.changed.clear()
            targets, now, gap = self._targets(own), time.monotonic(), GAP_SECONDS
            own.pause = min(max(RENEW_SECONDS, len(targets) / TOLD_A_SECOND), MAX_RENEW_SECONDS)
            if own.for_all:
                own.for_all, own.told_at = False, now
            else:
                calls = len(targets)
                if now >= own.told_at + own.pause:
                    own.told_at = now
                elif calls > MAX_TOLD_AT_ONCE:
                    targets, gap = random.sample(targets, MAX_TOLD_AT_ONCE), PROGRESS_SECONDS
                    calls = MAX_CALLED_AT_ONCE
                else:
                    # Peers that only keep the record are told at renewals.
                    targets = [peer for peer in self._members(own.record.run) if peer != self._identity.peer]
                targets = [peer for peer in targets if not self._carried(peer, own.kept)][:calls]
            own.publisher.publish(own.kept, targets)
            await asyncio.sleep(gap)

    def _carried(self, peer: str, kept: Kept) -> bool:
        return self.carry(peer, self._protocol.pack(peer, [kept]))

    def _renew(self, own: _Own) -> None:
        record = self._record(own.record.run, own.record)
        if own.record.ready:
            # The join that this peer has signed says so too: others must not see the two differ.
            record = structs.replace(record, dialable=own.record.dialable)
        self._publish(record)

    async def _keep_searched(self, own: _Own) -> None:
        pause = REFRESH_SECONDS
        while True:
            own.search.clear()
            replicas = await self._search(own.record.run)
            if set(replicas) - set(own.replicas):
                own.for_all = True
                own.changed.set()
            own.replicas = replicas
            grows = own.grows and len(self._members(own.record.run)) <= MAX_TOLD_AT_ONCE
            pause = REFRESH_SECONDS if grows else min(2 * pause, MAX_REFRESH_SECONDS)
            own.grows = False
            # Drawn, so that daemons that have started together do not go on to search together.
            await sleep_until(own.search, pause * random.uniform(0.5, 1.0))
            await asyncio.sleep(GAP_SECONDS)

    async def _search(self, run: str) -> tuple[str, ...]:
        keys = self._protocol.intake.store.keys_of(run)
        nearest = await self._protocol.look_up(keys)
        now = time.monotonic()
        self._searched = {name: when for name, when in self._searched.items() if when + STALE_SECONDS > now}
        self._searched[run] = now
        return nearest[keys[shard_of(self._identity.peer)]]

    def _on_record(self, entry: Entry) -> None:
        record = entry.record
        self._protocol.dialer.learn(record.peer, record.addresses)
        own = self._own.get(record.run)
        if own is not None and entry.newcomer and record.peer != self._identity.peer:
            own.grows = True
            # In a large run it hears of this peer by its own search, or by this peer's next renewal.
            # Of the others only so many are counted: a stranger may have thousands of records come in a moment.
            others = self._protocol.intake.store.peers(record.run, time.monotonic())
            if len(list(itertools.islice(others, MAX_TOLD_AT_ONCE + 1))) <= MAX_TOLD_AT_ONCE:
                own.publisher.publish(own.kept, [record.peer])
            if own.record.dialable != self._reach.dialable:
                self._renew(own)
