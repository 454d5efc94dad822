"""Parts that a device reduces while their round goes on, or ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch

from equipoise.averaging.aio.round_buffers import Reduction
from equipoise.averaging.aio.round_driver import RoundDriver
from equipoise.averaging.aio.router import Router
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.ports import FrameRefused
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.compression.device_reduce import DeviceReducer
from fakes.cluster import company
from fakes.memory import FakeIdentity, Net
from fakes.vectors import averaged

SIZE, PART = 1000, 256
BOTH, FIRST = 0b11, 0b01


class Slow(Executor):
    """Keeps its jobs until a test says that they are done."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Reduction], Future[Reduction]]] = []
        self.asked = asyncio.Event()

    def submit(self, job: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs.append((job, Future()))
        self.asked.set()
        return self.jobs[-1][1]

    async def finish(self) -> None:
        """Do all jobs that wait, and let the loop hear of them."""
        jobs, self.jobs = self.jobs, []
        for job, future in jobs:
            future.set_result(job())
        for _ in range(3):
            await asyncio.sleep(0)


class Pair:
    """A round of two peers, of whose parts none is reduced yet."""

    def __init__(self) -> None:
        self.slow = Slow()
        self.routers: list[Router] = []
        self.outcomes: list[asyncio.Task[Outcome]] = []

    async def begin(self, codec: str = "fp32", part: int = PART) -> None:
        schema = Schema.of({"w": torch.zeros(SIZE)})
        spec = RunSpec.create("run", schema, RunOptions(codec=codec, part_values=part))
        net = Net()
        for name in "ab":
            reducer = DeviceReducer(torch.device("cpu"))
            reducer.executor = self.slow
            self.routers.append(Router(*net.peer(name), FakeIdentity(name), reducer=reducer))
        runs = [await router.join(spec) for router in self.routers]
        await company(runs)
        self.outcomes = [
            asyncio.create_task(averaged(run, torch.ones(SIZE), torch.zeros(SIZE), 1.0, 20.0)) for run in runs
        ]
        await self.slow.asked.wait()

    @property
    def drivers(self) -> list[RoundDriver]:
        return [round for router in self.routers for round in router._rounds.open.values()]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.begin()
    yield pair
    await asyncio.gather(*(router.stop() for router in pair.routers))


def kept(driver: RoundDriver) -> set[int]:
    """Over which contributors this member keeps means."""
    parts = range(len(driver.group.parts))
    return {over for over in (FIRST, BOTH) for part in parts if driver._store.mean(part, over) is not None}


async def test_jobs_that_end_within_their_round_make_its_mean(pair: Pair) -> None:
    drivers = pair.drivers
    assert [kept(driver) for driver in drivers] == [set(), set()]
    await pair.slow.finish()
    assert BOTH in set().union(*map(kept, drivers))
    while not all(outcome.done() for outcome in pair.outcomes):
        await pair.slow.finish()
    assert all(outcome.result() for outcome in pair.outcomes)


async def test_a_job_that_ends_after_its_round_is_not_kept(pair: Pair) -> None:
    drivers = pair.drivers
    for driver in drivers:
        driver.withdraw("the test says so")
    assert not any(await asyncio.gather(*pair.outcomes))
    await pair.slow.finish()
    assert [kept(driver) for driver in drivers] == [set(), set()]


async def test_a_job_over_contributors_that_count_no_more_replaces_no_mean(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = pair.drivers
    means = []
    for driver in drivers:
        for part in range(len(driver.group.parts)):
            payload = memoryview(bytearray(driver._store.size(part)))
            payload[:] = bytes(len(payload))
            driver._store.keep_mean(part, FIRST, payload)
        monkeypatch.setattr(driver._machine, "wants_mean", lambda member, part, over: over == FIRST)
        means.append(bytes(driver.task.vectors.mean))
    await pair.slow.finish()
    assert [kept(driver) for driver in drivers] == [{FIRST}, {FIRST}]
    assert [bytes(driver.task.vectors.mean) for driver in drivers] == means


async def test_a_mean_of_a_size_that_its_contributors_do_not_imply_gets_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    await pair.begin("sparse", 512)
    driver = pair.drivers[0]
    (other,) = driver._links.reached
    size = driver._store.size(0)
    taken: list[int] = []

    def take(size: int) -> memoryview:
        taken.append(size)
        return memoryview(b"")

    monkeypatch.setattr(driver._sessions.pool, "take", take)
    for contributors, copies in ((BOTH, 1), (BOTH, 3), (FIRST, 2), (0, 1), (1 << 60, 1)):
        header = driver._links.header + wire.encode(wire.Mean(0, contributors))
        with pytest.raises(FrameRefused, match=rf"\Aexpected \d+ bytes for part 0, got {copies * size}\Z"):
            driver.place(other, header, copies * size)
    assert not taken
    driver.place(other, driver._links.header + wire.encode(wire.Mean(0, BOTH)), 2 * size)
    assert taken == [2 * size]
    monkeypatch.undo()
    await pair.slow.finish()
    await asyncio.gather(*(router.stop() for router in pair.routers))
