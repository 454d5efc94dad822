"""One p2pd process (libp2p's daemon, from hivemind's wheel): started, watched, its output kept, ended for certain.

Its unix sockets lie in a private directory: 0700, with a path short enough for them, gone when the daemon is. p2pd
listens on the usual port if that is free, else on any other, held against other daemons. Other peers remember
addresses, so a port is kept in the home (`peer_cache`) and taken again at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from equipoise.dht.address import ListenAddress
from equipoise.dht.parent_death_signal import mortal
from equipoise.dht.sanitize import printable
from equipoise.tasks import end, sleep_until

START_SECONDS = 15.0
"""Longest start: p2pd answers after 0.1 s on an idle machine; a loaded one gets a hundred times that."""
STOP_SECONDS = 1.0
"""Longest end: p2pd ends within milliseconds of SIGTERM, and is killed after this."""
MAX_CALL_BYTES = 256 * 1024
"""Longest message of a call that p2pd takes; ours carry at most 64 KB of records beside some protobuf."""
LINE_CHARACTERS = 300
"""Longest line that is kept."""

MAX_BASE_BYTES = 55
"""Longest path in which a directory for sockets is made. A socket's own path, with the names of that directory and its
own, has at most 48 bytes more, and fits into sun_path: 104 on macOS, 108 on Linux."""
LIBP2P_PORT = 31337
"""Tried at the first start where no port is named; a router can forward it once and for all."""
DIRECT_PORT = 31338
"""The same, for direct channels."""
MAX_DRAWS = 16
"""Most ports that are drawn where none is named; some are taken, or another daemon may be about to take one."""
DRAWN_PORTS = range(20_000, 30_000)
"""Ports that are drawn. Linux gives those from 32768 on to connections, which could take one before p2pd listens."""

CONFIG = '{"Relay": {"Enabled": false}}'
"""Keeps p2pd from starting a relay of its own, which no option does: it would carry 128 KiB at a time for any stranger,
and fill a table of the Internet's networks, with .4 s of a processor and 29 MB. p2pd dials through relays still."""

_NAME = re.compile(r"eqp-(\d+)-\w+")


class P2pdError(Exception):
    """p2pd does not start; the message says why, in one line."""


class ListenError(P2pdError):
    """An address cannot be listened on; the message names it and says why, in one line."""


@dataclass(frozen=True)
class P2pdOptions:
    """Options of a p2pd.

    Attributes:
        identity: File with the private key.
        control: Path of the unix socket on which p2pd takes requests, at most 107 bytes.
        listen: Where to accept connections; empty: nowhere (client mode).
        announce: Multiaddrs to tell others instead of those listened on.
        map_ports: Whether to ask the router for a port mapping.
    """

    identity: Path
    control: Path
    listen: tuple[ListenAddress, ...]
    announce: tuple[str, ...] = ()
    map_ports: bool = False

    @property
    def config(self) -> Path:
        """The file with `CONFIG`."""
        return self.control.with_name("p2pd.json")

    def arguments(self) -> list[str]:
        """Return p2pd's command line.

        Without libp2p's own DHT: our records tell addresses, and its dials of dead peers would feed the backoff
        that `dialer` avoids. Without its relay (`CONFIG`), AutoNAT and hole punching: `relay`, `autonat` and `punch` do
        better; its own punching wants four peers that see one public address before it begins.
        """
        flags = [
            f"-listen=/unix{self.control}",
            f"-id={self.identity}",
            f"-persistentConnMaxMsgSize={MAX_CALL_BYTES}",
            f"-natPortMap={int(self.map_ports)}",
            "-connManager=1",
            "-relay=0",
            f"-f={self.config}",
        ]
        if self.listen:
            flags.append("-hostAddrs=" + ",".join(address.text for address in self.listen))
        else:
            flags.append("-noListenAddrs=1")
        if self.announce:
            flags.append("-announceAddrs=" + ",".join(self.announce))
        return [str(_binary()), *flags]


