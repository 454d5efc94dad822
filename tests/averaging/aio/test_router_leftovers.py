"""What daemons keep of runs that their trainers have left, and serve to stragglers."""

from __future__ import annotations

import pytest
import torch

from equipoise.averaging.aio import router as router_module
from equipoise.averaging.aio.router import MAX_LEFTOVERS, Router
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Idle, NoPeers
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.replication.messages import Answer
from equipoise.averaging.replication.server import Server
from equipoise.averaging.replication.snapshot_quorum import SnapshotQuorum
from equipoise.averaging.replication.transfer_events import AskReceived, EpochReached, Send, TrainerLeft
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.cluster import IMAGE, LIMIT, SPEC, STATE, Cluster, Memory, until
from fakes.memory import FakeIdentity
from fakes.missed import recovered, rounds
from fakes.transfer import RUN, TICKET, answer, ask, offer_of


async def leave(cluster: Cluster, names: str, run: str = SPEC.name) -> None:
    for name in names:
        router = cluster.routers[name]
        await router.leave(router._runs[run], "its client has left the run")


async def test_a_straggler_gets_an_update_of_those_who_have_left(cluster: Cluster) -> None:
    await cluster.add("a", "b", "c")
    (outcome, mean), *_ = await rounds(cluster, "abc", STATE)
    assert outcome.ok, outcome.reason
    await leave(cluster, "ab")
    straggler = cluster.routers["c"]._runs[SPEC.name]
    await until(lambda: isinstance(straggler.search.state, NoPeers))
    transfer = straggler.transfer
    found, result, sources = await recovered(transfer, STATE, "ab")
    assert found.ok, found.reason
    assert torch.equal(result, mean)
    assert sources.keys() <= {"a", "b"}


async def test_a_peer_that_joins_only_then_gets_it_too(cluster: Cluster) -> None:
    await cluster.add("a", "b")
    (outcome, mean), _ = await rounds(cluster, "ab", STATE)
    await leave(cluster, "ab")
    transport, directory = cluster.net.peer("late")
    cluster.routers["late"] = Router(transport, directory, FakeIdentity("late"))
    run = await cluster.routers["late"].join(SPEC)
    found, result, _ = await recovered(run.transfer, STATE, "ab")
    assert found.ok, found.reason
    assert found.digest == outcome.digest
    assert torch.equal(result, mean)
    assert isinstance(run.search.state, NoPeers)


async def test_the_last_snapshot_is_served_too(cluster: Cluster) -> None:
    giver, newcomer = await cluster.add("a", "new")
    await giver.donor.offer(STATE, memoryview(IMAGE))
    await until(lambda: giver.donor._held)
    await leave(cluster, "a")
    memory = Memory()
    outcome = await newcomer.fetch(Wish(7, LIMIT), 20.0, memory.room)
    assert outcome.ok, outcome.reason
    assert memory.image == IMAGE
    later = await newcomer.fetch(Wish(8, LIMIT), 600.0, memory.room)
    assert not later.ok, "no trainer is left to take one"


async def test_nothing_stays_of_a_run_without_a_mean(cluster: Cluster) -> None:
    await cluster.add("a", "b")
    await leave(cluster, "a")
    assert cluster.net.records[SPEC.name].keys() == {"b"}


async def test_a_daemon_that_stops_keeps_nothing(cluster: Cluster) -> None:
    await cluster.add("a", "b")
    await rounds(cluster, "ab", STATE)
    await leave(cluster, "a")
    assert cluster.net.records[SPEC.name]["a"].left
    await cluster.routers["a"].stop()
    assert not cluster.routers["a"]._leftovers


async def test_a_peer_that_takes_the_run_up_again_is_company_and_begins_anew(cluster: Cluster) -> None:
    await cluster.add("a", "b")
    await rounds(cluster, "ab", STATE)
    await leave(cluster, "a")
    other = cluster.routers["b"]._runs[SPEC.name]
    await until(lambda: isinstance(other.search.state, NoPeers))
    await cluster.routers["a"].join(SPEC)
    assert not cluster.routers["a"]._leftovers
    await until(lambda: isinstance(other.search.state, Idle))


