"""The daemon's end of the control socket: it admits clients, answers each, and leaves its runs when it goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator

from equipoise.dht.admission import Refused as NotAdmitted
from equipoise.dht.streams import Acceptor
from equipoise.peer.control import messages
from equipoise.peer.control.messages import CONTROL_VERSION, Hello
from equipoise.peer.control.socket import SEND_SECONDS, FrameSocket
from equipoise.peer.daemon.dispatcher import Dispatcher, Host
from equipoise.peer.daemon.session import STOPPING
from equipoise.peer.errors import ControlError, EquipoiseError, Refused
from equipoise.peer.home import BACKLOG, peer_credentials
from equipoise.peer.status import Status
from equipoise.tasks import end

MAX_CONNECTIONS = 64
"""Clients of one machine: a trainer for each accelerator, and some people who look at the status.

Where so many are connected, a new client takes the place of the oldest that has not said hello.
"""

MAX_PENDING = 64
"""Requests of one client that are worked on at once, at most one round for each of its runs; more have to wait."""

HELLO_SECONDS = 30.0
"""Bounds the silence of a new connection: a client says hello at once, where it gets a processor."""

log = logging.getLogger(__name__)


class ServedClient:
    """One client: reads its requests, answers each when its answer is there, leaves its runs when it goes."""

    def __init__(
        self, connected: FrameSocket, daemon: Host, pid: int, count: Callable[[ServedClient], int]
    ) -> None:
        """`count` tells how many processes are connected, as this client is to see it."""
        self._socket = connected
        self._count = count
        self._daemon = daemon
        self.pid = pid
        script, take = f"process {pid}", connected.take_descriptor
        self._dispatcher = Dispatcher(daemon, script, take, self._say, self._status)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._greeted = False
        self._leaving = False

    @property
    def takes_part(self) -> bool:
        """True while the client is in a run."""
        return self._dispatcher.takes_part

    @property
    def silent(self) -> bool:
        """True while the client has yet to say hello, and is not being dropped already."""
        return not self._greeted and not self._closed.is_set()

    async def refuse(self, reason: str) -> None:
        """Answer that this client cannot be served, and close."""
        await self.dismiss(f"the daemon refuses this client: {reason}")
        self._socket.close()

    async def serve(self) -> None:
        """Serve until the client goes or `close` is called; then leave its runs and close the socket."""
        with _watching(self.pid, self.close):
            reading = asyncio.create_task(self._read())
            closed = asyncio.create_task(self._closed.wait())
            await asyncio.wait({reading, closed}, return_when=asyncio.FIRST_COMPLETED)
        await end((reading, closed))
        await self.leave_all("its client has gone")
        self._socket.close()

    def close(self) -> None:
        """Stop serving; `serve` then cleans up."""
        self._closed.set()

    async def dismiss(self, reason: str) -> None:
        """Say why the connection ends, and stop serving."""
        with contextlib.suppress(OSError, TimeoutError):
            await self._socket.send(messages.encode_reply(0, failure=reason))
        self.close()

    async def leave_all(self, reason: str) -> None:
        """Leave all runs of this client, and wait until what was asked has been answered.

        What is refused from now on has no answer: the end of the connection says why.
        """
        self._leaving = True
        await self._dispatcher.leave_all(reason)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=SEND_SECONDS)
            for task in late:
                task.cancel()
        await self._dispatcher.leave_all(reason)  # A join may have been on its way.

    def _status(self) -> Status:
        return self._daemon.status(self._count(self))

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                frames = await self._socket.frames()
                await self._greet(frames.pop(0))
            while True:
                for frame in frames:
                    await self._dispatch(frame)
                frames = await self._socket.frames()
        except (TimeoutError, ControlError, Refused) as error:
            log.warning("dropped %s: %s", self._dispatcher.client, error or "it said nothing")
            await self.dismiss(_reason(error))
        except (OSError, EOFError) as error:
            log.debug("%s has gone: %s", self._dispatcher.client, error)

    async def _greet(self, frame: bytes) -> None:
        number, content = messages.decode_number(frame)
        hello = messages.decode_request(content)
        if not isinstance(hello, Hello):
            raise ControlError(f"expected Hello as the first request, got {type(hello).__name__}")
        if hello.version != CONTROL_VERSION:
            older = "client" if hello.version < CONTROL_VERSION else "daemon"
            raise ControlError(
                f"the daemon speaks version {CONTROL_VERSION} of the control protocol and the client version "
                f"{hello.version}; upgrade equipoise on the {older}'s side and start that again"
            )
        self._dispatcher.client = f"{hello.client[:64]!r} (process {self.pid})"
        self._greeted = True
        await self._socket.send(messages.encode_reply(number, self._daemon.welcome()))

    async def _dispatch(self, frame: bytes) -> None:
        while len(self._tasks) >= MAX_PENDING:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(self._answer(frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, frame: bytes) -> None:
        reply = await self._reply(frame)
        if reply is None:
            return
        try:
            await self._socket.send(reply)
        except (OSError, TimeoutError) as error:
            log.info("%s cannot be answered: %s", self._dispatcher.client, error)
            self.close()

    async def _say(self, line: str) -> None:
        """Have the client's script log a line."""
        with contextlib.suppress(OSError, TimeoutError):  # The answer that follows finds out.
            await self._socket.send(messages.encode_reply(0, line))

    async def _reply(self, frame: bytes) -> bytes | None:
        number, what = 0, "a request"
        try:
            number, content = messages.decode_number(frame)
            request = messages.decode_request(content)
            what = type(request).__name__
            return messages.encode_reply(number, await self._dispatcher.do(request))
        except (EquipoiseError, NotAdmitted, ValueError) as error:
            if self._leaving:
                return None
            failure = _reason(error)
        except Exception as error:
            log.exception("%s failed", what)
            failure = f"the daemon failed at {what}: {_reason(error)}; its log says more"
        return messages.encode_reply(number, failure=failure)


