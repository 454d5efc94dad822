"""The relay: reservations of peers that cannot be dialled, and circuits to them, counted and paced.

Its messages are protobufs of libp2p's circuit relay, version 2 (libp2p specs, relay/circuit-v2.md). Nine fields need no
generated code: this module makes their descriptors. A field that was not set reads as 0, or as empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from enum import IntEnum
from typing import Any

import base58
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError

from equipoise.dht.dialer import Dialer
from equipoise.dht.identity import public_key_of
from equipoise.dht.limits import Tally, TokenBucket
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.sanitize import Malformed
from equipoise.dht.state import RelayStatus
from equipoise.dht.streams import Stream, StreamClosed, closed_on_failure, receive_message, send_message
from equipoise.tasks import end

MAX_RESERVATIONS = 128
"""Most reservations: go-libp2p's own default. Half of them are for peers met in rounds."""
MAX_CIRCUITS = 64
"""Most circuits in all; each holds four descriptors and a chunk of memory."""
MAX_CIRCUITS_PER_PEER = 16
"""Most circuits from or to one peer, go-libp2p's own default."""
MAX_HOPS = 256
"""Most requests and circuits at once, of which most are refused."""
RESERVED_SECONDS = 3600.0
"""Life of a reservation: go-libp2p's own default. Equipoise's peers renew theirs every five minutes."""
ANSWER_SECONDS = 5.0
"""Longest wait for each message of the opening."""
IDLE_SECONDS = 120.0
"""Longest silence of a direction: libp2p's multiplexer sends bytes every 30 s, so the other end is dead by then."""
CHUNK_BYTES = 64 * 1024
"""One read, paced as one: at the default rate a circuit waits 5 ms for each other circuit's."""

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
"""The protocol of a peer that asks a relay for a reservation or a circuit."""
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
"""The protocol in which the relay asks the target of a circuit."""
STOP_CONNECT = 0
"""Kind of the message of that protocol by which the relay asks."""

_log = logging.getLogger(__name__)


class Kind(IntEnum):
    """Kind of a message to a relay."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class Status(IntEnum):
    """The outcome of a request."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


_FIELDS = {
    "Peer": "id:bytes",
    "Reservation": "expires",
    "Limit": "seconds bytes",
    "Hop": "kind peer:Peer reservation:Reservation limit:Limit status",
    "Stop": "kind peer:Peer limit:Limit status",
}
"""Fields of each message, in the order of their numbers; without a type they are uint64. `expires` is in seconds since
1970, by the relay's clock. `Limit` bounds the seconds of one circuit and its bytes in each direction; 0 or no limit
means no bound. `id` is the binary PeerID of a circuit's target or source."""


def _protobufs() -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    scalars = {"bytes": types.TYPE_BYTES, "": types.TYPE_UINT64}
    file = descriptor_pb2.FileDescriptorProto(name="circuit.proto", package="circuit")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields.split(), start=1):
            field, _, kind = text.partition(":")
            added = message.field.add(name=field, number=number, label=types.LABEL_OPTIONAL)
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type, added.type_name = types.TYPE_MESSAGE, f".circuit.{kind}"
    return message_factory.GetMessages([file])


_CLASSES = _protobufs()
Hop, Stop = _CLASSES["circuit.Hop"], _CLASSES["circuit.Stop"]
"""The messages of the two protocols."""


async def send(stream: Stream, message: Any) -> None:
    """Send a `Hop` or a `Stop`; raises StreamClosed as `Stream.send` does."""
    await send_message(stream, message.SerializeToString())


async def receive(stream: Stream, kind: Any) -> Any:
    """Receive a `Hop` or a `Stop`; raises Malformed if it is neither, StreamClosed if it ends or is too long."""
    return decode(await receive_message(stream), kind)


def decode(data: bytes, kind: Any) -> Any:
    """Read a `Hop` or a `Stop`; raises Malformed if it is neither."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Malformed(f"malformed message: {error}") from None


def describe(status: int) -> str:
    """Return a status as words."""
    names = {int(one): one.name.lower().replace("_", " ") for one in Status}
    return names.get(status, f"status {status}")


class RequestRefused(Exception):
    """A request is refused; the message says why, `status` is the answer."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


