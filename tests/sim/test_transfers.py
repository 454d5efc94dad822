"""Snapshots and missed means between real daemons in virtual time, with faults from seeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from blake3 import blake3

from equipoise.averaging.aio.donor import TRANSFER_FRAME
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.replication.answers import LONE_SECONDS, Wish
from equipoise.averaging.replication.chunks import CHUNK_BYTES
from equipoise.averaging.replication.server import MAX_SNAPSHOTS, SNAPSHOTS_SECONDS
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.state import StateId
from equipoise.limits import Stand
from fakes.cluster import SPEC, Cluster, Memory
from fakes.hostile import Frame, run_at_once
from fakes.memory import passed
from fakes.missed import mean_of, recovered
from fakes.seeds import few_and_many

NAMES = "abcdefgh"

TROUBLES = ("killed", "silent", "flips", "lies", "astray", "ghost")
"""Of a donor: it dies, says nothing for a while, changes bytes, offers another image, holds another state, or is only
a record."""

TIMEOUT = 120.0


def state_of(epoch: int, kind: str = "") -> StateId:
    return StateId(epoch, blake3(f"{kind}{epoch}".encode()).hexdigest())


@dataclass
class Donor:
    name: str
    trouble: str
    since: float
    seconds: float
    snapshots: int = 0
    most_held: int = 0

    @property
    def kind(self) -> str:
        return self.name if self.trouble in ("lies", "astray") else ""


@dataclass
class Storm:
    """Donors that step in lock-step but for some skew, each with its trouble, and newcomers."""

    seed: int
    chance: Random = field(init=False)

    def __post_init__(self) -> None:
        draw = self.chance = Random(self.seed)
        self.step = draw.choice([0.05, 0.3, 1.0, 5.0, 20.0])
        self.chunks = draw.choice([1, 2, 5])
        troubles = [draw.choice(TROUBLES) if draw.random() < 0.5 else "" for _ in range(draw.randint(1, 8))]
        timed = ((2 + 5 * draw.random(), 10 * draw.random()) for _ in troubles)
        self.donors = [Donor(*row) for row in zip(NAMES, troubles, *zip(*timed, strict=True), strict=False)]
        self.newcomers = [f"new{index}" for index in range(draw.choice([1, 1, 2, 3]))]
        self.cluster = Cluster()
        self.cluster.net.latency = draw.choice([0.001, 0.05, 0.2])
        self.sound = 2 * sum(not one.trouble for one in self.donors) > max(len(self.donors), 2)

    def image(self, epoch: int, kind: str = "") -> bytes:
        return Random(f"{epoch}{kind}").randbytes(self.chunks * CHUNK_BYTES - 77)

    def mean(self, epoch: int, forged: bool = False) -> EncodedMean:
        makers = "xyz" if forged else "".join(one.name for one in self.donors) + "m"
        return mean_of(makers, state_of(epoch))

    @asynccontextmanager
    async def weather(self) -> AsyncIterator[float]:
        """Have the donors train, and their troubles come; newcomers begin after two seconds."""
        loop = asyncio.get_running_loop()
        for donor in self.donors:
            self.cluster.taps[donor.name] = lambda to, header, body, donor=donor: self._tap(
                donor, header, body
            )
        there = [one for one in self.donors if one.trouble != "ghost"]
        transfers = await self.cluster.add(*(one.name for one in there), *self.newcomers)
        for donor in self.donors:
            if donor.trouble == "ghost":
                _, directory = self.cluster.net.peer(donor.name)
                await directory.announce(SPEC.name, Stand(spec=SPEC.hash, state="joined"))
            elif donor.trouble == "killed":
                loop.call_at(donor.since, self.cluster.net.kill, donor.name)
        tasks = [asyncio.create_task(self._train(*pair)) for pair in zip(there, transfers, strict=False)]
        try:
            await passed(2.0)
            yield loop.time()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.cluster.stop()

    def newcomer(self, name: str) -> Transfer:
        return self.cluster.routers[name]._runs[SPEC.name].transfer

    async def _train(self, donor: Donor, transfer: Transfer) -> None:
        skew, offered = min(self.step / 2, 0.1) * self.chance.random(), -1
        epoch = 0
        while True:
            transfer.donor.reach(epoch)
            wanted = transfer.donor.wanted
            if wanted is not None and offered < wanted <= epoch:
                offered, state = epoch, state_of(epoch, donor.kind * (donor.trouble == "astray"))
                donor.snapshots += 1
                await transfer.donor.offer(state, memoryview(self.image(epoch, donor.kind)))
            transfer.donor.keep(self.mean(epoch, forged=bool(donor.kind)))
            donor.most_held = max(donor.most_held, len(transfer.donor._held))
            epoch += 1
            await passed(max(epoch * self.step + skew - asyncio.get_running_loop().time(), 0.0))

    def _tap(self, donor: Donor, header: bytes, body: bytes) -> list[Frame]:
        now = asyncio.get_running_loop().time()
        silent = donor.trouble == "silent" and donor.since <= now < donor.since + donor.seconds
        if header[:1] != TRANSFER_FRAME or not (silent or (body and donor.trouble == "flips")):
            return [(header, body)]
        return [] if silent else [(header, bytes([body[0] ^ 1]) + body[1:])]


async def snapshots(storm: Storm) -> None:
    async def fetch(name: str) -> None:
        memory, epoch = Memory(), int(began / storm.step)
        wish = Wish(epoch + storm.chance.choice([0, 1, 3]), storm.chunks * CHUNK_BYTES)
        got = await storm.newcomer(name).fetch(wish, TIMEOUT, memory.room)
        took = asyncio.get_running_loop().time() - began
        if storm.sound:
            assert got.ok, (storm.seed, name, got.reason)
            assert got.state is not None
            assert got.state.epoch >= wish.at_least
            assert got.state == state_of(got.state.epoch)
            assert memory.image == storm.image(got.state.epoch)
            assert took < 30.0 + 4 * storm.step, storm.seed

    async with storm.weather() as began:
        await asyncio.gather(*map(fetch, storm.newcomers))
        windows = asyncio.get_running_loop().time() // SNAPSHOTS_SECONDS + 1
        for donor in storm.donors:
            assert donor.snapshots <= windows * MAX_SNAPSHOTS
            assert donor.most_held <= 3, "the newest, one that is downloaded, and one that has just come"


async def missed_means(storm: Storm) -> None:
    storm.step = max(storm.step, 1.0)
    circle = [one.name for one in storm.donors]

    async def recover(name: str) -> None:
        epoch = max(int(began / storm.step) - 1, 0)
        found, _, sources = await recovered(storm.newcomer(name), state_of(epoch), circle)
        took = asyncio.get_running_loop().time() - began
        if storm.sound:
            assert found.ok, (storm.seed, found.reason)
            assert found.digest == storm.mean(epoch).digest().hex(), storm.seed
            assert not any(one.kind for one in storm.donors if one.name in sources), storm.seed
        assert took < 20.0 + LONE_SECONDS, storm.seed

    async with storm.weather() as began:
        await asyncio.gather(*map(recover, storm.newcomers))
        assert not any(donor.snapshots for donor in storm.donors)


@few_and_many(4, 300)
def test_a_snapshot_comes_whatever_a_minority_of_donors_does_and_donors_are_spared(seeds: range) -> None:
    for seed in seeds:
        assert not run_at_once(snapshots(Storm(seed))), seed


@few_and_many(15, 300)
def test_a_missed_mean_comes_whatever_a_minority_does_and_costs_no_snapshot(seeds: range) -> None:
    for seed in seeds:
        assert not run_at_once(missed_means(Storm(seed))), seed
