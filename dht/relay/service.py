"""The relay: reservations of peers that cannot be dialled, and circuits to them, counted and paced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import base58

from equipoise.dht.dialer import Dialer
from equipoise.dht.identity import public_key_of
from equipoise.dht.limits import Tally, TokenBucket
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.dht.relay import messages
from equipoise.dht.relay.messages import Hop, Kind, Status, Stop, StopKind
from equipoise.dht.sanitize import Malformed
from equipoise.dht.state import RelayStatus
from equipoise.dht.streams import Stream, StreamClosed, closed_on_failure
from equipoise.dht.tasks import end

MAX_RESERVATIONS = 128
"""go-libp2p's own default."""
MAX_CIRCUITS = 64
"""Most circuits in all; each holds four descriptors here and a chunk of memory."""
MAX_CIRCUITS_PER_PEER = 16
"""Most circuits from or to one peer, go-libp2p's own default."""
RESERVED_SECONDS = 3600.0
"""go-libp2p's own default; ours renew every five minutes."""
ANSWER_SECONDS = 5.0
"""Longest wait for each message of the opening."""
IDLE_SECONDS = 120.0
"""libp2p's multiplexer sends something every 30 s: a direction silent for so long leads nowhere."""
CHUNK_BYTES = 64 * 1024
"""One read, paced as one: at the default rate a circuit waits 5 ms for each other circuit's."""

_log = logging.getLogger(__name__)


class RequestRefused(Exception):
    """A request is refused; the message says why, `status` is the answer."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


class RelayService:
    """Answers `HOP_PROTOCOL` in p2pd's place.

    All circuits together carry `bandwidth` bytes a second, both directions; without a bandwidth it refuses everybody.
    """

    def __init__(self, link: P2pdClient, dialer: Dialer, bandwidth: float | None) -> None:
        self._link = link
        self._dialer = dialer
        self._bandwidth = bandwidth
        self._bucket = TokenBucket(bandwidth or 1.0)
        self._reserved: dict[str, float] = {}
        self._circuits = Tally()
        self._bytes = 0
        self._refused = 0

    @property
    def _open(self) -> int:
        return self._circuits.total() // 2

    def status(self) -> RelayStatus | None:
        """Return a snapshot; None if this peer does not relay."""
        if self._bandwidth is None:
            return None
        return RelayStatus(self._bandwidth, len(self._reserved), self._open, self._bytes, self._refused)

    async def handle(self, peer: str, relayed: bool, stream: Stream) -> None:
        """Serve one request of `peer`; raises ConnectionError if it or p2pd goes away, TimeoutError if it is silent."""
        try:
            await self._serve(peer, relayed, stream)
        except RequestRefused as refusal:
            self._refused += 1
            _log.info("no relaying for %s: %s", peer, refusal)
            await messages.send(stream, Hop(kind=Kind.STATUS, status=refusal.status))

    async def _serve(self, peer: str, relayed: bool, stream: Stream) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                request = await messages.receive(stream, Hop)
        except Malformed as error:
            raise RequestRefused(Status.MALFORMED_MESSAGE, str(error)) from None
        if self._bandwidth is None or relayed:
            why = "it is relayed itself" if relayed else "this peer does not relay"
            raise RequestRefused(Status.PERMISSION_DENIED, why)
        if request.kind == Kind.RESERVE:
            await self._reserve(peer, stream)
        elif request.kind == Kind.CONNECT:
            target = base58.b58encode(request.peer.id[:64]).decode()
            self._check(peer, target)
            # Counted before anything is waited for: whoever asks many times at once gets no more.
            with self._circuits.counting(peer, target):
                await self._carry(peer, target, stream)
        else:
            raise RequestRefused(Status.UNEXPECTED_MESSAGE, f"kind {request.kind}")

    async def _reserve(self, peer: str, stream: Stream) -> None:
        now = time.monotonic()
        self._reserved = {one: until for one, until in self._reserved.items() if until > now}
        if peer not in self._reserved and len(self._reserved) >= MAX_RESERVATIONS:
            # Those who have gone made room without saying so.
            here = await self._dialer.refresh()
            self._reserved = {one: until for one, until in self._reserved.items() if one in here}
        if peer not in self._reserved and len(self._reserved) >= MAX_RESERVATIONS:
            raise RequestRefused(Status.RESERVATION_REFUSED, f"{MAX_RESERVATIONS} are taken")
        self._reserved[peer] = now + RESERVED_SECONDS
        _log.info("relaying for %s", peer)
        # Ours do not read the expiry, others compare it with clocks of their own: far enough for either.
        expires = {"expires": 2**40}
        answer = Hop(kind=Kind.STATUS, reservation=expires, status=Status.OK)
        await messages.send(stream, answer)

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
            self._reserved.pop(target, None)
            raise RequestRefused(Status.NO_RESERVATION, f"{target} is not connected")
        try:
            other = await self._call(peer, target)
        except (ConnectionError, Malformed, TimeoutError) as error:
            why = str(error) or f"{target} does not answer within {ANSWER_SECONDS:.0f} s"
            raise RequestRefused(Status.CONNECTION_FAILED, why) from None
        with contextlib.closing(other):
            await messages.send(stream, Hop(kind=Kind.STATUS, status=Status.OK))
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
        caller = {"id": base58.b58decode(peer)}
        with closed_on_failure(
            await self._link.open_stream(target, messages.STOP_PROTOCOL, ANSWER_SECONDS)
        ) as other:
            async with asyncio.timeout(ANSWER_SECONDS):
                await messages.send(other, Stop(kind=StopKind.CONNECT, peer=caller))
                answer = await messages.receive(other, Stop)
            if answer.status != Status.OK:
                raise P2pdClientError(f"{target} answers: {messages.describe(answer.status)}")
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
