"""The TCP port of direct channels, and where others find it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Sequence

from equipoise.dht.address import ListenAddress, is_loopback
from equipoise.dht.direct.sockets import prepare
from equipoise.dht.p2pd import ListenError, listen_error
from equipoise.dht.ports import with_port

BACKLOG = 128
"""Connections that the kernel holds for us; a group of 64 may dial at once, twice each."""
ACCEPTED_AT_ONCE = 16
"""Before others on the loop get a turn."""
PAUSE_SECONDS = 0.5
"""Without accepting, after the system had no descriptor left."""

_log = logging.getLogger(__name__)


class Listener:
    """Listens on some addresses and hands every connection on."""

    def __init__(
        self, addresses: Sequence[ListenAddress], taken: Callable[[socket.socket, tuple[str, int]], None]
    ) -> None:
        self._wanted = addresses
        self._taken = taken
        self._sockets: list[socket.socket] = []

    @property
    def bound(self) -> list[tuple[str, int]]:
        """The addresses listened on, (host, port)."""
        return [one.getsockname()[:2] for one in self._sockets]

    def start(self, wishes: Sequence[int] = ()) -> None:
        """Begin to listen.

        Args:
            wishes: Ports to try, in order, for an address that names none (port 0), before the system draws one.

        Raises:
            ListenError: An address is taken or not this machine's.
        """
        for address in self._wanted:
            wished = [] if address.port else [with_port(address, port) for port in wishes]
            listening = _listen_first([*wished, address])
            self._sockets.append(listening)
            self._resume(listening)

    def stop(self) -> None:
        """Stop listening; idempotent."""
        for one in self._sockets:
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self._sockets = []

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.warning("cannot accept direct connections for now: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(PAUSE_SECONDS, self._resume, listening)
                return
            connection.setblocking(False)
            self._taken(connection, address[:2])


def _listen_first(addresses: Sequence[ListenAddress]) -> socket.socket:
    """Listen on the first of some addresses that is free; the last one's error counts."""
    for address in addresses[:-1]:
        with contextlib.suppress(ListenError):
            return _listen(address)
    return _listen(addresses[-1])


def _listen(address: ListenAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        prepare(listening)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address.host, address.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise listen_error(address, error, "--direct-listen") from None
    return listening


def endpoints(
    hosts: Iterable[str], bound: Sequence[tuple[str, int]], *, forwarded: bool
) -> list[tuple[str, int]]:
    """Return where others reach listeners of this machine, best first.

    Hosts that only this machine reaches are left out if there are others: on another machine they are that machine.

    Args:
        hosts: IP addresses and names of this machine, best first.
        bound: What is listened on, (host, port).
        forwarded: Whether `hosts` are those of a machine that forwards ports here.
    """
    found = [(host, port) for host in hosts for own, port in bound if _serves(own, host, forwarded)]
    found += [(own, port) for own, port in bound if not ipaddress.ip_address(own).is_unspecified]
    far = [one for one in dict.fromkeys(found) if not is_loopback(one[0])]
    return far or list(dict.fromkeys(found))


def is_literal(host: str) -> bool:
    """Whether `host` is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _serves(own: str, host: str, forwarded: bool) -> bool:
    if not is_literal(host):
        return True  # Whatever is listened on stands behind a name.
    named, listening = ipaddress.ip_address(host), ipaddress.ip_address(own)
    if named.version != listening.version or named.is_link_local:
        return False
    return forwarded or named == listening or listening.is_unspecified
