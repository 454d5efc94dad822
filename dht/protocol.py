"""This peer's node of the DHT: hivemind's look-ups over one call of our own, in place of `DHTProtocol`.

hivemind's own handlers decode values of strangers recursively and without bounds, keep any value for as long as its
sender likes, and compare clocks. Here the handler knows its caller (authenticated by libp2p), limits its rate,
decodes within bounds, and keeps only signed readiness records.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from equipoise.dht.dialer import Dialer
from equipoise.dht.hivemind_imports import DHTID, RoutingTable, traverse_dht
from equipoise.dht.identity import public_key_of
from equipoise.dht.intake import Intake
from equipoise.dht.messages import (
    MAX_INSTANCE_BYTES,
    MAX_NEAREST,
    MAX_RECORDS,
    PAGE_BYTES,
    Message,
    Neighbour,
    Versioned,
    VersionError,
    decode,
    encode,
    messages,
)
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.records import Kept
from equipoise.dht.sanitize import Malformed
from equipoise.limits import LruDict, RateLimit
from equipoise.tasks import TaskSet

CALL = "equipoise.dht.ping"
"""Name of the only call. Daemons of earlier versions have it too, so each side is told that their versions differ."""
CALLS_PER_SECOND, CALLS_BURST = 100.0, 200.0
"""Most calls of one peer; a mate in a run of nine or fewer stores 10 records a second, and looks up every 2 s."""
MAX_ACQUAINTED = 4096
"""Most peers of which it is remembered when they were heard: the peers heard last."""
CALL_SECONDS = 3.0
"""Longest wait for an answer; a look-up goes on without a peer that does not answer in time."""
BUCKET_DEPTH_MODULO = 5
"""hivemind's default (Kademlia paper, section 4.2, b)."""
HELD_SECONDS = 2.0
"""Time that a refused caller waits for its answer, which comes before `CALL_SECONDS` are over."""
MAX_HELD = 128
"""Most refused calls that wait: each keeps its message in memory, up to 256 KB here and in p2pd."""
FORGER = "has sent a forged record: nothing is taken from it for a minute"
REPLICAS = 5
"""Number of peers that keep a record, hivemind's default: if 30 % go at once, one of 400 records is lost."""
BEAM = 8
"""Number of peers nearest to a key that a look-up asks; a few more than the peers that keep its records."""
WORKERS = 4
"""Most peers that a look-up asks at once."""
KEYS_PER_CALL = 2
"""Most keys for which a look-up asks one peer at a time: peers near to one key are seldom near to the others."""
LOOKUP_SECONDS = 6.0
"""Longest look-up: the time of two calls in a row that time out."""

_log = logging.getLogger(__name__)


class CallError(ConnectionError):
    """A peer gave no answer, or an unusable one; the message says why, `__cause__` is the error behind it."""


def node_id_of(peer: str) -> Any:
    """Return a peer's place in the DHT: a hash of its PeerID, so that no peer can choose it freely."""
    return DHTID.from_bytes(hashlib.sha256(b"equipoise/node/" + peer.encode()).digest()[:20])


MAX_PEERS = 1024
"""Most peers whose instances are remembered: those that were started last."""
DOUBLED_SECONDS = 30.0
"""Time for which a peer counts as doubled after both its daemons were heard; daemons speak every few seconds."""


class Instances:
    """Notices one identity on two machines, such as after a copied home: a third peer hears both, and tells them.

    libp2p does not connect a peer with itself, so the two daemons never meet. Every start of a daemon draws a random
    instance, which each message carries. A restart replaces the instance for good. So an instance that comes back after
    another one means that two daemons run.
    """

    def __init__(self) -> None:
        self.own = secrets.token_bytes(MAX_INSTANCE_BYTES)
        # By peer: the instance before the last, the last, and when one came back.
        self._heard: LruDict[str, tuple[bytes, bytes, float]] = LruDict(MAX_PEERS)

    def hear(self, peer: str, instance: bytes, now: float) -> None:
        """Note the instance of a message of `peer`; an empty instance is ignored."""
        former, last, doubled = self._heard.get(peer, (b"", b"", float("-inf")))
        if instance not in (b"", last):
            self._heard[peer] = last, instance, now if instance == former else doubled

    def doubled(self, peer: str, now: float) -> bool:
        """Tell whether two daemons spoke as `peer` within the last `DOUBLED_SECONDS`."""
        return peer in self._heard and self._heard[peer][2] + DOUBLED_SECONDS > now


