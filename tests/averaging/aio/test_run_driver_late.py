"""A search whose round is over: the peer downloads that round's mean before any coordinator says that it is late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest
import torch

from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from fakes.cluster import Cluster, company
from fakes.missed import rounds
from fakes.vectors import averaged

BEFORE, OTHER = StateId(7, "ab" * 32), StateId(6, "cd" * 32)


async def search(
    cluster: Cluster, strategy: str, weight: float, state: StateId, trains: bool = False
) -> Outcome:
    """Search for a second, with a peer that no coordinator answers and that has the mean after `BEFORE` at once.

    A peer that `trains` begins to search only when it has the mean.
    """
    schema = Schema.of({"w": torch.zeros(100)})
    spec = RunSpec.create("run/step", schema, RunOptions(codec="fp32", part_values=256, strategy=strategy))
    await cluster.add("a", "b", "c", spec=spec)
    await rounds(cluster, "abc", BEFORE, spec)
    await cluster.add("d", spec=spec)
    runs = [router._runs[spec.name] for router in cluster.routers.values()]
    await company(runs)
    late = runs[-1]
    late.search.receive = lambda peer, message: None  # type: ignore[method-assign]
    values = torch.zeros(100)
    seeks: Awaitable[Outcome] = averaged(late, values, values.clone(), weight, 1.0, state)
    if not trains:
        seeks = asyncio.ensure_future(seeks)
        await cluster.net.ready(spec.name, "d")
    wish = Wish(after=BEFORE, circle=frozenset("abc"))
    got = await late.transfer.fetch(wish, 20.0, lambda size: memoryview(bytearray(size)))
    assert got.ok, got.reason
    return await seeks


@pytest.mark.parametrize("trains", [False, True])
async def test_a_federated_contribution_is_late_once_its_rounds_mean_is_here(
    cluster: Cluster, trains: bool
) -> None:
    outcome = await search(cluster, "federated:grace=0,available=3", 1.0, BEFORE, trains)
    assert not outcome.ok
    assert outcome.late > 0
    assert outcome.reason.startswith("too late by")
    assert "the mean of its round" in outcome.reason


@pytest.mark.parametrize(
    ("strategy", "weight", "state"),
    [
        ("federated:grace=0,available=3", 0.0, BEFORE),
        ("federated:grace=0,available=3", ATTENDANCE_LIMIT, BEFORE),
        ("federated:grace=0,available=3", 1.0, OTHER),
        ("allreduce", 1.0, BEFORE),
    ],
    ids=["an observer", "attendance", "of another state", "in a run that is not federated"],
)
async def test_a_mean_makes_nothing_else_late(
    cluster: Cluster, strategy: str, weight: float, state: StateId
) -> None:
    outcome = await search(cluster, strategy, weight, state)
    assert not outcome.late
    assert outcome.reason.startswith("no group within")