class P2pd:
    """A running p2pd: its process, the leader of a group of its own, and the last line that it printed, escaped."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.last = ""  # p2pd is told to log errors only.
        self._answers = False
        self._begun = asyncio.Event()
        self._reader = asyncio.create_task(self._read_output())

    @classmethod
    async def start(cls, options: P2pdOptions) -> P2pd:
        """Start p2pd and wait until it takes requests.

        Raises ListenError if a listen address is taken or not this machine's, P2pdError if it does not start otherwise.
        """
        for address in options.listen:
            check_free(address)
        try:
            options.control.unlink(missing_ok=True)
            options.config.write_text(CONFIG)
            process = await asyncio.create_subprocess_exec(
                *mortal(*options.arguments()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | {"GOLOG_LOG_LEVEL": "error"},
                # Ctrl-C in a terminal must reach the daemon only, which then stops in order.
                start_new_session=True,
            )
        except OSError as error:  # Descriptors, processes, memory or room have run out, perhaps for a moment.
            raise P2pdError(f"p2pd cannot be started: {error.strerror or error}") from error
        p2pd = cls(process)
        await p2pd._await_ready()
        return p2pd

    async def wait(self) -> str:
        """Wait until p2pd ends; return how, and the last that it printed."""
        code = await self.process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"{how}: {self.last}" if self.last else how

    async def stop(self) -> None:
        """End p2pd, by force if it lingers, and collect it."""
        if self.process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        if self.process.returncode is None:
            self._signal(signal.SIGKILL)
        await self.process.wait()
        await end([self._reader])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def _await_ready(self) -> None:
        try:
            await sleep_until(self._begun, START_SECONDS)
        finally:
            if not self._answers:
                await self.stop()
        if not self._answers:
            late = f"it does not answer within {START_SECONDS:.0f} s"
            raise P2pdError(f"p2pd does not start: {await self.wait() if self._begun.is_set() else late}")

    async def _read_output(self) -> None:
        assert self.process.stdout is not None
        partial = ""
        while chunk := await self.process.stdout.read(4096):
            *lines, partial = (partial + chunk.decode(errors="replace")).split("\n")
            for line in lines:
                if line.startswith("Peer ID:"):
                    self._answers = True
                    self._begun.set()
                elif not line.startswith(("Control socket:", "Peer Addrs:", "/")):
                    self.last = printable(line, LINE_CHARACTERS)
            partial = partial[:LINE_CHARACTERS]
        self._begun.set()  # It has ended.


def check_free(address: ListenAddress) -> None:
    """Raise ListenError if `address` cannot be bound: p2pd would share a port that is taken."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:  # As p2pd does: the port of IPv4 is another one.
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise listen_error(address, error, "--listen") from None


def has_family(address: ListenAddress) -> bool:
    """Tell whether this machine can listen on addresses of the version of IP of `address` at all."""
    try:
        check_free(with_port(address, 0))
    except ListenError:
        return False
    return True


def listen_error(address: ListenAddress, error: OSError, option: str) -> ListenError:
    """The error that says why `address` cannot be listened on, and what to give with `option`."""
    hint = {
        errno.EADDRNOTAVAIL: f"give an address of this machine with {option}, or all of them as /ip4/0.0.0.0/tcp/0",
        errno.EMFILE: "raise this process's limit of open files: ulimit -n",
        errno.EACCES: f"ports below 1024 need root: choose a higher one with {option}",
    }.get(error.errno or 0, f"choose another with {option}")
    return ListenError(f"cannot listen on {address.text}: {error.strerror or error}; {hint}")


def claim(
    listen: Sequence[ListenAddress], wish: int, locks: contextlib.ExitStack
) -> tuple[ListenAddress, ...]:
    """Return the addresses, each with a port: where none is named (port 0), `wish` if it is free, else any, but one.

    No other daemon on this machine takes one of them until `locks` are closed. Raises ListenError if an address is
    taken or not this machine's.
    """
    taken = []
    for address in listen:
        found = None
        if wish and not address.port:
            with contextlib.suppress(ListenError):
                found = _take(with_port(address, wish), locks)
        taken.append(found or _take(address, locks))
        wish = wish if address.port else taken[-1].port
    return tuple(taken)


def with_port(address: ListenAddress, port: int) -> ListenAddress:
    """Return the address with another port."""
    return ListenAddress(f"{address.text.rpartition('/')[0]}/{port}", address.host, port)


def _take(address: ListenAddress, locks: contextlib.ExitStack) -> ListenAddress:
    check_free(address)  # Its host must be this machine's.
    draws = random.sample(DRAWN_PORTS, MAX_DRAWS)
    for port in [address.port] if address.port else draws:
        found = with_port(address, port)
        with contextlib.suppress(ListenError):
            check_free(found)
            if (lock := _lock(found.host, found.port)) is not None:
                locks.enter_context(lock)
                return found
    why = "another daemon is taking the same port"
    raise ListenError(f"cannot listen on {address.text}: {why}; choose another with --listen")


def _lock(host: str, port: int) -> socket.socket | None:
    """Hold a name that stands for the port; None if another daemon holds it.

    p2pd binds with SO_REUSEPORT, so two of one user would share a port that both found free. An abstract socket is
    bound by one process at a time, ends with it, and belongs to the network namespace, as the port does.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0equipoise/port/{host}/{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _binary() -> Path:
    # Found without importing hivemind, which imports torch.
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise P2pdError("p2pd is part of the package hivemind, which is not installed; reinstall equipoise")
    return Path(spec.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"


def make_runtime_dir() -> Path:
    """Make a fresh directory in $XDG_RUNTIME_DIR or the system's temporary one, and sweep those of dead daemons."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not base.is_dir() or not os.access(base, os.W_OK) or len(bytes(base)) > MAX_BASE_BYTES:
        base = Path("/tmp")
    for entry in base.glob("eqp-*"):
        match = _NAME.fullmatch(entry.name)
        with contextlib.suppress(OSError):
            if match and entry.lstat().st_uid == os.geteuid() and not psutil.pid_exists(int(match[1])):
                shutil.rmtree(entry, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"eqp-{os.getpid()}-", dir=base))
