"""Streams that p2pd hands over: one listener for each protocol that this daemon speaks."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from equipoise.dht.link import Link, inbound_stream
from equipoise.dht.streams import Stream, receive_message

PREFACE_SECONDS = 5.0
"""p2pd says at once who a stream is from."""
PEERS_SHARE = 8
"""No peer takes more than an eighth of what is handled at once."""
PAUSE_SECONDS = 0.5
"""Without accepting, after the system had no descriptor left."""

Handler = Callable[[str, bool, Stream], Awaitable[None]]
"""Given the PeerID of the other end (authenticated by libp2p), whether a relay lies between, and the stream, which is
closed when the handler ends."""

_log = logging.getLogger(__name__)


class Inbound:
    """Listens for the streams of one protocol."""

    def __init__(self, protocol: str, path: Path, most: int, handler: Handler) -> None:
        """`most` streams are handled at once; further ones are closed."""
        self._protocol = protocol
        self._path = path
        self._most = most
        self._handler = handler
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._per_peer: Counter[str] = Counter()

    def listen(self) -> None:
        """Start to take streams from p2pd."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        self._listener.listen(self._most)
        self._resume(self._listener)

    async def attach(self, link: Link) -> None:
        """Have a (new) p2pd send streams here.

        Raises:
            LinkError: p2pd does not answer.
        """
        await link.listen_streams(self._protocol, self._path)

    async def stop(self) -> None:
        """Take no more streams, end those that are handled; idempotent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _resume(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # The listener stays readable: without a pause this would be called at every turn of the loop.
            _log.warning("cannot accept streams of %s for now: %s", self._protocol, error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(PAUSE_SECONDS, self._resume, listener)
            return
        if len(self._tasks) >= self._most:
            connection.close()
            _log.debug("a stream of %s is closed: %d are open, the maximum", self._protocol, self._most)
            return
        stream = Stream(connection)
        task = asyncio.get_running_loop().create_task(self._handle(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here and not in the task, which may be cancelled before it begins.
        task.add_done_callback(lambda _: stream.close())

    async def _handle(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(PREFACE_SECONDS):
                peer, relayed = inbound_stream(await receive_message(stream))
            if self._per_peer[peer] >= max(1, self._most // PEERS_SHARE):
                raise ValueError(f"{peer} has {self._per_peer[peer]} open already, the maximum")
            self._per_peer[peer] += 1
            try:
                await self._handler(peer, relayed, stream)
            finally:
                self._per_peer[peer] -= 1
                if not self._per_peer[peer]:
                    del self._per_peer[peer]
        except (ConnectionError, TimeoutError, ValueError) as error:
            _log.debug("a stream of %s: %s", self._protocol, error)
        except Exception:
            _log.exception("the handler of a stream of %s failed", self._protocol)
