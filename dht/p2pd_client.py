"""Our end of one p2pd: requests with deadlines, unary calls, streams. p2pd itself may come and go under it.

hivemind's client never returns from a call once p2pd is gone, and its reader of the persistent connection can
die alone; every request here has a deadline, and `broken` tells when to attach again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import base58

from equipoise.dht import streams
from equipoise.dht.address import is_relayed
from equipoise.dht.admission import UNPRESENTED
from equipoise.dht.gate import CallHandler, Gate
from equipoise.dht.hivemind_imports import P2P, Multiaddr, PeerID, p2pd_pb2, peer_id_of
from equipoise.dht.limits import Tally
from equipoise.dht.sanitize import printable
from equipoise.dht.streams import Acceptor, Stream, receive_message
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

_log = logging.getLogger(__name__)
_peer = functools.lru_cache(MAX_DECODED)(lambda data: str(PeerID(data)))
_multiaddr = functools.lru_cache(MAX_DECODED)(lambda data: str(Multiaddr(data)))


class P2pdClientError(ConnectionError):
    """p2pd did not do what was asked; the message is its, or says that it is gone, in one line."""


class P2pdGone(P2pdClientError):
    """No p2pd is there: it has ended, and its supervisor starts another one."""


class P2pdClient:
    """An attachment to a p2pd that listens on the unix socket `control`; all calls and streams pass the `gate`."""

    def __init__(self, control: Path, gate: Gate | None = None) -> None:
        self.control = control
        self.gate = gate or Gate()
        self.gate.call = self._call
        self._p2p: Any = None
        # p2pd ends with its last persistent connection: this one outlives those of hivemind's client.
        self._anchor: Stream | None = None

    @property
    def attached(self) -> bool:
        """True while requests have a chance."""
        return self._p2p is not None

    async def attach(self, calls: dict[str, CallHandler]) -> None:
        """Attach and register unary handlers; raises P2pdClientError, to be followed by `detach`, if p2pd is silent."""
        if self._anchor is None:
            self._anchor = await self._ask("attach", type="PERSISTENT_CONN_UPGRADE")
        p2p = await _bounded(P2P.replicate(Multiaddr(f"/unix{self.control}")), "attach")
        self._p2p = p2p
        for name, handler in self.gate.guarded(calls).items():
            # Handlers get the caller's PeerID as a string, as everywhere else.
            named = functools.partial(lambda handler, request, peer: handler(str(peer), request), handler)
            await _bounded(p2p._client.add_unary_handler(name, named), "register a call")

    async def detach(self, *, for_good: bool = True) -> None:
        """Give up the attachment; calls in flight fail at once. For good: p2pd ends if nobody else is attached."""
        if for_good and self._anchor is not None:
            self._anchor.close()
            self._anchor = None
        p2p, self._p2p = self._p2p, None
        if p2p is not None:
            control = p2p._client.control
            for answer in control._pending_calls.values():
                if not answer.done():
                    answer.set_exception(P2pdGone("p2pd is gone"))
            await p2p.shutdown()
            for task in control._handler_tasks.values():
                task.cancel()  # Nobody is left to answer.
            # Awaited here, because asyncio reports exceptions of tasks that nobody has awaited.
            tasks = control._read_task, control._write_task, *control._handler_tasks.values()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def broken(self) -> None:
        """Return when the persistent connection to p2pd has ended."""
        if self._p2p is not None:
            await asyncio.wait({self._p2p._client.control._read_task})

    async def identify(self) -> list[str]:
        """Return the multiaddrs that p2pd tells others, without the PeerID."""
        _, addresses = await _bounded(self._client().identify(), "identify")
        return [str(address) for address in addresses]

    async def connect(self, peer: str, address: bytes, seconds: float = REQUEST_SECONDS) -> None:
        """Connect to `peer` at a binary multiaddr without PeerID; raises P2pdClientError in libp2p's words."""
        target = {"peer": base58.b58decode(peer), "addrs": [address], "timeout": max(1, int(seconds))}
        (await self._ask(f"connect to {peer}", seconds, type="CONNECT", connect=target)).close()

    async def disconnect(self, peer: str) -> None:
        """Close every connection to `peer`; raises P2pdClientError if p2pd does not answer."""
        target = {"peer": base58.b58decode(peer)}
        (await self._ask(f"disconnect {peer}", type="DISCONNECT", disconnect=target)).close()

    async def connections(self) -> dict[str, tuple[str, ...]]:
        """Return the multiaddrs of the other ends of p2pd's connections, by PeerID; a relayed one has the relay's."""
        stream, response = await _bounded(self._request(p2pd_pb2.Request(type="LIST_PEERS")), "list peers")
        stream.close()
        found: dict[str, tuple[str, ...]] = {}
        for info in response.peers:
            peer = _peer(info.id)
            found[peer] = found.get(peer, ()) + tuple(map(_multiaddr, info.addrs))
        return found

    async def call(self, peer: str, name: str, request: bytes, seconds: float = REQUEST_SECONDS) -> bytes:
        """Call the unary handler `name` of `peer`; raises ConnectionError if no answer comes in time, or an error."""
        await self.gate.present(peer)
        name = self.gate.scoped(name)
        try:
            return await self._call(peer, name, request, seconds)
        except P2pdClientError as error:
            if UNPRESENTED not in str(error):
                raise
        self.gate.forget(peer)
        await self.gate.present(peer)
        return await self._call(peer, name, request, seconds)

    async def _call(self, peer: str, name: str, request: bytes, seconds: float) -> bytes:
        call = self._client().call_unary_handler(peer_id_of(peer), name, request)
        answer: bytes = await _bounded(call, f"call {peer}", seconds)
        return answer

    async def send_streams(self, listener: StreamListener) -> None:
        """Have p2pd hand inbound streams of a protocol to its listener, which passes on those of admitted peers."""
        listener.check = self.gate.check
        self.gate.ways.add(listener.protocol)
        address = Multiaddr(f"/unix{listener.path}").to_bytes()
        handler = {"addr": address, "proto": [self.gate.scoped(listener.protocol)], "balanced": False}
        (await self._ask("accept streams", type="STREAM_HANDLER", streamHandler=handler)).close()

    async def open_stream(self, peer: str, protocol: str, seconds: float = REQUEST_SECONDS) -> Stream:
        """Open a stream of `protocol` to `peer`; raises ConnectionError if it is not there, or does not speak it."""
        await self.gate.present(peer)
        protocol = self.gate.scoped(protocol)
        target = {"peer": base58.b58decode(peer), "proto": [protocol], "timeout": max(1, int(seconds))}
        return await self._ask(f"open a stream to {peer}", seconds, type="STREAM_OPEN", streamOpen=target)

    async def _ask(self, what: str, seconds: float = REQUEST_SECONDS, **request: Any) -> Stream:
        """Make one request on a connection of its own, and return that."""
        stream: Stream
        stream, _ = await _bounded(self._request(p2pd_pb2.Request(**request)), what, seconds)
        return stream

    async def _request(self, request: Any) -> tuple[Stream, Any]:
        with streams.closed_on_failure(await streams.connect_unix(str(self.control))) as stream:
            await streams.send_message(stream, request.SerializeToString())
            response = p2pd_pb2.Response.FromString(await receive_message(stream, RESPONSE_BYTES))
            if response.type == p2pd_pb2.Response.ERROR:
                raise P2pdClientError(printable(response.error.msg, ERROR_CHARACTERS))
        return stream, response

    def _client(self) -> Any:
        if self._p2p is None:
            raise P2pdGone("p2pd is not running")
        return self._p2p._client


