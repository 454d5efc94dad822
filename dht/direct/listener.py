"""The TCP port of direct channels: where others find it, and how many strangers may stand at the door at once."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from equipoise.dht.address import ListenAddress, is_ip, is_loopback
from equipoise.dht.dialpolicy import Place
from equipoise.dht.direct.sockets import prepare
from equipoise.dht.limits import Tally
from equipoise.dht.p2pd import ListenError, listen_error, with_port
from equipoise.dht.streams import Acceptor

BACKLOG = 128
"""Most connections that the kernel holds for us; a group of 64 may dial at once, twice each."""
MAX_WAITING = 64
"""Most connections that have not proved who they are: each costs a descriptor, a task and some KB."""

Guest = TypeVar("Guest")


class Listener:
    """Listens on some addresses and hands every connection on."""

    def __init__(
        self, addresses: Sequence[ListenAddress], taken: Callable[[socket.socket, Place], None]
    ) -> None:
        self._wanted = addresses
        self._taken = taken
        self._acceptors: list[Acceptor] = []

    @property
    def bound(self) -> list[Place]:
        """The addresses listened on, (host, port)."""
        return [one.socket.getsockname()[:2] for one in self._acceptors]

    def start(self, wishes: Sequence[int] = ()) -> None:
        """Begin to listen.

        Args:
            wishes: Ports to try, in order, for an address that names none (port 0), before the system draws one.

        Raises:
            ListenError: An address is taken or not this machine's.
        """
        for address in self._wanted:
            for port in () if address.port else wishes:
                with contextlib.suppress(ListenError):
                    self._listen(with_port(address, port))
                    break
            else:
                self._listen(address)

    def stop(self) -> None:
        """Stop listening; idempotent."""
        for one in self._acceptors:
            one.close()
        self._acceptors = []

    def _listen(self, address: ListenAddress) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            prepare(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind((address.host, address.port))
            accepting = Acceptor(listening, BACKLOG, lambda one, where: self._taken(one, where[:2]))
            self._acceptors.append(accepting)
        except OSError as error:
            listening.close()
            raise listen_error(address, error, "--direct-listen") from None


def endpoints(hosts: Iterable[str], bound: Sequence[Place], *, forwarded: bool) -> list[Place]:
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


def _serves(own: str, host: str, forwarded: bool) -> bool:
    if not is_ip(host):
        return True  # Whatever is listened on stands behind a name.
    named, listening = ipaddress.ip_address(host), ipaddress.ip_address(own)
    if named.version != listening.version or named.is_link_local:
        return False
    return forwarded or named == listening or listening.is_unspecified


class Gate(Generic[Guest]):
    """Strangers by the address that they come from. Sans IO.

    When it is full, the oldest stranger of the address that has the most goes: a flood from few addresses meets itself,
    and a peer at another address gets in. An honest handshake takes milliseconds; the oldest is slow or idle.
    """

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._waiting: dict[Guest, str] = {}
        self._counts = Tally()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, guest: Guest, address: str) -> Guest | None:
        """Let `guest` of an IP address in; return who has to go for it, if anybody."""
        evicted, host = None, address
        if ":" in address:  # What one customer has of IPv6 addresses: 2**64.
            host = str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
        if len(self._waiting) >= self._limit:
            most = max(self._counts.values())
            evicted = next(one for one, home in self._waiting.items() if self._counts[home] == most)
            self.leave(evicted)
        self._waiting[guest] = host
        self._counts[host] += 1
        return evicted

    def leave(self, guest: Guest) -> None:
        """Forget `guest`; idempotent."""
        host = self._waiting.pop(guest, None)
        if host is not None:
            self._counts.drop(host)
