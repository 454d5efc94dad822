"""Real members of a swarm on loopback, each with a p2pd of its own, all in the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import settings

from equipoise.dht.identity import Identity, load_or_create
from equipoise.dht.swarm import Swarm, SwarmOptions

settings.register_profile("equipoise", deadline=None)
settings.load_profile("equipoise")

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

    async def start(self, name: str, join: list[str] | tuple[str, ...] = (), **options) -> Swarm:
        options = {"listen": LOOPBACK} | options
        member = Swarm(self.home(name), SwarmOptions(join=join, **options))
        self.all.append(member)
        await member.start()
        return member

    async def stop(self) -> None:
        for member in self.all:
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
