"""The daemon: one home, one swarm, one router of runs, one control socket; started and stopped in that order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from equipoise.dht.sanitize import escaped
from equipoise.dht.state import AddressState, BootstrapStatus, SwarmStatus
from equipoise.peer.config import Loaded
from equipoise.peer.control.messages import Welcome
from equipoise.peer.daemon.history import RoundHistory
from equipoise.peer.daemon.logs import PrivateFileHandler, close_log, open_log
from equipoise.peer.daemon.run_view import run_status
from equipoise.peer.daemon.server import ControlServer
from equipoise.peer.daemon.service import Service
from equipoise.peer.errors import ConfigError, EquipoiseError, Refused, Unreached
from equipoise.peer.home import LOG_FILE, Home
from equipoise.peer.status import Status
from equipoise.tasks import Failures, TaskSet, failures

STOP_SECONDS = 8.0
"""Time for each part of the daemon to end: open rounds (bounded by 5 s themselves), then the rest."""

WATCH_SECONDS = 0.2
"""Time between two looks at the state of the swarm; people read the lines."""

PACKAGES = ("equipoise", "hivemind", "torch", "msgspec", "uvloop")

_COMPARE = "compare host and port with what the daemon there prints"

NEXT_STEPS: dict[AddressState, str] = {
    "refused": f"start the daemon there, or {_COMPARE}",
    "timeout": f"{_COMPARE}, and have its firewall let the port through",
    "unresolved": "correct the host name, or give an IP address",
    "no network": "connect this machine to a network",
    "wrong peer": "copy the address that the daemon there prints now",
    "failed": _COMPARE,
    "not admitted": "ask a member for a new invitation",
}
"""Next step for a person, by the state of an address; the reasons of the other states have one themselves."""

log = logging.getLogger(__name__)


class Daemon:
    """Runs on the current event loop between `start` and `stop`.

    Attributes:
        server: Hears its clients.
        service: Joins and serves runs for them.
        history: The outcomes of their rounds.
    """

    service: Service
    history: RoundHistory
    _home: Home
    _log_file: PrivateFileHandler

    def __init__(
        self, loaded: Loaded, say: Callable[[str], None] = lambda line: None, home: Home | None = None
    ) -> None:
        """`say` is told lines for people: the addresses, then each change of state; `home` has been taken already."""
        self._loaded = loaded
        self._say = say
        self.server = ControlServer(self)
        self._stopping = asyncio.Event()
        self._why = "it failed; see its log"
        self._started = time.monotonic()
        self._given = home
        self._ending = contextlib.AsyncExitStack()
        self._met = False
        self._tasks = TaskSet()
        self._failures = Failures()

    async def start(self) -> None:
        """Take the home, start everything, listen to clients; on an error, undo all of it.

        Raises:
            HomeError: The home cannot be used, or another daemon runs there.
            EquipoiseError: Something of this machine prevents a start, such as a port in use.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def serve(self) -> None:
        """Wait until someone asks to stop."""
        await self._stopping.wait()

    def request_stop(self, reason: str) -> None:
        """Begin to stop; `serve` returns."""
        if not self._stopping.is_set():
            self._why = f"it was stopped ({reason})"
            log.info("stopping: %s", reason)
            self._say(f"stopping: {reason}")
            self._stopping.set()

    def failure(self) -> EquipoiseError | None:
        """The error of a daemon that was given addresses to join and has met no other peer; else None."""
        standing = self._standing()
        failed = [entry for entry in standing.bootstrap if entry.state not in ("trying", "connected")]
        if self._met or not failed:
            return None
        refused = all(entry.state in ("other version", "not admitted") for entry in failed)
        kind = Refused if refused else Unreached
        reason = standing.reason.replace("; trying again", "")
        return kind(f"ended without having met another peer: {reason}")

    async def stop(self) -> None:
        """Finish or fail open rounds, leave, end what was started, release the home; bounded and idempotent."""
        self._stopping.set()
        await self._ending.aclose()

    def welcome(self) -> Welcome:
        """The daemon's answer to a greeting."""
        swarm, config = self.service.swarm, self._loaded.config
        return Welcome(swarm.peer, config.name, os.getpid(), config.home, swarm.named)

    def status(self, clients: int) -> Status:
        """A snapshot of everything that can be asked about the daemon, which has so many clients."""
        process, swarm = psutil.Process(), self._standing()
        return Status(
            name=self._loaded.config.name,
            peer_id=self.service.swarm.peer,
            pid=os.getpid(),
            uptime=time.monotonic() - self._started,
            memory=process.memory_info().rss,
            tasks=len(asyncio.all_tasks()),
            threads=process.num_threads(),
            files=process.num_fds(),
            clients=clients,
            swarm=swarm,
            runs=tuple(run_status(session) for session in self.service.sessions),
            kernels=self.service.kernels,
            versions={name: metadata.version(name) for name in PACKAGES},
            settings=self._loaded.settings,
            log=str(self._home.path / LOG_FILE),
            warnings=self._loaded.warnings + swarm.warnings,
            given=self.service.given,
        )

    async def _start(self) -> None:
        failures.set(self._failures)
        config = self._loaded.config
        self._home = self._given or Home.take(Path(config.home))
        self._ending.callback(self._home.release)
        self._log_file = open_log(self._home.path / LOG_FILE, config.log_level)
        self._ending.callback(close_log, self._log_file)
        self._ending.callback(log.info, "stopped")
        for warning in self._loaded.warnings:
            log.warning(warning)
            self._say(f"warning: {warning}")
        self.history = RoundHistory(self._home.path)
        self._ending.callback(self.history.file.close)
        from equipoise.peer.daemon import wiring  # It imports hivemind, while the home is taken already.

        reducer = wiring.reducer_for(self._loaded)
        if reducer is not None:
            self._ending.callback(reducer.executor.shutdown, wait=False, cancel_futures=True)
        swarm, router = await wiring.start_parts(config, reducer)
        self._ending.push_async_callback(_bounded, swarm.stop, "leaving the swarm")
        self._ending.push_async_callback(_bounded, router.stop, "stopping the router")
        self.service = Service(router, swarm, reducer)
        self._ending.push_async_callback(_bounded, lambda: self.server.stop(self._why), "leaving the runs")
        self.server.start(self._home.listen())
        if config.metrics:
            try:
                from equipoise.peer.daemon.exporter import export
            except ImportError:
                hint = "pip install 'equipoise[metrics]', or leave the setting out"
                told = "metrics: the package prometheus-client is not installed"
                raise ConfigError(told, hint) from None
            end = export(config.metrics, lambda: self.status(self.server.clients()))
            self._ending.push_async_callback(asyncio.to_thread, end)
        log.info("peer %s, process %d, home %s", swarm.peer, os.getpid(), self._home.path)
        self._ending.callback(self._tasks.keep(self._watch).cancel)

    def _standing(self) -> SwarmStatus:
        """The swarm's status, with the addresses that it was not given, the next step, and what fails here."""
        status = self.service.swarm.status()
        malformed = self._loaded.malformed
        self._met |= status.state in ("joined", "ready")
        alone = status.state == "searching" and not status.bootstrap and bool(malformed)
        reason = malformed[0].reason if alone else _advised(status.reason, status.bootstrap)
        full = self._home.trouble()
        files = (full,) if full else (self._log_file.trouble, self.history.file.trouble)
        trouble = tuple(filter(None, (self.service.trouble, *files)))
        trouble += self._failures.warnings()
        trouble += tuple(line for session in self.service.sessions for line in session.warnings)
        return msgspec.structs.replace(
            status, reason=reason, bootstrap=status.bootstrap + malformed, warnings=status.warnings + trouble
        )

    async def _watch(self) -> None:
        addresses: tuple[str, ...] = ()
        warnings: tuple[str, ...] = ()
        state = ""
        while True:
            status = self._standing()
            told: list[str] = []
            if status.addresses != addresses:
                told += status.addresses
            told += [f"warning: {warning}" for warning in status.warnings if warning not in warnings]
            addresses, warnings = status.addresses, status.warnings
            # Each round would print two lines; `status` tells that it waits for one.
            if status.state != "ready" and f"{status.state}: {status.reason}" != state:
                state = f"{status.state}: {status.reason}"
                told.append(state)
            for line in told:
                log.info("%s", line)
                self._say(escaped(line))
            await asyncio.sleep(WATCH_SECONDS)


def _advised(reason: str, entries: Sequence[BootstrapStatus]) -> str:
    """`reason` and, if it is about one of these addresses, the next step."""
    for entry in entries:
        if reason.startswith(entry.reason) and entry.state in NEXT_STEPS:
            return f"{reason}; {NEXT_STEPS[entry.state]}"
    return reason


async def _bounded(stop: Callable[[], Awaitable[None]], what: str) -> None:
    try:
        await asyncio.wait_for(stop(), STOP_SECONDS)
    except TimeoutError:
        log.error("%s took longer than %g s and was abandoned", what, STOP_SECONDS)
    except Exception:
        log.exception("%s failed", what)
