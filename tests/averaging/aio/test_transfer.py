"""State for newcomers through the asyncio drivers, over a network in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from equipoise.averaging.aio.donor import ASKS_SECONDS, MAX_ASKS_OF_ONE
from equipoise.averaging.options import RunOptions
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.limits import Candidate, Stand
from fakes.cluster import IMAGE, LIMIT, SPEC, STATE, Cluster, Memory, until
from fakes.transfer import ask


async def test_an_image_comes_from_all_who_have_it(cluster: Cluster) -> None:
    *donors, newcomer = await cluster.add("a", "b", "c", "new")
    for giver in donors:
        await giver.donor.offer(STATE, memoryview(IMAGE))
    await until(lambda: all(giver.donor._held for giver in donors))
    memory = Memory()
    outcome = await newcomer.fetch(Wish(7, LIMIT), 20.0, memory.room)
    assert outcome.ok, outcome.reason
    assert outcome.state == STATE
    assert memory.image == IMAGE
    assert set(outcome.sources) == {"a", "b", "c"}
    assert "peers with a state offer it" in outcome.reason
    assert newcomer.standing == ""


async def test_a_wish_reaches_the_trainers_and_their_snapshots_the_newcomer(cluster: Cluster) -> None:
    *donors, newcomer = await cluster.add("a", "b", "new")
    for giver in donors:
        giver.donor.reach(6)
    memory = Memory()
    fetching = asyncio.create_task(newcomer.fetch(Wish(3, LIMIT), 20.0, memory.room))
    await until(lambda: all(giver.donor.wanted == 7 for giver in donors))
    assert "1 peer wants the state of epoch 7" in donors[0].standing
    assert "fetching a state" in newcomer.standing
    for giver in donors:
        await giver.donor.offer(STATE, memoryview(IMAGE))
    outcome = await fetching
    assert outcome.ok, outcome.reason
    assert memory.image == IMAGE
    await until(lambda: all(giver.donor.wanted is None for giver in donors))


async def test_a_peer_that_is_only_a_record_is_no_donor_that_might_have_it(cluster: Cluster) -> None:
    (newcomer,) = await cluster.add("new")
    _, directory = cluster.net.peer("ghost")
    run = cluster.routers["new"]._runs[SPEC.name]
    await directory.announce(SPEC.name, Stand(spec=SPEC.hash, state="ready"))
    await until(lambda: run.search.membership.is_mute("ghost"))
    outcome = await newcomer.fetch(Wish(7, LIMIT), 20.0, Memory().room)
    assert outcome.reason == "no other peer of this run is known"


async def test_a_donor_that_is_killed_in_mid_download_costs_nothing_but_its_chunks(cluster: Cluster) -> None:
    *donors, newcomer = await cluster.add("a", "b", "c", "new")
    for giver in donors:
        await giver.donor.offer(STATE, memoryview(IMAGE))
    memory = Memory()
    fetching = asyncio.create_task(newcomer.fetch(Wish(7, LIMIT), 20.0, memory.room))
    await until(lambda: memory.image)
    cluster.net.kill("b")
    outcome = await fetching
    assert outcome.ok, outcome.reason
    assert memory.image == IMAGE


@pytest.mark.parametrize("broken", ["in use", "spare"])
async def test_a_channel_that_breaks_beside_another_bars_no_donor(cluster: Cluster, broken: str) -> None:
    """What is asked twice is sent twice, and who sends more than it was asked for is dropped."""
    image = IMAGE * 16
    giver, newcomer = await cluster.add("a", "new")
    await giver.donor.offer(STATE, memoryview(image))
    memory = Memory()
    fetching = asyncio.create_task(newcomer.fetch(Wish(7, 4 * LIMIT), 20.0, memory.room))
    sessions = cluster.routers["new"]._sessions
    await until(lambda: memory.image and sessions._peers["a"].channels)
    link = sessions._peers["a"]
    (first,) = link.channels
    second = await sessions._transport.open("a")
    sessions._enter(link, second, False)
    await cluster.net.transports["new"].received(cluster.net.transports["new"].frames + 20)
    assert not fetching.done()
    (second if broken == "in use" else first).close()
    outcome = await fetching
    assert outcome.ok, outcome.reason
    assert memory.image == image
    assert list(outcome.sources) == ["a"]


async def test_bytes_that_were_changed_bar_their_donor_and_come_from_another(cluster: Cluster) -> None:
    liar, honest, other, newcomer = await cluster.add("a", "b", "c", "new")
    for giver in (liar, honest, other):
        await giver.donor.offer(STATE, memoryview(IMAGE))
    await until(lambda: liar.donor._held)
    (held,) = liar.donor._held.values()
    liar.donor._held[held.name.digest] = held._replace(data=memoryview(bytes(len(IMAGE))))
    memory = Memory()
    outcome = await newcomer.fetch(Wish(7, LIMIT), 20.0, memory.room)
    assert outcome.ok, outcome.reason
    assert memory.image == IMAGE
    assert "a: chunk" in outcome.reason
    assert "a" not in outcome.sources


async def test_a_flood_of_asks_reads_the_directory_seldom(cluster: Cluster) -> None:
    (giver,) = await cluster.add("a")
    reads: list[float] = []
    directory = giver.donor._shared.directory
    found = directory.peers

    async def peers(run: str) -> Sequence[Candidate]:
        reads.append(asyncio.get_running_loop().time())
        return await found(run)

    directory.peers = peers  # type: ignore[method-assign]
    began = asyncio.get_running_loop().time()
    for number in range(1000):
        giver.frame("mallory", ask(number))
        await asyncio.sleep(0)
    assert 1 <= len(reads) <= MAX_ASKS_OF_ONE * (1 + (reads[-1] - began) / ASKS_SECONDS)


async def test_memory_that_cannot_be_had_fails_the_fetch(cluster: Cluster) -> None:
    def none(size: int) -> memoryview:
        raise ValueError(f"no room for {size} bytes")

    giver, newcomer = await cluster.add("a", "new")
    await giver.donor.offer(STATE, memoryview(IMAGE))
    outcome = await newcomer.fetch(Wish(7, LIMIT), 20.0, none)
    assert not outcome.ok
    assert f"no room for {len(IMAGE)} bytes" in outcome.reason


async def test_peers_of_another_spec_are_neither_asked_nor_answered(cluster: Cluster) -> None:
    other = RunSpec.create(
        "run/step", Schema.of({"w": torch.zeros(101)}), RunOptions(codec="fp32", part_values=256)
    )
    (giver,) = await cluster.add("a", spec=other)
    (newcomer,) = await cluster.add("new")
    await giver.donor.offer(STATE, memoryview(IMAGE))
    outcome = await newcomer.fetch(Wish(0, LIMIT), 0.1, Memory().room)
    assert not outcome.ok
    assert "no other peer of this run is known" in outcome.reason


async def test_what_comes_late_for_a_cancelled_fetch_is_no_fault_in_the_next(cluster: Cluster) -> None:
    *donors, newcomer = await cluster.add("a", "b", "new")
    for giver in donors:
        await giver.donor.offer(STATE, memoryview(IMAGE))
    await until(lambda: all(giver.donor._held for giver in donors))
    memory = Memory()
    fetching = asyncio.create_task(newcomer.fetch(Wish(7, LIMIT), 20.0, memory.room))
    await until(lambda: memory.image)
    newcomer.withdraw("cancelled")
    assert not (await fetching).ok
    outcome = await newcomer.fetch(Wish(7, LIMIT), 20.0, memory.room)
    assert outcome.ok, outcome.reason
    assert set(outcome.sources) == {"a", "b"}
    assert memory.image == IMAGE


async def test_leaving_the_run_ends_a_fetch(cluster: Cluster) -> None:
    _, newcomer = await cluster.add("a", "new")
    fetching = asyncio.create_task(newcomer.fetch(Wish(0, LIMIT), 20.0, Memory().room))
    await until(lambda: newcomer.standing)
    with pytest.raises(ValueError, match="already"):
        await newcomer.fetch(Wish(0, LIMIT), 20.0, Memory().room)
    await cluster.routers["new"].stop()
    outcome = await fetching
    assert not outcome.ok
    assert "left" in outcome.reason


async def test_an_image_of_one_byte(cluster: Cluster) -> None:
    giver, newcomer = await cluster.add("a", "new")
    await giver.donor.offer(STATE, memoryview(b"x"))
    memory = Memory()
    assert (await newcomer.fetch(Wish(0, LIMIT), 20.0, memory.room)).ok
    assert memory.image == b"x"
    with pytest.raises(ValueError, match="image of 1 to"):
        await giver.donor.offer(STATE, memoryview(b""))


async def test_an_offer_that_waits_for_another_ends_when_the_run_is_left(cluster: Cluster) -> None:
    (giver,) = await cluster.add("a")
    await giver.donor.offer(STATE, memoryview(IMAGE))
    waiting = asyncio.create_task(giver.donor.offer(StateId(8, "cd" * 32), memoryview(IMAGE)))
    giver.stop("left")  # Before the first step of the task that computes the digest.
    async with asyncio.timeout(10):
        await waiting
    assert giver.donor._held == {}
