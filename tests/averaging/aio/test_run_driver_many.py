"""More peers than a group holds: an outcome says how many there are, and peers with one state who has a place."""

from __future__ import annotations

import asyncio

import torch

from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.cluster import STATE, Cluster, company
from fakes.missed import mean_of, recovered
from fakes.vectors import averaged

SCHEMA = Schema.of({"w": torch.zeros(100)})
OPTIONS = RunOptions(codec="fp32", part_values=256, group_size=2)


async def test_an_outcome_says_how_many_peers_are_in_the_run(cluster: Cluster) -> None:
    spec = RunSpec.create("run", SCHEMA, OPTIONS)
    await cluster.add(*"abcd", spec=spec)
    runs = [router._runs[spec.name] for router in cluster.routers.values()]
    await company(runs)

    async def one(run: object) -> Outcome:
        return await averaged(run, torch.zeros(100), torch.zeros(100), 1.0, 20.0)  # type: ignore[arg-type]

    outcomes = await asyncio.gather(*map(one, runs))
    assert {outcome.reason for outcome in outcomes} == {"mean over 2 of 2 members; 4 peers are in the run"}


async def test_where_peers_hold_one_state_those_without_a_place_are_told(cluster: Cluster) -> None:
    spec = RunSpec.create("run", SCHEMA, OPTIONS, {"training": "together"})
    await cluster.add(*"abcd", spec=spec)
    runs = [router._runs[spec.name] for router in cluster.routers.values()]
    await company(runs)
    told = "2 of 2 places are taken; this peer waits for a place and follows the state"
    assert sorted(run.waits for run in runs) == ["", "", told, told]


async def test_a_peer_without_a_place_believes_the_makers_though_most_of_its_circle_follow_too(
    cluster: Cluster,
) -> None:
    """Newcomers met in a round that made no state; then one of them had a place, and the others missed its mean."""
    spec = RunSpec.create("run", SCHEMA, OPTIONS, {"training": "together"})
    await cluster.add(*"abcd", spec=spec)
    runs = {name: router._runs[spec.name] for name, router in cluster.routers.items()}
    await company(runs.values())
    makers = "".join(name for name, run in runs.items() if not run.waits)
    follower, other = (name for name, run in runs.items() if run.waits)
    for maker in makers:
        runs[maker].transfer.donor.keep(mean_of(makers, STATE, spec))
        runs[maker].transfer.donor.reach(STATE.epoch + 1)
    found, *_ = await recovered(runs[follower].transfer, STATE, {makers[0], other})
    assert found.ok, found.reason
    assert found.state == STATE
