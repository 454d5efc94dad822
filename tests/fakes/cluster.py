"""Hubs that give and take states, over a network in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from random import Random
from typing import Any

import torch

from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Idle
from equipoise.averaging.replication.chunks import CHUNK_BYTES
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from fakes.hostile import Frame, TappedTransport
from fakes.memory import FakeIdentity, Net

SPEC = RunSpec.create(
    "run/step", Schema.of({"w": torch.zeros(100)}), RunOptions(codec="fp32", part_values=256)
)
STATE = StateId(7, "ab" * 32)
IMAGE = Random(7).randbytes(5 * CHUNK_BYTES + 12345)
LIMIT = 64 * CHUNK_BYTES


class Cluster:
    """Hubs on one network in memory, all in one run.

    Attributes:
        taps: By peer: says what leaves in place of each of its frames.
    """

    def __init__(self) -> None:
        self.net = Net()
        self.taps: dict[str, Callable[[str, bytes, bytes], list[Frame]]] = {}
        self.routers: dict[str, Router] = {}

    def host(self, name: str, dialable: bool = True, **options: Any) -> Router:
        transport, directory = self.net.peer(name, dialable)
        tapped: Any = TappedTransport(transport, self.taps[name]) if name in self.taps else transport
        self.routers[name] = Router(tapped, directory, FakeIdentity(name), **options)
        return self.routers[name]

    async def add(self, *names: str, spec: RunSpec = SPEC) -> list[Transfer]:
        for name in names:
            await self.host(name).join(spec)
        await self.net.acquainted(spec.name, list(self.routers))
        return [self.routers[name]._runs[spec.name].transfer for name in names]

    async def stop(self) -> None:
        await asyncio.gather(*(router.stop() for router in self.routers.values()))


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def company(runs: Collection[RunDriver]) -> None:
    """Wait until all of these, of one run, have met, if any of them can be dialled."""
    can_meet = any(run.search._sessions.dialable for run in runs)
    while can_meet and any(run.search.state != Idle(len(runs) - 1) for run in runs):  # noqa: ASYNC110
        await asyncio.sleep(0)


class Memory:
    """Where an image goes."""

    def __init__(self) -> None:
        self.image = bytearray()

    def room(self, size: int) -> memoryview:
        self.image = bytearray(size)
        return memoryview(self.image)