class RecordProtocol:
    """Answers the DHT's call, makes it, and finds the peers nearest to keys.

    Attributes:
        dialer: Knows the addresses of peers, and which peers are connected.
        intake: Takes records, those of other peers once their signatures are verified.
        heard: When each peer, in client mode too, has called or answered last, on the monotonic clock. Lost peers are
            not in it.
        on_heard: Called with the PeerID of every peer that calls, or answers.
        on_peer: Called with the PeerID of every peer new to the routing table.
        on_hello: Called with the PeerID of every peer that answers look-ups, and whether it relays for others.
        traversals: The look-ups under way; they end soon after the link is detached, because calls then fail at once.
        doubled_until: Monotonic time until which another daemon counts as speaking with this daemon's identity.
    """

    def __init__(self, peer: str, serves: bool, link: P2pdClient, dialer: Dialer) -> None:
        """`serves` tells whether this peer answers look-ups; see `Message`."""
        self.peer = peer
        self.routing_table = RoutingTable(node_id_of(peer), MAX_NEAREST, BUCKET_DEPTH_MODULO)
        self.intake = Intake(link.gate.swarm)
        self.heard: LruDict[str, float] = LruDict(MAX_ACQUAINTED)
        self.on_heard: Callable[[str], None] = lambda peer: None
        self.on_peer: Callable[[str], None] = lambda peer: None
        self.on_hello: Callable[[str, bool], None] = lambda peer, relays: None
        self.doubled_until = float("-inf")
        self._instances = Instances()
        self._told = Message(serves=serves, instance=self._instances.own)
        self._link = link
        link.answer(CALL, self._answer)
        self.dialer = dialer
        self._limit = RateLimit(CALLS_PER_SECOND, CALLS_BURST)
        self._held = asyncio.Semaphore(MAX_HELD)
        self.traversals = TaskSet()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses that every message tells, at which this peer listens."""
        return self._told.addresses

    def bans(self, peer: str) -> bool:
        """Tell whether this daemon refuses `peer`."""
        return self._link.gate.bans(peer)

    def tell(self, **news: Any) -> None:
        """Have every message from now on tell this of the peer itself: fields of `Message`."""
        self._told = replace(self._told, **news)

    @property
    def peers(self) -> list[str]:
        """PeerIDs in the routing table."""
        return list(self.routing_table.peer_id_to_uid)

    async def ping(self, peer: str) -> None:
        """Make acquaintance with `peer`; raises CallError if no daemon of this version answers."""
        await self._call(peer)

    async def store(self, peer: str, records: Sequence[Kept]) -> None:
        """Ask `peer` to keep `records`; raises CallError if it does not answer."""
        await self._call(peer, records=records)

    def pack(self, peer: str, records: Sequence[Kept]) -> bytes:
        """Return the request of `store`, to be sent another way."""
        return encode(self._message(peer, records=tuple(records)))

    def receive(self, peer: str, packed: bytes) -> None:
        """Take such a request of an authenticated peer, within the bounds of its calls."""
        self.traversals.spawn(self._received(peer, packed))

    async def _received(self, peer: str, packed: bytes) -> None:
        try:
            await self._answer(peer, packed)
        except Malformed as error:
            _log.debug("%s: %s", peer, error)

    async def meet(self, peer: str) -> None:
        """Ping `peer`, then look for this peer's own neighbours through it; raises CallError as `ping` does."""
        await self.ping(peer)
        await self.look_up([self.routing_table.node_id.to_bytes()])

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, ...]]:
        """Fetch the records under `keys` (20 bytes each) into the record store; return the nearest peers of each key.

        This peer is left out. An unreachable network is not an error: then no peers are returned.
        """
        # hivemind's traversal leaves tasks behind if it is cancelled. So it is never cancelled: it ends by itself.
        task = self.traversals.spawn(self._traverse([DHTID.from_bytes(key) for key in keys]))
        await asyncio.wait({task}, timeout=LOOKUP_SECONDS)
        if not task.done():
            _log.info("a look-up takes more than %.0f s", LOOKUP_SECONDS)
            return dict.fromkeys(keys, ())
        return task.result()

    async def _traverse(self, keys: Sequence[Any]) -> dict[bytes, tuple[str, ...]]:
        """Ask peers nearer and nearer to `keys` (hivemind's DHTID), until none nearer is named; return the nearest."""
        table = self.routing_table
        known = {node: peer for key in keys for node, peer in table.get_nearest_neighbors(key, BEAM)}

        async def ask(node: Any, wanted: Collection[Any]) -> dict[Any, tuple[tuple[Any, ...], bool]]:
            answer = await self.ask(known[node], [key.to_bytes() for key in wanted])
            pairs = () if answer is None else zip(wanted, answer.nearest, strict=False)
            found = {key: self._neighbours(named) for key, named in pairs}
            for near in found.values():
                known.update(near)
            return {key: (tuple(near), False) for key, near in found.items()}

        own = {key: {table.node_id} for key in keys}
        nearest, _ = await traverse_dht(
            keys, list(known), BEAM, WORKERS, KEYS_PER_CALL, ask, visited_nodes=own
        )
        return {key.to_bytes(): tuple(known[node] for node in nearest[key][:REPLICAS]) for key in keys}

    async def ask(self, peer: str, keys: Sequence[bytes]) -> Message | None:
        """Take the records under `keys` (20 bytes each) that `peer` keeps; None if it gives no usable answer."""
        try:
            answer = await self._call(peer, keys)
        except CallError as error:
            _log.debug("%s", error)
            return None
        await self.take(answer.records, peer)
        return answer

    async def take(self, records: Iterable[Kept], sender: str) -> None:
        """Take the valid ones of a sender's records; a sender of a forged one is lost."""
        if await self.intake.take(records, sender) is not None:
            self.lose(sender)

    async def _call(self, peer: str, keys: Sequence[bytes] = (), records: Sequence[Kept] = ()) -> Message:
        """Ask `peer`; return its answer. Raises CallError without a usable one."""
        question = self._message(peer, keys=tuple(keys), records=tuple(records))
        began = time.monotonic()
        if not self._link.attached:
            raise CallError("p2pd is not running")
        if self.intake.scrutiny.distrusts(peer, time.monotonic()):
            raise CallError(f"{peer} {FORGER}")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self.dialer.reach(peer)
                data = await self._link.call(peer, CALL, encode(question), CALL_SECONDS)
            answer = decode(data, messages)
        except TimeoutError:
            if self.heard.get(peer, began) <= began:
                self.lose(peer)
            raise CallError(f"{peer} does not answer within {CALL_SECONDS:.0f} s") from None
        except (ConnectionError, Malformed) as error:
            self.lose(peer)
            raise CallError(f"{peer}: {str(error).removeprefix(f'call {peer}: ')}") from error
        self._meet(peer, answer)
        return answer

    async def _answer(self, peer: str, data: bytes) -> bytes:
        public_key_of(peer)
        now = time.monotonic()
        distrusted = self.intake.scrutiny.distrusts(peer, now)
        if distrusted or not self._limit.allow(peer, now):
            await self._hold()
            raise Malformed(f"{peer} {FORGER}" if distrusted else "too many calls; wait a second")
        try:
            asked = decode(data, messages)
        except VersionError:
            # The bare version suffices: the caller itself words the error that says which side is older.
            return encode(Versioned())
        self._meet(peer, asked)
        await self.take(asked.records, peer)
        now = time.monotonic()
        found = [kept for key in dict.fromkeys(asked.keys) for kept in self.intake.store.under(key, now)]
        nearest = tuple(self._nearest(key, peer) for key in asked.keys)
        return encode(self._message(peer, records=_page(found), nearest=nearest))

    async def _hold(self) -> None:
        """Delay a refusal, because a caller that is refused at once calls again at once."""
        if not self._held.locked():
            async with self._held:
                await asyncio.sleep(HELD_SECONDS)

    def _message(self, peer: str, **content: Any) -> Message:
        """Return a message to `peer`, with what it must know of this peer."""
        return replace(self._told, doubled=self._instances.doubled(peer, time.monotonic()), **content)

    def _nearest(self, key: bytes, asker: str) -> tuple[Neighbour, ...]:
        place, own = DHTID.from_bytes(key), node_id_of(asker)
        found = self.routing_table.get_nearest_neighbors(place, MAX_NEAREST, own)
        return tuple(Neighbour(peer, self.dialer.addresses_of(peer)) for _, peer in found)

    def _neighbours(self, nearest: Iterable[Neighbour]) -> dict[Any, str]:
        found = {}
        for neighbour in nearest:
            try:
                public_key_of(neighbour.peer)
            except ValueError:
                continue
            if neighbour.peer != self.peer:
                self.dialer.hear(neighbour.peer, neighbour.addresses)
                found[node_id_of(neighbour.peer)] = neighbour.peer
        return found

    def _meet(self, peer: str, said: Message) -> None:
        now = time.monotonic()
        self.heard[peer] = now
        self.on_heard(peer)
        self._instances.hear(peer, said.instance, now)
        if said.doubled:
            self.doubled_until = now + DOUBLED_SECONDS
        self.dialer.learn(peer, said.addresses)
        if not said.serves:
            self._forget(peer)
            return
        self.on_hello(peer, said.relays)
        node_id = node_id_of(peer)
        new = node_id not in self.routing_table
        self.routing_table.add_or_update_node(node_id, peer)
        if new and node_id in self.routing_table:
            _log.info("met %s", peer)
            self.on_peer(peer)

    def lose(self, peer: str) -> None:
        """Take `peer` for gone until it is heard again; not while p2pd is down, because then no peer can be heard."""
        if self._link.attached:
            self.heard.pop(peer, None)
            self._forget(peer)

    def _forget(self, peer: str) -> None:
        node_id = node_id_of(peer)
        if node_id in self.routing_table:
            del self.routing_table[node_id]
            _log.info("%s answers no look-ups any more", peer)


def _page(records: list[Kept]) -> tuple[Kept, ...]:
    # In random order, so that authors cannot choose their place, and several answers show more than one page.
    random.shuffle(records)
    page, size = [], 0
    for kept in records[:MAX_RECORDS]:
        size += len(kept.data)
        if size > PAGE_BYTES:
            break
        page.append(kept)
    return tuple(page)