class RelayService:
    """Answers `HOP_PROTOCOL`; all circuits together carry `bandwidth` bytes a second, both directions."""

    def __init__(self, link: P2pdClient, dialer: Dialer, bandwidth: float) -> None:
        self._link = link
        link.accept(HOP_PROTOCOL, MAX_HOPS, self.handle)
        self._dialer = dialer
        self._bandwidth = bandwidth
        self._bucket = TokenBucket(bandwidth)
        self._reserved: dict[str, float] = {}
        self._circuits = Tally()
        self._bytes = 0
        self._refused = 0

    @property
    def _open(self) -> int:
        return self._circuits.total() // 2

    def status(self) -> RelayStatus:
        """Return a snapshot."""
        return RelayStatus(self._bandwidth, len(self._reserved), self._open, self._bytes, self._refused)

    async def handle(self, peer: str, relayed: bool, stream: Stream) -> None:
        """Serve one request of `peer`; raises ConnectionError if it or p2pd goes away, TimeoutError if it is silent."""
        try:
            await self._serve(peer, relayed, stream)
        except RequestRefused as refusal:
            self._refused += 1
            _log.info("no relaying for %s: %s", peer, refusal)
            await send(stream, Hop(kind=Kind.STATUS, status=refusal.status))

    async def _serve(self, peer: str, relayed: bool, stream: Stream) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                request = await receive(stream, Hop)
        except Malformed as error:
            raise RequestRefused(Status.MALFORMED_MESSAGE, str(error)) from None
        if relayed:
            raise RequestRefused(Status.PERMISSION_DENIED, "it is relayed itself")
        if request.kind == Kind.RESERVE:
            await self._reserve(peer, stream)
        elif request.kind == Kind.CONNECT:
            target = base58.b58encode(request.peer.id[:64]).decode()
            self._check(peer, target)
            # Counted before the first await, so that a peer that asks many times at once gets no more.
            with self._circuits.counting(peer, target):
                await self._carry(peer, target, stream)
        else:
            raise RequestRefused(Status.UNEXPECTED_MESSAGE, f"kind {request.kind}")

    async def _reserve(self, peer: str, stream: Stream) -> None:
        now = time.monotonic()
        self._reserved = {one: until for one, until in self._reserved.items() if until > now}
        if self._full(peer):
            # Peers that have gone do not cancel their reservations.
            here = await self._dialer.refresh()
            self._reserved = {one: until for one, until in self._reserved.items() if one in here}
        if self._full(peer):
            raise RequestRefused(Status.RESERVATION_REFUSED, f"{len(self._reserved)} are taken")
        self._reserved[peer] = now + RESERVED_SECONDS
        _log.info("relaying for %s", peer)
        # Equipoise's peers ignore the expiry; others compare it with their own clocks. So it is far in the future.
        await send(stream, Hop(kind=Kind.STATUS, reservation={"expires": 2**40}, status=Status.OK))

    def _full(self, peer: str) -> bool:
        met, taken = self._link.gate.met, self._reserved
        if peer in met or peer in taken:
            return peer not in taken and len(taken) >= MAX_RESERVATIONS
        return len(taken) >= MAX_RESERVATIONS or len(taken.keys() - met.keys()) >= MAX_RESERVATIONS // 2

    def _check(self, peer: str, target: str) -> None:
        """Raise RequestRefused unless a circuit from `peer` to `target` may be opened."""
        try:
            public_key_of(target)
        except ValueError as error:
            raise RequestRefused(Status.MALFORMED_MESSAGE, str(error)) from None
        most = max(self._circuits[peer], self._circuits[target])
        if self._open >= MAX_CIRCUITS or most >= MAX_CIRCUITS_PER_PEER:
            raise RequestRefused(Status.RESOURCE_LIMIT_EXCEEDED, f"{self._open} circuits are open")
        if self._reserved.get(target, 0.0) < time.monotonic():
            raise RequestRefused(Status.NO_RESERVATION, f"{target} has not asked for it")

    async def _carry(self, peer: str, target: str, stream: Stream) -> None:
        if target not in await self._dialer.refresh():
            raise RequestRefused(Status.NO_RESERVATION, f"{target} is not connected")
        try:
            other = await self._call(peer, target)
        except (ConnectionError, Malformed, TimeoutError) as error:
            why = str(error) or f"{target} does not answer within {ANSWER_SECONDS:.0f} s"
            raise RequestRefused(Status.CONNECTION_FAILED, why) from None
        with contextlib.closing(other):
            await send(stream, Hop(kind=Kind.STATUS, status=Status.OK))
            ways = ((stream, other), (other, stream))
            pumps = [asyncio.create_task(self._pump(*way)) for way in ways]
            try:
                done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                why = next(iter(done)).result()
            finally:
                await end(pumps)
            _log.info("the circuit from %s to %s has ended: %s", peer, target, why)

    async def _call(self, peer: str, target: str) -> Stream:
        """Open the half of a circuit that leads to `target`; raises an error if `target` does not agree."""
        with closed_on_failure(await self._link.open_stream(target, STOP_PROTOCOL, ANSWER_SECONDS)) as other:
            async with asyncio.timeout(ANSWER_SECONDS):
                await send(other, Stop(kind=STOP_CONNECT, peer={"id": base58.b58decode(peer)}))
                answer = await receive(other, Stop)
            if answer.status != Status.OK:
                raise P2pdClientError(f"{target} answers: {describe(answer.status)}")
        return other

    async def _pump(self, source: Stream, sink: Stream) -> str:
        """Carry bytes one way until that ends; return why."""
        chunk = memoryview(bytearray(CHUNK_BYTES))
        try:
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    count = await source.receive_some(chunk)
                await self._bucket.take(count)
                await sink.send(chunk[:count])
                self._bytes += count
        except TimeoutError:
            return f"nothing came for {IDLE_SECONDS:.0f} s"
        except StreamClosed as error:
            return str(error)
