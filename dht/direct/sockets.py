"""The TCP sockets that carry direct channels: opened, with their options."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any, cast

from equipoise.dht.address import is_ip
from equipoise.dht.direct.errors import Refused
from equipoise.dht.streams import closed_on_failure

USER_TIMEOUT_MS = 3000
"""Longest time that bytes go unacknowledged (RFC 5482): then the connection ends, for the machine is dead."""
UNSENT_BYTES = 256 * 1024
"""The kernel takes more only once less than this waits to be sent: a control frame never queues behind megabytes."""

ALIVE_SECONDS = 20
"""Longest silence before the kernel asks whether the other end is there: routers forget idle connections."""
ALIVE_PROBES = 3

WITHIN_HOST = b"reno"
"""The congestion control between two processes of one machine, which every Linux has. BBR, where it is the system's
default, paces what it sends: a timer for every few packets, twice the processor time per byte, and nothing to spare.
A connection that was opened under BBR is paced for ever, so every connection is opened under this control."""

_NAME_BYTES = 16
"""TCP_CA_NAME_MAX."""
DIAL_SECONDS = 1.5
"""Longest dial of one address, so that three are tried: packets to another network vanish without an answer."""


def prepare(unopened: socket.socket, how: bytes = WITHIN_HOST) -> None:
    """Set the congestion control of a socket that is to connect or to listen, where the system has it."""
    if how:
        with contextlib.suppress(OSError):
            unopened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, how)


def tune(connection: socket.socket) -> None:
    """Set what an open connection wants."""
    _set(connection, TCP_NODELAY=1, TCP_USER_TIMEOUT=USER_TIMEOUT_MS, TCP_NOTSENT_LOWAT=UNSENT_BYTES)
    with contextlib.suppress(OSError):  # It has closed already.
        if connection.getpeername()[0] != connection.getsockname()[0]:
            prepare(connection, _usual_congestion_control(connection.family))


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out, while nothing is said, whether the other end is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(connection, TCP_KEEPIDLE=ALIVE_SECONDS, TCP_KEEPINTVL=ALIVE_SECONDS, TCP_KEEPCNT=ALIVE_PROBES)


def _set(connection: socket.socket, **options: int) -> None:
    """Set options of TCP, as far as the connection has them."""
    for name, value in options.items():
        with contextlib.suppress(OSError, AttributeError):  # Interpreters built for old systems lack names.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@functools.cache
def _usual_congestion_control(family: int) -> bytes:
    """The system's choice, which a new socket has; empty where it cannot be told."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as fresh:
        return fresh.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0")
    return b""


async def connect(host: str, port: int, permits: Callable[[str], bool] = lambda host: True) -> socket.socket:
    """Connect to an IP address or name within `DIAL_SECONDS`; raises OSError if nobody answers, or it is not known.

    `permits` says whether the IP address that a name stands for may be dialled.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            family, address = socket.AF_INET6 if ":" in host else socket.AF_INET, cast(Any, (host, port))
            if not is_ip(host):  # Most are, and need no look-up in another thread.
                [(family, *_, address), *_] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            if not permits(str(address[0])):
                raise ConnectionError("it is a private address of another network than this machine's")
            with closed_on_failure(socket.socket(family, socket.SOCK_STREAM)) as connection:
                connection.setblocking(False)
                prepare(connection)
                await loop.sock_connect(connection, address)
            return connection
    except TimeoutError:
        raise ConnectionError(f"no answer within {DIAL_SECONDS:.1f} s") from None
    except UnicodeError:
        raise ConnectionError("it is no name of a host") from None


async def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Read the next `size` bytes, and no byte more; raises Refused if the connection ends before."""
    data, loop = bytearray(size), asyncio.get_running_loop()
    view = memoryview(data)
    while view:
        got = await loop.sock_recv_into(connection, view)
        if not got:
            raise Refused("went away", "it closed the connection too soon")
        view = view[got:]
    return bytes(data)


def said(error: BaseException) -> str:
    """Return what an error says, without its number."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def shown(address: tuple[str, int]) -> str:
    """Return an address as people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
