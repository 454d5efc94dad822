"""Our end of one p2pd: requests with deadlines, calls, streams. p2pd itself may come and go under it.

Calls and their answers travel on one persistent connection to p2pd. hivemind's own client is not used: once p2pd is
gone it never returns from a call.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import base58

from equipoise.dht import streams
from equipoise.dht.address import is_relayed
from equipoise.dht.admission import UNPRESENTED
from equipoise.dht.gate import PRESENT, CallHandler, Gate
from equipoise.dht.hivemind_imports import Multiaddr, p2pd_pb2
from equipoise.dht.limits import Tally
from equipoise.dht.sanitize import printable
from equipoise.dht.streams import Acceptor, Stream, StreamClosed, receive_message, send_message
from equipoise.tasks import TaskSet

REQUEST_SECONDS = 5.0
"""Longest request: p2pd answers local ones within milliseconds; dialling a peer takes a few round trips."""
RESPONSE_BYTES = 1024 * 1024
"""Longest answer of p2pd: a connection takes some 60 bytes of the list of all."""
MAX_DECODED = 4096
"""Most PeerIDs, and most addresses, that are kept as text: the list of connections is asked for up to 20 times a
second where peers come, and to decode one of its entries takes 0.1 ms."""
ERROR_CHARACTERS = 1000
"""Longest error that is shown: libp2p lists every address that it tried, with the cause."""

PREFACE_SECONDS = 5.0
"""Longest wait for p2pd to name the peer of a stream, which it does at once."""
PEERS_SHARE = 8
"""No peer takes more than an eighth of what is handled at once."""

StreamHandler = Callable[[str, bool, Stream], Awaitable[None]]
"""Has the other end's PeerID, proved by libp2p, whether a relay lies between, and the stream, closed at its end."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_peer = functools.lru_cache(MAX_DECODED)(lambda data: base58.b58encode(data).decode())
_raw = functools.lru_cache(MAX_DECODED)(base58.b58decode)
_multiaddr = functools.lru_cache(MAX_DECODED)(lambda data: str(Multiaddr(data)))


class P2pdClientError(ConnectionError):
    """p2pd did not do what was asked; the message is its, or says that it is gone, in one line."""


class P2pdGone(P2pdClientError):
    """No p2pd is there: it has ended, and its supervisor starts another one."""