class ControlServer:
    """Accepts clients and serves each until it or the daemon goes."""

    def __init__(self, daemon: Host) -> None:
        self._daemon = daemon
        self._connections: dict[ServedClient, asyncio.Task[None]] = {}
        self._acceptor: Acceptor | None = None

    def clients(self, asker: ServedClient | None = None) -> int:
        """Number of connected processes. The one that asks, as `equipoise status`, counts only if it is in a run."""
        return len({one.pid for one in self._connections if one is not asker or one.takes_part})

    def start(self, listener: socket.socket) -> None:
        """Accept clients on `listener`, which is taken over."""
        self._acceptor = Acceptor(listener, BACKLOG, lambda connected, _: self.adopt(connected))

    def adopt(self, connected: socket.socket) -> None:
        """Serve the client at the other end of a connected socket, which is taken over."""
        pid, uid = peer_credentials(connected)
        if uid not in (0, os.geteuid()):
            log.warning("refused uid %d on the control socket", uid)
            connected.close()
            return
        connection = ServedClient(FrameSocket(connected), self._daemon, pid, self.clients)
        silent = next((one for one in self._connections if one.silent), None)
        full = len(self._connections) >= MAX_CONNECTIONS
        if full and silent is not None:
            silent.close()
        refused = full and silent is None
        too_many = f"it has {MAX_CONNECTIONS} clients already"
        serving = connection.refuse(too_many) if refused else connection.serve()
        task = asyncio.create_task(serving)
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    async def stop(self, reason: str) -> None:
        """Leave all runs, answer what is open, and close all connections, whose clients are told the reason."""
        if self._acceptor is not None:
            self._acceptor.close()
        serving = dict(self._connections)
        await asyncio.gather(*(connection.leave_all(STOPPING) for connection in serving))
        await asyncio.gather(*(connection.dismiss(reason) for connection in serving))
        await asyncio.gather(*serving.values(), return_exceptions=True)


@contextlib.contextmanager
def _watching(pid: int, ended: Callable[[], None]) -> Iterator[None]:
    """Call `ended` when process `pid` ends: its forked children may hold the socket open long after it."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        # The interpreter was built for an old system, or the process is in another namespace.
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
