"""Real members of a swarm on loopback, each with a p2pd of its own, all in the test's loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from equipoise.dht.direct.transport import DirectTransport
from equipoise.dht.identity import Identity, load_or_create
from equipoise.dht.options import SwarmOptions
from equipoise.dht.swarm import Swarm
from fakes.direct import Peers, port_of

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
POLL_SECONDS = 0.01
DEADLINE_SECONDS = 30.0


class Members:
    """Makes members; stops those that still run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.all: list[Swarm] = []

    def home(self, name: str) -> Path:
        return self._path / name

    async def start(
        self, name: str, /, join: list[str] | tuple[str, ...] = (), membership=None, **options
    ) -> Swarm:
        options = {"listen": LOOPBACK} | options
        member = Swarm(self.home(name), SwarmOptions(join=join, **options), membership)
        self.all.append(member)
        await member.start()
        return member

    async def stop(self) -> None:
        for member in reversed(self.all):  # Those through which others joined last: farewells need them.
            await member.stop()


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[Members]:
    members = Members(tmp_path)
    yield members
    await members.stop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks outlived the members: {left}"


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait for a condition, which may be a coroutine function; no longer than a loaded machine needs."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return
                await asyncio.sleep(POLL_SECONDS)

    return wait


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path / "own")


@pytest.fixture
def stranger(tmp_path: Path) -> Identity:
    return load_or_create(tmp_path / "stranger")


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
