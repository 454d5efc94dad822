"""TCP connections to where peers say they listen, and words for what comes of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from equipoise.dht.direct.listener import is_literal
from equipoise.dht.direct.sockets import prepare

DIAL_SECONDS = 1.5
"""For one address, so that three are tried: packets to an address of another network vanish without an answer."""


def _any(host: str) -> bool:
    return True


async def connect(host: str, port: int, permits: Callable[[str], bool] = _any) -> socket.socket:
    """Connect to one address within `DIAL_SECONDS`.

    Args:
        host: IP address or name.
        port: TCP port.
        permits: Says whether the IP address that a name stands for may be dialled.

    Raises:
        OSError: Nobody answers, or the name is not known.
    """
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            return await _connect(host, port, permits)
    except TimeoutError:
        raise ConnectionError(f"no answer within {DIAL_SECONDS:.1f} s") from None
    except UnicodeError:
        raise ConnectionError("it is no name of a host") from None


async def _connect(host: str, port: int, permits: Callable[[str], bool]) -> socket.socket:
    loop = asyncio.get_running_loop()
    family, address = await _resolve(host, port)
    if not permits(str(address[0])):
        raise ConnectionError("it is a private address of another network than this machine's")
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        prepare(connection)
        await loop.sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


async def _resolve(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    if is_literal(host):  # Most are, and need no look-up in another thread.
        return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, port)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


def said(error: BaseException) -> str:
    """Return what an error says, without its number."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def shown(address: tuple[str, int]) -> str:
    """Return an address as people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
