"""The daemon's end of the control socket: who may connect, and how many."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

from equipoise.peer.connection import Connection, Host
from equipoise.peer.home import peer_credentials
from equipoise.peer.wire import FrameSocket

MAX_CONNECTIONS = 64
"""Clients of one machine: a trainer for each accelerator, and some people who look at the status.

Where so many are connected, a new client takes the place of the oldest that has not said hello.
"""

ACCEPT_PAUSE = 1.0
"""Seconds until the next try where the process is out of descriptors; others may be closed meanwhile."""

log = logging.getLogger(__name__)


class ControlServer:
    """Accepts clients and serves each until it or the daemon goes."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._accepting: asyncio.Task[None] | None = None

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._connections)

    def start(self, listener: socket.socket) -> None:
        """Accept clients on `listener`, which is taken over."""
        self._accepting = asyncio.create_task(self._accept(listener))

    def adopt(self, connected: socket.socket) -> None:
        """Serve the client at the other end of a connected socket, which is taken over."""
        credentials = peer_credentials(connected)
        if credentials is not None and credentials[1] not in (0, os.geteuid()):
            log.warning("refused uid %d on the control socket", credentials[1])
            connected.close()
            return
        connection = Connection(FrameSocket(connected), self._host, credentials[0] if credentials else 0)
        silent = next((one for one in self._connections if one.silent), None)
        full = len(self._connections) >= MAX_CONNECTIONS
        if full and silent is not None:
            silent.close()
        refused = full and silent is None
        serving = (
            connection.refuse(f"it has {MAX_CONNECTIONS} clients already") if refused else connection.serve()
        )
        task = asyncio.create_task(serving)
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))

    async def stop(self, reason: str) -> None:
        """Leave all runs, answer what is open, and close all connections, whose clients are told the reason."""
        if self._accepting is not None:
            self._accepting.cancel()
        serving = dict(self._connections)
        await asyncio.gather(*(connection.leave_all("this daemon is stopping") for connection in serving))
        await asyncio.gather(*(connection.dismiss(reason) for connection in serving))
        await asyncio.gather(*serving.values(), return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(listener):
            while True:
                try:
                    connected, _ = await loop.sock_accept(listener)
                except OSError as error:
                    log.error("cannot accept a client: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE)
                    continue
                self.adopt(connected)
