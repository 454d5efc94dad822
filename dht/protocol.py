"""This peer's node of the DHT: hivemind's look-ups over one call of our own, in place of `DHTProtocol`.

hivemind's own handlers decode values of strangers recursively and without bounds, keep any value for as long as its
sender likes, and compare clocks. Here the handler knows its caller (authenticated by libp2p), limits its rate,
decodes within bounds, and keeps only signed readiness records.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec

from equipoise.dht import sanitize
from equipoise.dht.dialer import Dialer
from equipoise.dht.gate import CallHandler
from equipoise.dht.hivemind_imports import DHTID, RoutingTable, traverse_dht
from equipoise.dht.identity import public_key_of
from equipoise.dht.limits import Scrutiny, Tally
from equipoise.dht.p2pd_client import P2pdClient
from equipoise.dht.records import Addresses, Entry, Envelope, Forged, Kept, Readiness, RecordStore, check
from equipoise.dht.sanitize import Malformed, printable
from equipoise.dht.state import PROTOCOL_VERSION
from equipoise.limits import LruDict, RateLimit
from equipoise.tasks import TaskSet

MAX_KEYS = 16
"""Most keys of one look-up. A run has 4 keys, and a look-up asks for one run's."""
MAX_RECORDS = 512
"""Most records in one message; about 140 usual records fill `PAGE_BYTES`."""
MAX_PEER_CHARACTERS = 64
"""Longest PeerID; an Ed25519 PeerID has 52 characters."""
MAX_INSTANCE_BYTES = 16
MAX_NEAREST = 20
"""Most peers named as nearest to a key: Kademlia's k."""
MAX_MESSAGE_BYTES = 128 * 1024
"""Longest message; p2pd's own limit is 256 KB. A page of records holds at most `PAGE_BYTES`."""
PAGE_BYTES = 64 * 1024
"""Most bytes of all records in one answer: about 140 usual records."""

CALL = "equipoise.dht.ping"
"""Name of the only call. Daemons of earlier versions have it too, so each side is told that their versions differ."""
CALLS_PER_SECOND, CALLS_BURST = 100.0, 200.0
"""Most calls of one peer; a mate in a run of nine or fewer stores 10 records a second, and looks up every 2 s."""
MAX_PEERS = 1024
"""Most peers of which it is remembered when they were heard, and their instances: the peers heard last."""
MAX_FORMER = 4
"""Most former instances remembered of one peer."""
DOUBLED_SECONDS = 30.0
"""Time for which a peer counts as doubled after both its daemons were heard; daemons speak every few seconds."""
CALL_SECONDS = 3.0
"""Longest wait for an answer; a look-up goes on without a peer that does not answer in time."""
BUCKET_DEPTH_MODULO = 5
"""hivemind's default (Kademlia paper, section 4.2, b)."""
MAX_ACQUAINTED = 4096
HELD_SECONDS = 2.0
"""Time that a refused caller waits for its answer, which comes before `CALL_SECONDS` are over."""
MAX_HELD_OF_ONE = 32
"""Most refused calls of one peer that wait; further calls are refused at once."""
MAX_HELD = 128
"""Most refused calls of all peers that wait: each keeps its message in memory, up to 256 KB here and in p2pd."""
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

_Versioned = TypeVar("_Versioned", bound="Versioned")


class VersionError(Malformed):
    """A message has another protocol version; the text says which side is older, and what to upgrade."""


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Every message begins with the `PROTOCOL_VERSION` of its author."""

    version: int = PROTOCOL_VERSION


class Neighbour(msgspec.Struct, frozen=True):
    """A peer that may be nearer to a key; its addresses are another peer's word."""

    peer: Annotated[str, msgspec.Meta(max_length=MAX_PEER_CHARACTERS)]
    addresses: Addresses = ()


Key = Annotated[bytes, msgspec.Meta(min_length=20, max_length=20)]
Neighbours = Annotated[tuple[Neighbour, ...], msgspec.Meta(max_length=MAX_NEAREST)]