async def test_a_leftover_ends_after_a_while(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "LEFTOVER_SECONDS", 0.2)
    await cluster.add("a", "b")
    await rounds(cluster, "ab", STATE)
    await leave(cluster, "a")
    await until(lambda: "a" not in cluster.net.records[SPEC.name])
    assert not cluster.routers["a"]._leftovers


async def test_more_bytes_than_may_be_are_not_kept(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "LEFTOVER_BYTES", 1)
    await cluster.add("a", "b")
    await rounds(cluster, "ab", STATE)
    await leave(cluster, "a")
    assert not cluster.routers["a"]._leftovers
    assert "a" not in cluster.net.records[SPEC.name]


async def test_a_run_too_large_by_itself_takes_the_place_of_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.add("a", "b")
    small, large = spec_of(0), spec_of(1, 6400)
    for spec in (small, large):
        for name in "ab":
            await cluster.routers[name].join(spec)
        await cluster.net.acquainted(spec.name, ["a", "b"])
        await rounds(cluster, "ab", STATE, spec)
    monkeypatch.setattr(router_module, "LEFTOVER_BYTES", 6400)
    for spec in (small, large):
        await leave(cluster, "a", spec.name)
    kept = cluster.routers["a"]._leftovers
    assert [bool(kept.get(spec.name)) for spec in (small, large)] == [True, False]


async def test_the_run_left_first_goes_first(cluster: Cluster) -> None:
    await cluster.add("a", "b")
    specs = [spec_of(number) for number in range(MAX_LEFTOVERS + 1)]
    for spec in specs:
        for name in "ab":
            await cluster.routers[name].join(spec)
        await cluster.net.acquainted(spec.name, ["a", "b"])
        await rounds(cluster, "ab", STATE, spec)
        await leave(cluster, "a", spec.name)
    kept = cluster.routers["a"]._leftovers
    assert [spec.name for spec in specs if kept.get(spec.name)] == [spec.name for spec in specs[1:]]
    await until(lambda: "a" not in cluster.net.records[specs[0].name])


def spec_of(number: int, values: int = 64) -> RunSpec:
    return RunSpec.create(
        f"run{number}/step", Schema.of({"w": torch.zeros(values)}), RunOptions(codec="fp32")
    )


def test_no_snapshot_is_wished_of_a_trainer_that_has_left() -> None:
    giver = Server()
    giver.handle(EpochReached(3), 0.0)
    giver.handle(TrainerLeft(), 0.0)
    (sent,) = giver.handle(AskReceived("new", ask(at_least=4, wanted=(4,))), 0.0)
    assert sent == Send("new", Answer(RUN, TICKET, 3, left=True))
    assert giver.wanted is None


def test_a_peer_that_has_left_has_no_say_in_snapshots_that_it_does_not_hold() -> None:
    poll = SnapshotQuorum(4)
    poll.see(("a", "gone"), 0.0)
    poll.hear("gone", Answer(RUN, TICKET, 3, left=True), 0.1)
    poll.hear("a", answer(4, offer_of(4)), 0.1)
    agreement = poll.agreement(0.1)
    assert agreement is not None
    assert agreement.donors == ("a",)


def test_where_only_those_are_who_have_left_nobody_takes_a_snapshot() -> None:
    poll = SnapshotQuorum(4)
    poll.see(("gone",), 0.0)
    assert not poll.hopeless(0.1)
    poll.hear("gone", Answer(RUN, TICKET, 3, left=True), 0.1)
    assert poll.hopeless(0.1) == "all known peers have left the run, and hold no snapshot"
    poll.hear("gone", answer(0), 0.2)  # Its trainer is back.
    assert not poll.hopeless(0.2)
