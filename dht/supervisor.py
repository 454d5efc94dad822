"""Keeps p2pd running and attached: starts it again under the same identity and ports, and says what is going on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from equipoise.dht.dialer import Dialer
from equipoise.dht.p2pd import P2pd, P2pdError, P2pdOptions, claim
from equipoise.dht.p2pd_client import P2pdClient, P2pdClientError
from equipoise.limits import backoff
from equipoise.tasks import TaskSet

FIRST_RESTART_SECONDS = 0.1
MAX_RESTART_SECONDS = 5.0
"""Longest pause before p2pd is started again if it dies at every start."""
WATCH_SECONDS = 1.0
"""Time between two questions to p2pd."""
MAX_SILENT_WATCHES = 4
"""Most questions in a row that go unanswered before p2pd is killed, half a minute in all: with thirty daemons on two
cores it may be busy for ten seconds, and to start it again costs all of them more than to wait."""
END_SECONDS = 0.5
"""Longest time from the break of the connection to the news that the process has ended."""

_log = logging.getLogger(__name__)


class Supervisor:
    """One p2pd after the other under one `P2pdClient`.

    Attributes:
        reason: Why there is no p2pd just now; empty while it runs.
        restarts: How often it has been started again.
        addresses: Multiaddrs that p2pd tells others, without PeerID; they follow this machine's interfaces.
        options: Those of each p2pd; from the start on, with the ports that it holds.
    """

    def __init__(
        self, link: P2pdClient, dialer: Dialer, options: P2pdOptions, moved: Callable[[], None]
    ) -> None:
        """`moved` is called whenever p2pd was started, or `addresses` are others than before."""
        self.reason = "p2pd is starting"
        self.restarts = 0
        self.addresses: list[str] = []
        self.options = options
        self._link = link
        self._dialer = dialer
        self._p2pd: P2pd | None = None
        self._tasks = TaskSet()
        self._moved = moved
        self._locks = contextlib.ExitStack()

    @property
    def pid(self) -> int | None:
        """Process id of p2pd; None while it is not running."""
        process = self._p2pd.process if self._p2pd is not None else None
        return process.pid if process is not None and process.returncode is None else None

    async def start(self, wish: int = 0) -> None:
        """Start p2pd on the ports that `claim` takes, and again whenever it ends; raises P2pdError if it cannot."""
        self.options = replace(self.options, listen=claim(self.options.listen, wish, self._locks))
        await self._launch()
        self._tasks.keep(self._keep_running)

    async def stop(self) -> None:
        """End p2pd."""
        await self._tasks.stop()
        await self._link.detach()
        if self._p2pd is not None:
            await self._p2pd.stop()
        self._locks.close()
        self.reason = "stopped"

    async def _launch(self) -> None:
        p2pd = self._p2pd = await P2pd.start(self.options)
        try:
            await self._link.attach()
            self.addresses = await self._link.identify()
            self.reason = ""
            self._moved()
        except OSError as error:
            # It does not answer, or this process has no descriptor left for its streams.
            await self._link.detach()
            await p2pd.stop()
            raise P2pdError(f"p2pd started but cannot be used: {error}") from error

    async def _keep_running(self) -> None:
        while True:
            assert self._p2pd is not None, "it was started once"
            self.reason = await self._until_broken(self._p2pd)
            _log.warning("%s; starting it again", self.reason)
            await self._link.detach()
            self._dialer.lose_all()
            await self._p2pd.stop()
            delay = 0.0
            while self.reason:
                try:
                    await self._launch()
                    self.restarts += 1
                except P2pdError as error:
                    self.reason = str(error)
                    _log.warning("%s", error)
                    delay = backoff(delay, FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS)
                    await asyncio.sleep(delay)

    async def _until_broken(self, p2pd: P2pd) -> str:
        ended = asyncio.create_task(p2pd.wait())
        silent = asyncio.create_task(self._until_silent())
        try:
            await asyncio.wait({ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            # The connection to a p2pd that ends breaks a moment before the end itself is known.
            await asyncio.wait({ended}, timeout=END_SECONDS)
            return f"p2pd ended ({ended.result()})" if ended.done() else "p2pd does not answer"
        finally:
            ended.cancel()
            silent.cancel()

    async def _until_silent(self) -> None:
        missed = 0
        while missed < MAX_SILENT_WATCHES and self._link.attached:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                await self._dialer.refresh()
                addresses = await self._link.identify()
                missed = 0
            except P2pdClientError:
                missed += 1
            else:
                if set(addresses) != set(self.addresses):
                    self.addresses = addresses
                    self._moved()
