"""The TCP port of direct channels: its addresses, its bound on strangers, and its answers to origin questions."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from equipoise.dht.address import ListenAddress, block_of, is_ip, is_loopback
from equipoise.dht.dialpolicy import Place
from equipoise.dht.direct.errors import Refused
from equipoise.dht.direct.handshake import PREFACE_BYTES
from equipoise.dht.direct.sockets import prepare, receive_exactly
from equipoise.dht.p2pd import ListenError, listen_error, with_port
from equipoise.dht.streams import Acceptor

BACKLOG = 128
"""Most connections that the kernel holds for us; a group of 64 may dial at once, twice each."""
MAX_WAITING = 64
"""Most connections of peers that have not proved their identity: each costs a descriptor, a task and some KB."""

ORIGIN_BYTES = 64
"""Size of an answer: an IPv6 address and a port, as text, take less."""
ORIGIN_MAGIC = b"EQPM"
ORIGIN_QUESTION = ORIGIN_MAGIC.ljust(PREFACE_BYTES, b"\0")
"""First bytes of a connection that asks for its own origin. They have the size of a preface. The answer is shorter and
in the clear: it tells a peer its own address only, which serves only to find that peer (libp2p's identify tells
observed addresses likewise; RFC 8489, STUN, section 2)."""


class Listener:
    """Listens on some addresses, and hands on every connection.

    Attributes:
        wanted: Whether there are addresses to listen on.
        told: Where others reach this listener, best first.
    """

    def __init__(
        self, addresses: Sequence[ListenAddress], taken: Callable[[socket.socket, Place], None]
    ) -> None:
        self.wanted = bool(addresses)
        self.told: Sequence[Place] = ()
        self._addresses = addresses
        self._taken = taken
        self._acceptors: list[Acceptor] = []

    @property
    def bound(self) -> list[Place]:
        """The addresses listened on, (host, port)."""
        return [one.socket.getsockname()[:2] for one in self._acceptors]

    def start(self, wish: int) -> None:
        """Begin to listen; port 0 becomes `wish` if that is free, else any free port, the same for all if it can be.

        Raises ListenError if an address is taken or not this machine's.
        """
        for address in self._addresses:
            try:
                self._listen(address if address.port else with_port(address, wish))
            except ListenError:
                if address.port or not wish:
                    raise
                self._listen(address)
            wish = wish if address.port else self.bound[-1][1]

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
    """Return where others reach the listeners `bound` on this machine, best first.

    `hosts` are IP addresses and names, best first: of this machine or, if `forwarded`, of one that forwards ports here.
    Loopback hosts are left out if there are others: on another machine, they name that machine.
    """
    found = [(host, port) for host in hosts for own, port in bound if _serves(own, host, forwarded)]
    found += [(own, port) for own, port in bound if not ipaddress.ip_address(own).is_unspecified]
    far = [one for one in dict.fromkeys(found) if not is_loopback(one[0])]
    return far or list(dict.fromkeys(found))


def _serves(own: str, host: str, forwarded: bool) -> bool:
    if not is_ip(host):
        return True  # A name may stand for any address that is listened on.
    named, listening = ipaddress.ip_address(host), ipaddress.ip_address(own)
    if named.version != listening.version or named.is_link_local:
        return False
    return forwarded or named == listening or listening.is_unspecified


class WaitingRoom:
    """Strangers by the address that they come from. Sans IO.

    A full one ejects the oldest stranger of the address with the most strangers, so a flood from few addresses ejects
    itself, and peers at other addresses get in. The oldest is slow or idle: an honest handshake takes milliseconds, or
    seconds on busy cores.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, guest: Hashable, address: str) -> Any:
        """Let in `guest` from an IP address; return the guest that must go for it, or None."""
        evicted, host = None, block_of(address)
        if len(self._waiting) >= MAX_WAITING:
            # Of equals, the first counted: that of the oldest stranger.
            [(most, _)] = Counter(self._waiting.values()).most_common(1)
            evicted = next(one for one, home in self._waiting.items() if home == most)
            del self._waiting[evicted]
        self._waiting[guest] = host
        return evicted

    def leave(self, guest: Hashable) -> None:
        """Forget `guest`; idempotent."""
        self._waiting.pop(guest, None)


def origin_answer(host: str, port: int) -> bytes:
    """Return the `ORIGIN_BYTES` that tell an asker its own address."""
    return f"{host.partition('%')[0]} {port}".encode().ljust(ORIGIN_BYTES)


def parse_origin(data: bytes) -> tuple[str, int]:
    """Return the address and port in an answer; raises Refused if it is no answer."""
    try:
        host, port = data.decode("ascii").split()
        if "%" not in host and 1 <= int(port) <= 65535:
            return str(ipaddress.ip_address(host)), int(port)
    except ValueError:
        pass
    raise Refused("malformed preface", "it does not answer as a direct listener does")


async def ask_origin(connection: socket.socket, question: bytes = ORIGIN_QUESTION) -> tuple[str, int]:
    """Ask a direct listener where it sees this fresh connection come from; raises OSError if it does not answer."""
    await asyncio.get_running_loop().sock_sendall(connection, question)
    return parse_origin(await receive_exactly(connection, ORIGIN_BYTES))
