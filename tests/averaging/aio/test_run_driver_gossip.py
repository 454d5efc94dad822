"""Exchanges of pairs through the asyncio drivers, over a network in memory: both apply the mean, the sum is kept."""

from __future__ import annotations

import asyncio

import pytest
import torch

from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Gathering, Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.memory import FakeIdentity, Net
from fakes.vectors import averaged

VALUES, EXCHANGES = 600, 6


async def test_nobody_waits_for_a_partner_that_withdraws_while_its_proposal_travels() -> None:
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(VALUES)}), RunOptions(strategy="gossip"))
    net, names = Net(), ["alice", "bob"]
    routers = [Router(*net.peer(name), FakeIdentity(name)) for name in names]
    alice, bob = [await router.join(spec) for router in routers]
    await net.acquainted(spec.name, names)
    values, result = torch.ones(VALUES), torch.empty(VALUES)
    waits = asyncio.create_task(averaged(bob, values, result, 1.0, 60.0))
    while "not free" not in bob.reason:  # noqa: ASYNC110
        await asyncio.sleep(0)
    seeks = asyncio.create_task(averaged(alice, values, result.clone(), 1.0, 60.0))
    while not isinstance(alice.state, Gathering):  # noqa: ASYNC110
        await asyncio.sleep(0)
    alice.stop_search("it ends")
    outcome = await waits
    assert not outcome.ok
    assert "left the round" in outcome.reason
    assert not (await seeks).ok
    await asyncio.gather(*(router.stop() for router in routers))


async def test_every_exchange_is_of_two_and_the_sum_is_kept() -> None:
    options = RunOptions(strategy="gossip", codec="fp32", part_values=256)
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(VALUES)}), options)
    net, names = Net(), [f"peer{index}" for index in range(5)]
    routers = {}
    for name in names:
        transport, directory = net.peer(name)
        routers[name] = Router(transport, directory, FakeIdentity(name))
    runs: dict[str, RunDriver] = {name: await router.join(spec) for name, router in routers.items()}
    await net.acquainted(spec.name, names)
    chance = torch.Generator().manual_seed(0)
    values = {name: torch.randn(VALUES, generator=chance) for name in names}
    total, spread = sum(values.values()), torch.stack(list(values.values())).std(0).mean()

    seek = set(names)

    async def exchange(name: str) -> list[Outcome]:
        outcomes, result = [], torch.empty(VALUES)
        while len(outcomes) < EXCHANGES and len(seek) > 1:
            outcome = await averaged(runs[name], values[name], result, 1.0, 60.0)
            outcomes.append(outcome)
            if outcome.ok:
                values[name] = result.clone()
        seek.discard(name)
        if len(seek) == 1:
            runs[min(seek)].stop_search("the others have ended")
        return outcomes

    outcomes = [one for each in await asyncio.gather(*map(exchange, names)) for one in each]
    ok = [one for one in outcomes if one.ok]
    digests = [one.digest for one in ok]
    assert len(ok) >= 2 * EXCHANGES
    assert all(len(one.contributors) == 2 for one in ok)
    apart = {digest: [one.apart or 0.0 for one in ok if one.digest == digest] for digest in digests}
    assert all(pair[0] == pytest.approx(pair[1], rel=1e-3, abs=1e-5) for pair in apart.values())
    assert apart[digests[0]][0] > 0
    assert not any(one.in_doubt for one in outcomes)
    assert all(digests.count(digest) == 2 for digest in digests), "applied at both"
    assert all("the others have ended" in one.reason for one in outcomes if not one.ok)
    torch.testing.assert_close(sum(values.values()), total, rtol=0, atol=1e-4)
    assert torch.stack(list(values.values())).std(0).mean() < spread / 3
    await asyncio.gather(*(router.stop() for router in routers.values()))


async def test_a_newcomer_tells_how_far_apart_it_was_and_its_partner_does_not() -> None:
    options = RunOptions(strategy="gossip", codec="fp16", part_values=256)
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(VALUES)}), options)
    net, names = Net(), ["peer", "newcomer"]
    routers = {name: Router(*net.peer(name), FakeIdentity(name)) for name in names}
    runs = {name: await router.join(spec) for name, router in routers.items()}
    await net.acquainted(spec.name, names)
    chance = torch.Generator().manual_seed(0)
    own = {name: torch.randn(VALUES, generator=chance) for name in names}
    weights = {"peer": 1.0, "newcomer": ATTENDANCE_LIMIT}
    calls = [averaged(runs[name], own[name], torch.empty(VALUES), weights[name], 60.0) for name in names]
    partner, newcomer = await asyncio.gather(*calls)
    assert partner.ok
    assert partner.apart is None, "a rounding error over 2^-30 is no distance"
    distance = torch.linalg.vector_norm(own["peer"] - own["newcomer"]) / torch.linalg.vector_norm(own["peer"])
    assert newcomer.apart == pytest.approx(float(distance), rel=1e-2)
    await asyncio.gather(*(router.stop() for router in routers.values()))