class P2pdClient:
    """A client of a p2pd that listens on the unix socket `control`; all calls and streams pass the `gate`.

    It is `attached` while requests have a chance.
    """

    def __init__(self, control: Path, gate: Gate | None = None) -> None:
        self.control = control
        self.gate = gate or Gate()
        self.gate.call = self._call
        self.listener = StreamListener(control.with_name("streams.sock"))
        self.attached = False
        self._line: Stream | None = None
        self._sending = asyncio.Lock()
        self._calls: dict[str, CallHandler] = {}
        self._answers: dict[bytes, asyncio.Future[Any]] = {}
        self._tasks = TaskSet()
        for name, handler in self.gate.calls.items():
            self.answer(name, handler)

    def accept(self, protocol: str, most: int, handler: StreamHandler) -> None:
        """Have `handler` take the streams of admitted peers in a protocol, `most` at once; effective at `attach`."""

        async def handle(peer: str, relayed: bool, stream: Stream) -> None:
            self.gate.check(peer)
            await handler(peer, relayed, stream)

        self.listener.ways[self.gate.scoped(protocol)] = most, handle

    def answer(self, name: str, handler: CallHandler) -> None:
        """Have `handler` answer the calls of admitted peers; effective at `attach`."""

        async def handle(peer: str, request: bytes) -> bytes:
            if name != PRESENT:  # The one call of strangers.
                self.gate.check(peer)
            return await handler(peer, request)

        self._calls[self.gate.scoped(name)] = handle

    async def attach(self) -> None:
        """Have p2pd hand over calls and streams; raises P2pdClientError, to be followed by `detach`, if it does not."""
        self._line, _ = await self._request("attach", type="PERSISTENT_CONN_UPGRADE")
        self._tasks.spawn(self._read(self._line))
        for name in self._calls:
            handler = {"proto": name, "balanced": False}
            await _bounded(self._say(addUnaryHandler=handler), "register a call", REQUEST_SECONDS)
        address = Multiaddr(f"/unix{self.listener.path}").to_bytes()
        streams = {"addr": address, "proto": [*self.listener.ways], "balanced": False}
        await self._ask("accept streams", type="STREAM_HANDLER", streamHandler=streams)
        self.attached = True

    async def detach(self) -> None:
        """Give up the attachment; calls in flight fail at once."""
        self.attached = False
        if self._line is not None:
            self._line.close()
        await self._tasks.stop()
        self._fail()

    async def _read(self, line: Stream) -> None:
        try:
            while True:
                await line.wait_readable()
                message = await receive_message(line, RESPONSE_BYTES)
                said = p2pd_pb2.PersistentConnectionResponse.FromString(message)
                if said.HasField("requestHandling"):
                    self._tasks.spawn(self._serve(said.callId, said.requestHandling))
                elif (answer := self._answers.get(said.callId)) is not None and not answer.done():
                    answer.set_result(said)
        except StreamClosed as error:
            _log.debug("p2pd: %s", error)
        finally:  # Without it no call is answered: the supervisor starts another p2pd.
            self.attached = False
            self._fail()

    async def _serve(self, number: bytes, asked: Any) -> None:
        try:
            said = {"response": await self._calls[asked.proto](_peer(asked.peer), asked.data)}
        except Exception as error:
            said = {"error": (str(error) or type(error).__name__).encode()}
        await self._send(callId=number, unaryResponse=said)

    async def _say(self, **message: Any) -> Any:
        """Send a message on the persistent connection, and return p2pd's answer."""
        number, answer = os.urandom(16), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            # Not in this task: cancelled in the midst of a message, it would leave the connection torn.
            self._tasks.spawn(self._send(callId=number, **message))
            return await answer
        except asyncio.CancelledError:
            self._tasks.spawn(self._send(callId=number, cancel={}))
            raise
        finally:
            del self._answers[number]

    async def _send(self, **message: Any) -> None:
        assert self._line is not None, "it is attached"
        try:
            async with self._sending:
                data = p2pd_pb2.PersistentConnectionRequest(**message).SerializeToString()
                await send_message(self._line, data)
        except StreamClosed:
            self._fail()

    def _fail(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(P2pdGone("p2pd is gone"))

    async def identify(self) -> list[str]:
        """Return the multiaddrs that p2pd tells others, without the PeerID."""
        response = await self._ask("identify", type="IDENTIFY")
        return [_multiaddr(address) for address in response.identify.addrs]

    async def connect(self, peer: str, address: bytes, seconds: float = REQUEST_SECONDS) -> None:
        """Connect to `peer` at a binary multiaddr without PeerID; raises P2pdClientError in libp2p's words."""
        target = {"peer": _raw(peer), "addrs": [address], "timeout": max(1, int(seconds))}
        await self._ask(f"connect to {peer}", seconds, type="CONNECT", connect=target)

    async def disconnect(self, peer: str) -> None:
        """Close every connection to `peer`; raises P2pdClientError if p2pd does not answer."""
        await self._ask(f"disconnect {peer}", type="DISCONNECT", disconnect={"peer": _raw(peer)})

    async def connections(self) -> dict[str, tuple[str, ...]]:
        """Return the multiaddrs of the other ends of p2pd's connections, by PeerID; a relayed one has the relay's."""
        found: dict[str, tuple[str, ...]] = {}
        for info in (await self._ask("list peers", type="LIST_PEERS")).peers:
            peer = _peer(info.id)
            found[peer] = found.get(peer, ()) + tuple(map(_multiaddr, info.addrs))
        return found

    async def call(self, peer: str, name: str, request: bytes, seconds: float = REQUEST_SECONDS) -> bytes:
        """Make the call `name` of `peer`; raises ConnectionError if no answer comes in time, or an error."""
        await self.gate.present(peer)
        try:
            return await self._call(peer, name, request, seconds)
        except P2pdClientError as error:
            if UNPRESENTED not in str(error):
                raise
        self.gate.forget(peer)
        await self.gate.present(peer)
        return await self._call(peer, name, request, seconds)

    async def _call(self, peer: str, name: str, request: bytes, seconds: float) -> bytes:
        if not self.attached:
            raise P2pdGone("p2pd is not running")
        asked = {"peer": _raw(peer), "proto": self.gate.scoped(name), "data": request}
        said = await _bounded(self._say(callUnary=asked), f"call {peer}", seconds)
        failure = said.daemonError.message or said.callUnaryResponse.error.decode(errors="replace")
        if failure:
            raise P2pdClientError(printable(failure, ERROR_CHARACTERS))
        answer: bytes = said.callUnaryResponse.response
        return answer

    async def open_stream(self, peer: str, protocol: str, seconds: float = REQUEST_SECONDS) -> Stream:
        """Open a stream of `protocol` to `peer`; raises ConnectionError if it is not there, or does not speak it."""
        await self.gate.present(peer)
        names = [self.gate.scoped(protocol)]
        target = {"peer": _raw(peer), "proto": names, "timeout": max(1, int(seconds))}
        what = f"open a stream to {peer}"
        stream, _ = await self._request(what, seconds, type="STREAM_OPEN", streamOpen=target)
        return stream

    async def _ask(self, what: str, seconds: float = REQUEST_SECONDS, **request: Any) -> Any:
        stream, response = await self._request(what, seconds, **request)
        stream.close()
        return response

    async def _request(
        self, what: str, seconds: float = REQUEST_SECONDS, **request: Any
    ) -> tuple[Stream, Any]:
        """Make one request on a connection of its own, and return that and the response."""

        async def ask() -> tuple[Stream, Any]:
            with streams.closed_on_failure(await streams.connect_unix(str(self.control))) as stream:
                await send_message(stream, p2pd_pb2.Request(**request).SerializeToString())
                response = p2pd_pb2.Response.FromString(await receive_message(stream, RESPONSE_BYTES))
                if response.type == p2pd_pb2.Response.ERROR:
                    raise P2pdClientError(printable(response.error.msg, ERROR_CHARACTERS))
            return stream, response

        return await _bounded(ask(), what, seconds)


async def _bounded(request: Awaitable[_T], what: str, seconds: float) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await request
    except TimeoutError:
        raise P2pdClientError(f"{what}: no answer within {seconds:.0f} s") from None
    except P2pdClientError:
        raise
    except OSError as error:
        raise P2pdGone(f"{what}: p2pd is gone ({printable(str(error))})") from error


class StreamListener:
    """Listens at a unix socket, `path`, for streams that p2pd hands over; each is for the handler of its protocol.

    `ways` has, by protocol, how many streams are handled at once and their handler; further ones are closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ways: dict[str, tuple[int, StreamHandler]] = {}
        self._acceptor: Acceptor | None = None
        self._tasks = TaskSet()
        self._open = Tally()

    @property
    def _most(self) -> int:
        return sum(most for most, _ in self.ways.values())

    def listen(self) -> None:
        """Start to take streams from p2pd."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self.path))
        self._acceptor = Acceptor(listening, self._most, self._take)

    async def stop(self) -> None:
        """Take no more streams, end those that are handled; idempotent."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None
        await self._tasks.stop()

    def _take(self, connection: socket.socket, _: str) -> None:
        if len(self._tasks) >= self._most:
            connection.close()
            return
        stream = Stream(connection)
        # Closed here and not in the task, which may be cancelled before it begins.
        self._tasks.spawn(self._handle(stream)).add_done_callback(lambda _: stream.close())

    async def _handle(self, stream: Stream) -> None:
        protocol = "any protocol"
        try:
            async with asyncio.timeout(PREFACE_SECONDS):
                info = p2pd_pb2.StreamInfo.FromString(await receive_message(stream))
            protocol, peer = info.proto, _peer(info.peer)
            most, handler = self.ways[protocol]
            own = f"{protocol} of {peer}"
            if self._open[protocol] >= most or self._open[own] >= max(1, most // PEERS_SHARE):
                raise ValueError(
                    f"{self._open[own]} of {peer} are open, {self._open[protocol]} in all: the maximum"
                )
            with self._open.counting(protocol, own):
                await handler(peer, is_relayed(_multiaddr(info.addr)), stream)
        except (ConnectionError, TimeoutError, ValueError) as error:
            _log.debug("a stream of %s: %s", protocol, error)
        except Exception:
            _log.exception("the handler of a stream of %s failed", protocol)
