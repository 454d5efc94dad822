"""Direct transports for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from equipoise.dht.direct.transport import DirectTransport
from fakes.direct import Peers, port_of


@pytest.fixture
async def peers(tmp_path: Path) -> AsyncIterator[Peers]:
    peers = Peers(tmp_path)
    yield peers
    await peers.stop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks outlived the peers: {left}"


@pytest.fixture
def dial() -> Iterator[Callable]:
    """Open plain TCP connections to a transport; closed at the end."""
    with contextlib.ExitStack() as stack:

        async def connect(transport: DirectTransport, source: str = "127.0.0.1") -> socket.socket:
            connection = stack.enter_context(socket.socket())
            connection.bind((source, 0))
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, port_of(transport))
            return connection

        yield connect


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