async def _bounded(request: Awaitable[Any], what: str, seconds: float = REQUEST_SECONDS) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await request
    except TimeoutError:
        raise P2pdClientError(f"{what}: no answer within {seconds:.0f} s") from None
    except P2pdClientError:
        raise
    except (OSError, EOFError) as error:
        raise P2pdGone(f"{what}: p2pd is gone ({printable(str(error))})") from error
    except Exception as error:
        # hivemind's P2PDaemonError, P2PHandlerError and whatever protobuf raises on a torn answer.
        text = (str(error) or type(error).__name__).removeprefix("Connect failed. msg=")
        raise P2pdClientError(f"{what}: {printable(text, ERROR_CHARACTERS)}") from error


class StreamListener:
    """Listens at a unix socket, `path`, for the streams of one `protocol`, which p2pd hands over.

    `check` raises Refused for a peer that is not admitted; `P2pdClient.send_streams` sets it.
    """

    def __init__(self, protocol: str, path: Path, most: int, handler: StreamHandler) -> None:
        """`most` streams are handled at once; further ones are closed."""
        self.protocol = protocol
        self.path = path
        self._most = most
        self._handler = handler
        self.check: Callable[[str], None]
        self._acceptor: Acceptor | None = None
        self._tasks = TaskSet()
        self._per_peer = Tally()

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
            _log.debug("a stream of %s is closed: %d are open, the maximum", self.protocol, self._most)
            return
        stream = Stream(connection)
        # Closed here and not in the task, which may be cancelled before it begins.
        self._tasks.spawn(self._handle(stream)).add_done_callback(lambda _: stream.close())

    async def _handle(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(PREFACE_SECONDS):
                info = p2pd_pb2.StreamInfo.FromString(await receive_message(stream))
            peer, relayed = _peer(info.peer), is_relayed(_multiaddr(info.addr))
            self.check(peer)
            if self._per_peer[peer] >= max(1, self._most // PEERS_SHARE):
                raise ValueError(f"{peer} has {self._per_peer[peer]} open already, the maximum")
            with self._per_peer.counting(peer):
                await self._handler(peer, relayed, stream)
        except (ConnectionError, TimeoutError, ValueError) as error:
            _log.debug("a stream of %s: %s", self.protocol, error)
        except Exception:
            _log.exception("the handler of a stream of %s failed", self.protocol)
