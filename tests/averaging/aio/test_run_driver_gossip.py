"""Exchanges of pairs through the asyncio drivers, over a network in memory: withdrawals, and newcomers."""

from __future__ import annotations

import asyncio

import pytest
import torch

from equipoise.averaging.aio.router import Router
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Gathering
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.memory import FakeIdentity, Net
from fakes.vectors import averaged

VALUES = 600


async def test_a_partner_that_withdraws_while_its_proposal_travels_is_not_waited_for() -> None:
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(VALUES)}), RunOptions(strategy="gossip"))
    net, names = Net(), ["alice", "bob"]
    routers = [Router(*net.peer(name), FakeIdentity(name)) for name in names]
    alice, bob = [await router.join(spec) for router in routers]
    await net.acquainted(spec.name, names)
    values, result = torch.ones(VALUES), torch.empty(VALUES)
    waits = asyncio.create_task(averaged(bob, values, result, 1.0, 60.0))
    while "not free" not in bob.search.reason:  # noqa: ASYNC110
        await asyncio.sleep(0)
    seeks = asyncio.create_task(averaged(alice, values, result.clone(), 1.0, 60.0))
    while not isinstance(alice.search.state, Gathering):  # noqa: ASYNC110
        await asyncio.sleep(0)
    alice.search.stop("it ends")
    outcome = await waits
    assert not outcome.ok
    assert "left the round" in outcome.reason
    assert not (await seeks).ok
    await asyncio.gather(*(router.stop() for router in routers))


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
