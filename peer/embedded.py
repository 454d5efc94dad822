"""`Peer`: a daemon in a thread of the training script's own process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from equipoise.peer.config import Loaded, load
from equipoise.peer.connecting import Client
from equipoise.peer.control.client import START_SECONDS, Link
from equipoise.peer.daemon.daemon import Daemon
from equipoise.peer.daemon.run_daemon import run_loop
from equipoise.peer.home import STOP_SECONDS


class Peer(Client):
    """A daemon in this process, and a client of it; all else is as with `connect`.

    The client reaches the daemon through a socket pair, so both faces are the same code.
    """

    def __init__(
        self,
        join: Sequence[str] = (),
        home: str | os.PathLike[str] | None = None,
        listen: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        """Start the daemon.

        Args:
            join: Addresses of daemons to join the swarm through.
            home: Directory of its identity, log and control socket; by default a temporary one, gone with the Peer.
            listen: Multiaddresses to listen on.
            **settings: Other keys of `equipoise.peer.config.Config`, such as `name` or `client_mode`.

        Raises:
            ConfigError: A setting is unknown or has a wrong value.
            HomeError: The home cannot be used, or another daemon runs there.
        """
        with contextlib.ExitStack() as ending:
            place = home
            if place is None:
                place = ending.enter_context(tempfile.TemporaryDirectory(prefix="equipoise-"))
            flags = {"home": place, "join": tuple(join), "listen": tuple(listen), **settings}
            thread = DaemonThread(load(flags, style="argument "))
            ending.callback(weakref.finalize(self, thread.stop))
            link = thread.connect()
            self._ending = ending.pop_all()
        if home is None:
            link.welcome = msgspec.structs.replace(link.welcome, home="")
        super().__init__(link)

    def close(self) -> None:
        """Leave all runs, stop the daemon and, if it is a temporary one, remove its home; idempotent."""
        super().close()
        self._ending.close()


class DaemonThread:
    """Runs a daemon on an event loop in a thread of its own."""

    def __init__(self, loaded: Loaded) -> None:
        """Start it, and wait until it serves; raises what its start raises."""
        self._started = concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, Daemon]]()
        self._thread = threading.Thread(
            target=lambda: run_loop(self._serve(loaded)), name="equipoise-daemon", daemon=True
        )
        self._thread.start()
        self._started.result(START_SECONDS)

    def connect(self) -> Link:
        """A link to the daemon."""
        ours, theirs = socket.socketpair()
        self._call(lambda daemon: daemon.server.adopt(theirs))
        return Link.open(ours)

    def stop(self) -> None:
        """Stop the daemon and wait for the end of the thread; idempotent."""
        with contextlib.suppress(RuntimeError):  # Its loop has ended already: someone else has stopped it.
            self._call(lambda daemon: daemon.request_stop("its Peer was closed"))
        self._thread.join(STOP_SECONDS)

    def _call(self, action: Callable[[Daemon], None]) -> None:
        loop, daemon = self._started.result()
        loop.call_soon_threadsafe(action, daemon)

    async def _serve(self, loaded: Loaded) -> None:
        daemon = Daemon(loaded)
        try:
            await daemon.start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result((asyncio.get_running_loop(), daemon))
        try:
            await daemon.serve()
        finally:
            await daemon.stop()
