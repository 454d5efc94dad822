"""The TCP ports that libp2p listens on: the usual ones first, then any free one, held against other daemons.

Other peers remember addresses, so a port is kept in the home (`peer_cache`) and taken again at the next start.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from equipoise.dht.address import ListenAddress
from equipoise.dht.p2pd import ListenError, check_free

LIBP2P_PORT = 31337
"""Tried at the first start where no port is named; a router can forward it once and for all."""
DIRECT_PORT = 31338
"""The same, for direct channels."""
MAX_DRAWS = 16
"""Free ports that the system is asked for; another program may take one between the question and the use."""


@dataclass(frozen=True)
class Claim:
    """Addresses to listen on, which no other daemon on this machine takes until `release`.

    Attributes:
        listen: The addresses, each with its port.
        drawn: The port that was chosen where none was named; 0 if all were.
    """

    listen: tuple[ListenAddress, ...]
    drawn: int
    _locks: contextlib.ExitStack

    def release(self) -> None:
        """Leave the ports to others; idempotent."""
        self._locks.close()


def claim(listen: Sequence[ListenAddress], wishes: Iterable[int]) -> Claim:
    """Find a port for each address that names none (port 0), and hold all of them.

    Args:
        listen: The addresses.
        wishes: Ports to try, in order, before the system draws a free one.

    Raises:
        ListenError: An address is taken or not this machine's.
    """
    wishes = tuple(wishes)
    taken: list[ListenAddress] = []
    with contextlib.ExitStack() as locks:
        for address in listen:
            check_free(address)
            found, lock = _take(address, wishes)
            taken.append(found)
            locks.enter_context(lock)
        drawn = next((one.port for one, asked in zip(taken, listen, strict=True) if asked.port == 0), 0)
        return Claim(tuple(taken), drawn, locks.pop_all())


def with_port(address: ListenAddress, port: int) -> ListenAddress:
    """Return the address with another port."""
    return ListenAddress(f"{address.text.rpartition('/')[0]}/{port}", address.host, port)


def _take(address: ListenAddress, wishes: Sequence[int]) -> tuple[ListenAddress, socket.socket]:
    for port in (address.port,) if address.port else (*wishes, *_draws(address)):
        lock = _lock(address.host, port)
        if lock is None:
            continue
        try:
            check_free(with_port(address, port))
        except ListenError:
            lock.close()
        else:
            return with_port(address, port), lock
    why = "another daemon is taking the same port" if address.port else "no port is free"
    raise ListenError(f"cannot listen on {address.text}: {why}; choose another with --listen")


def _draws(address: ListenAddress) -> Iterator[int]:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    for _ in range(MAX_DRAWS):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address.host, 0))
            yield probe.getsockname()[1]


def _lock(host: str, port: int) -> socket.socket | None:
    """Hold a name that stands for the port; None if another daemon holds it.

    p2pd binds with SO_REUSEPORT, so two of one user would share a port that both found free. An abstract socket is
    bound by one process at a time, ends with it, and belongs to the network namespace, as the port does.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        try:
            lock.bind(f"\0equipoise/port/{host}/{port}")
        except OSError:
            lock.close()
            return None
    return lock