class Message(Versioned, frozen=True, kw_only=True):
    """A question to another peer, or its answer: each tells of its author first. A question for nothing is a ping.

    Attributes:
        serves: Whether the author answers look-ups (False in client mode).
        addresses: Addresses where the author listens.
        relays: Whether it relays for peers that cannot be dialled.
        instance: Random bytes drawn at the author's start; see `Instances`.
        doubled: Whether the author has heard two daemons that speak as the recipient.
        keys: In a question: ask for the records under these keys, and for peers nearer to them.
        records: In a question: ask to keep these records; the invalid ones are dropped. In an answer: records under
            any of the question's keys.
        nearest: In an answer: for each key of the question, the nearest peers known, in its order.
    """

    serves: bool
    addresses: Addresses = ()
    relays: bool = False
    instance: Annotated[bytes, msgspec.Meta(max_length=MAX_INSTANCE_BYTES)] = b""
    doubled: bool = False
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    records: Annotated[tuple[Kept, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()
    nearest: Annotated[tuple[Neighbours, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()


class _Version(msgspec.Struct, frozen=True):
    version: int


_versions = msgspec.msgpack.Decoder(_Version)
messages = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, decoder: msgspec.msgpack.Decoder[_Versioned]) -> _Versioned:
    """Decode a stranger's message; raises Malformed if it is malformed, too large, or of another version."""
    version = sanitize.decode(_versions, data, MAX_MESSAGE_BYTES).version
    if version != PROTOCOL_VERSION:
        newer = version > PROTOCOL_VERSION
        age, hint = ("newer", "upgrade this machine's") if newer else ("older", "have it upgraded")
        both = f"protocol version {version}, this machine version {PROTOCOL_VERSION}"
        raise VersionError(f"its equipoise is {age} ({both}): {hint} with pip install --upgrade equipoise")
    message = sanitize.decode(decoder, data, MAX_MESSAGE_BYTES)
    if isinstance(message, Message) and sum(len(one.data) for one in message.records) > PAGE_BYTES:
        raise Malformed(f"malformed message: expected at most {PAGE_BYTES} bytes of records")
    return message


class Instances:
    """Notices one identity on two machines, such as after a copied home: a third peer hears both, and tells them.

    libp2p does not connect a peer with itself, so the two daemons never meet. Every start of a daemon draws a random
    instance, which each message carries. A restart replaces the instance for good. So an instance that comes back after
    another one means that two daemons run.
    """

    def __init__(self) -> None:
        self._heard: LruDict[str, deque[bytes]] = LruDict(MAX_PEERS)
        self._doubled: LruDict[str, float] = LruDict(MAX_PEERS)

    def hear(self, peer: str, instance: bytes, now: float) -> None:
        """Note the instance of a message of `peer`; an empty instance is ignored."""
        if not instance:
            return
        heard = self._heard[peer] = self._heard.get(peer) or deque(maxlen=1 + MAX_FORMER)
        if instance in heard:
            if heard[-1] != instance:
                self._doubled[peer] = now
            heard.remove(instance)
        heard.append(instance)

    def doubled(self, peer: str, now: float) -> bool:
        """Tell whether two daemons spoke as `peer` within the last `DOUBLED_SECONDS`."""
        return self._doubled.get(peer, float("-inf")) + DOUBLED_SECONDS > now


class CallError(ConnectionError):
    """A peer gave no answer, or an unusable one; the message says why, `__cause__` is the error behind it."""


def node_id_of(peer: str) -> Any:
    """Return a peer's place in the DHT: a hash of its PeerID, so that no peer can choose it freely."""
    return DHTID.from_bytes(hashlib.sha256(b"equipoise/node/" + peer.encode()).digest()[:20])


class RecordProtocol:
    """Answers the DHT's call, makes it, and finds the peers nearest to keys.

    Attributes:
        dialer: Knows the addresses of peers, and which peers are connected.
        acquainted: Peers, in client mode too, that have called or answered, and were not lost since.
        addresses: Addresses where this peer listens; every message tells them.
        on_heard: Called with the PeerID of every peer that calls, or answers.
        on_record: Called with the entry of every new record.
        on_peer: Called with the PeerID of every peer new to the routing table.
        on_hello: Called with the PeerID of every peer that answers look-ups, and whether it relays for others.
        serves: Whether this peer answers look-ups; a peer that cannot be dialled does not.
        relays: Whether it relays for others.
        traversals: The look-ups under way; they end soon after the link is detached, because calls then fail at once.
        handlers: The unary handlers to register with p2pd.
        bans: Tells whether this daemon refuses a peer.
        doubled_until: Monotonic time until which another daemon counts as speaking with this daemon's identity.
    """

    def __init__(self, peer: str, serves: bool, link: P2pdClient, dialer: Dialer) -> None:
        self.peer = peer
        self.node_id = node_id_of(peer)
        self.routing_table = RoutingTable(self.node_id, MAX_NEAREST, BUCKET_DEPTH_MODULO)
        self.record_store = RecordStore(link.gate.swarm)
        self.acquainted: set[str] = set()
        self.addresses: tuple[str, ...] = ()
        self.on_heard: Callable[[str], None] = lambda peer: None
        self.on_record: Callable[[Entry], None] = lambda entry: None
        self.on_peer: Callable[[str], None] = lambda peer: None
        self.on_hello: Callable[[str, bool], None] = lambda peer, relays: None
        self.serves = serves
        self.relays = False
        self.doubled_until = float("-inf")
        self._instance = secrets.token_bytes(MAX_INSTANCE_BYTES)
        self._instances = Instances()
        self._link = link
        self.bans = link.gate.bans
        self.dialer = dialer
        self._limit = RateLimit(CALLS_PER_SECOND, CALLS_BURST)
        self._scrutiny = Scrutiny()
        self._verifier = ThreadPoolExecutor(1, "signatures")
        self._held = Tally()
        self._heard_at: LruDict[str, float] = LruDict(MAX_PEERS)
        self.traversals = TaskSet()
        self.handlers: dict[str, CallHandler] = {CALL: self._answer}

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
        await self.look_up([self.node_id.to_bytes()])

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

        own = {key: {self.node_id} for key in keys}
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

    def keep(self, own: Kept) -> None:
        """Put a record of this peer itself into the record store, unless a later one of the same identity is there."""
        with _refusing(own):
            record, _ = self.record_store.examine(own)
            self._tell(own, self.record_store.enter(own, record, time.monotonic()))

    async def take(self, records: Iterable[Kept], sender: str) -> None:
        """Put the valid ones of a sender's records into the record store.

        A thread verifies the signatures of all peers' records in turn; `Scrutiny` bounds how many wait for it.
        """
        now, store, news = time.monotonic(), self.record_store, []
        for kept in records:
            known = store.has(kept.subkey)
            if not store.knows(kept, now) and self._scrutiny.admits(sender, kept.subkey, known, now):
                with _refusing(kept):
                    news.append((kept, *store.examine(kept)))
        if not news:
            return
        loop = asyncio.get_running_loop()
        genuine, forged = await loop.run_in_executor(self._verifier, _verified, news)
        for kept, record, _ in news[:genuine]:
            with _refusing(kept):
                self._tell(kept, store.enter(kept, record, time.monotonic()))
        if forged is not None:
            self._scrutiny.distrust(sender, time.monotonic())
            self.lose(sender)
            _log.info("nothing is taken from %s for a while: %s", sender, forged)

    def _tell(self, kept: Kept, entry: Entry) -> None:
        self.dialer.learn(kept.subkey, entry.record.addresses)
        self.on_record(entry)

    async def _call(self, peer: str, keys: Sequence[bytes] = (), records: Sequence[Kept] = ()) -> Message:
        """Ask `peer`; return its answer. Raises CallError without a usable one."""
        question = self._message(peer, keys=tuple(keys), records=tuple(records))
        began = time.monotonic()
        if not self._link.attached:
            raise CallError("p2pd is not running")
        if self._scrutiny.distrusts(peer, time.monotonic()):
            raise CallError(f"{peer} {FORGER}")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self.dialer.reach(peer)
                data = await self._link.call(peer, CALL, encode(question), CALL_SECONDS)
            answer = decode(data, messages)
        except TimeoutError:
            if self._heard_at.get(peer, began) <= began:
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
        distrusted = self._scrutiny.distrusts(peer, now)
        if distrusted or not self._limit.allow(peer, now):
            await self._hold(peer)
            raise Malformed(f"{peer} {FORGER}" if distrusted else "too many calls; wait a second")
        try:
            asked = decode(data, messages)
        except VersionError:
            # The bare version suffices: the caller itself words the error that says which side is older.
            return encode(Versioned())
        self._meet(peer, asked)
        await self.take(asked.records, peer)
        now = time.monotonic()
        found = [kept for key in dict.fromkeys(asked.keys) for kept in self.record_store.under(key, now)]
        nearest = tuple(self._nearest(key, peer) for key in asked.keys)
        return encode(self._message(peer, records=_page(found), nearest=nearest))

    async def _hold(self, peer: str) -> None:
        """Delay a refusal, because a caller that is refused at once calls again at once."""
        if self._held[peer] >= MAX_HELD_OF_ONE or self._held.total() >= MAX_HELD:
            return
        with self._held.counting(peer):
            await asyncio.sleep(HELD_SECONDS)

    def _message(self, peer: str, **content: Any) -> Message:
        """Return a message to `peer`, with what it must know of this peer."""
        return Message(
            serves=self.serves,
            addresses=self.addresses,
            relays=self.relays,
            instance=self._instance,
            doubled=self._instances.doubled(peer, time.monotonic()),
            **content,
        )

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
        self._heard_at[peer] = now
        self.on_heard(peer)
        self._instances.hear(peer, said.instance, now)
        if said.doubled:
            self.doubled_until = now + DOUBLED_SECONDS
        self.dialer.learn(peer, said.addresses)
        if len(self.acquainted) < MAX_ACQUAINTED:
            self.acquainted.add(peer)
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
            self.acquainted.discard(peer)
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


@contextlib.contextmanager
def _refusing(kept: Kept) -> Iterator[None]:
    try:
        yield
    except Malformed as error:
        _log.debug("refused a record under %s: %s", printable(kept.subkey, 64), error)


def _verified(news: list[tuple[Kept, Readiness, Envelope]]) -> tuple[int, Forged | None]:
    """Verify signatures up to the first that is forged; return how many are genuine, and the fault."""
    for genuine, (_, record, envelope) in enumerate(news):
        try:
            check(record, envelope)
        except Forged as error:
            return genuine, error
    return len(news), None
