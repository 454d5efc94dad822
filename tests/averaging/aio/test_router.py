"""Runs and rounds through the asyncio drivers, over a network in memory."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import msgspec
import pytest
import torch

from equipoise.averaging.aio import announcer
from equipoise.averaging.aio.round_driver import ROUND_FRAME, RoundDriver, Rounds, Task
from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.layout import Vectors
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import NoPeers, Outcome
from equipoise.averaging.rules import RULES, Reduced, Rule, RuleError, parse_rule
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.compression.device_reduce import DeviceReducer
from fakes.cluster import Cluster, company
from fakes.memory import MemoryDirectory
from fakes.vectors import averaged, encoded


def spec_of(size: int, name: str = "run", terms: dict[str, str] | None = None, **options: object) -> RunSpec:
    schema = Schema.of({"w": torch.zeros(size)})
    return RunSpec.create(name, schema, RunOptions(**{"codec": "fp32", "part_values": 256, **options}), terms)


@pytest.fixture
def rounds(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Router, RoundDriver, Manifest]]:
    """What begins: one of each member of each round."""
    begun, begin = [], Rounds.begin

    def watched(table: Rounds, task: Task, keep: Callable[..., None]) -> RoundDriver:
        router = next(router for router in cluster.routers.values() if router._rounds is table)
        begun.append((router, begin(table, task, keep), task.manifest))
        return begun[-1][1]

    monkeypatch.setattr(Rounds, "begin", watched)
    return begun


async def joined(cluster: Cluster, spec: RunSpec, names: Sequence[str]) -> list[RunDriver]:
    """The runs of peers, which are added if they are not there, once each peer knows the others."""
    routers = [cluster.routers.get(name) or cluster.host(name) for name in names]
    runs = [await router.join(spec) for router in routers]
    await company(runs)
    return runs


async def together(runs: Sequence[RunDriver]) -> list[Outcome]:
    """One round, the contents of which do not matter."""
    size = runs[0].spec.layout.size
    return await asyncio.gather(
        *(averaged(run, torch.ones(size), torch.zeros(size), 1.0, 20.0) for run in runs)
    )


async def average(cluster: Cluster, spec: RunSpec, weights: dict[str, float], timeout: float = 20.0):
    """One round of all named peers; returns (contributions, results, outcomes) by name."""
    size = spec.layout.size
    values = {
        name: torch.randn(size, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(weights)
    }
    results = {name: torch.zeros(size) for name in weights}
    runs = {name: await cluster.routers[name].join(spec) for name in weights}
    await company(runs.values())
    outcomes = await asyncio.gather(
        *(averaged(runs[name], values[name], results[name], weights[name], timeout) for name in weights)
    )
    return values, results, dict(zip(weights, outcomes, strict=True))


def expected_mean(values: dict[str, torch.Tensor], outcome: Outcome) -> torch.Tensor:
    total = sum(outcome.contributors.values())
    shares = [values[name].double() * weight / total for name, weight in outcome.contributors.items()]
    return torch.stack(shares).sum(0)


async def test_nearly_equal_contributions_to_two_rounds_are_told_once_at_every_member(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    spec, names = spec_of(5000), ("peer0", "peer1", "peer2")
    runs = await joined(cluster, spec, names)

    async def step(*given: torch.Tensor, compared: bool = True, weight: float = 1.0) -> None:
        rest = weight, 20.0, None, None, None, compared
        results = [averaged(run, one, torch.zeros(5000), *rest) for run, one in zip(runs, given, strict=True)]
        assert all(outcome.ok for outcome in await asyncio.gather(*results))

    drawn = [torch.randn(5000, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    same, close = drawn[0], drawn[0] + 0.01 * drawn[3]
    await step(*drawn[:3])
    for _ in range(2):
        await step(same, same, same, compared=False)
        await step(same, same, same, weight=2.0**-30)
        await step(*[torch.zeros(5000)] * 3)
        await step(same, drawn[1], close)
        await step(same, drawn[1], drawn[0] + 0.1 * drawn[3])
    assert not any(run.twins for run in runs)
    for _ in range(3):
        await step(same, drawn[1], close)
    told = (
        "run run: peers peer0 and peer2 gave nearly equal contributions to round 12 and to the one before; "
        "they train on the same data: give each other data or another seed, or use Shares"
    )
    assert [list(run.twins.values()) for run in runs] == [[told]] * 3
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [told] * 3


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("codec", ["fp32", "int8", "nf4", "sparse"])
async def test_every_member_ends_with_the_same_weighted_mean(cluster: Cluster, size: int, codec: str) -> None:
    weights = {f"peer{index}": 1.0 + index for index in range(size)}
    for name in weights:
        cluster.host(name)
    values, results, outcomes = await average(cluster, spec_of(5000, codec=codec, part_values=512), weights)
    first = outcomes["peer0"]
    for name, outcome in outcomes.items():
        assert outcome.ok, outcome.reason
        assert outcome.contributors == weights
        assert outcome.digest == first.digest
        assert torch.equal(results[name], results["peer0"])
    error = (results["peer0"].double() - expected_mean(values, first)).norm() / expected_mean(
        values, first
    ).norm()
    assert error <= {"fp32": 1e-6, "int8": 0.010, "nf4": 0.14, "sparse": 1.0}[codec]


@pytest.mark.parametrize(("rule", "peers"), [("median", 4), ("trimmed", 5)])
async def test_all_members_get_what_the_rule_makes_of_the_contributions(
    cluster: Cluster, rule: str, peers: int
) -> None:
    weights = {cluster.host(f"peer{index}")._sessions.peer: 1.0 + index for index in range(peers)}
    values, results, outcomes = await average(cluster, spec_of(3000, rule=rule), weights)
    expected = parse_rule(rule).reduce(torch.stack([*values.values()]), torch.ones(peers).double()).values
    assert all(torch.equal(result, expected) for result in results.values()), outcomes


async def test_a_rule_that_fails_ends_the_round_with_its_reason(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(Rule):
        name = spec = "picky"

        def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
            raise RuleError(f"the rule picky needs at least 9 contributions, got {len(rows)}")

    monkeypatch.setattr(RULES, "_known", {**RULES._known, "picky": (Picky, {})})
    outcomes = await together(await joined(cluster, spec_of(1000, rule="picky"), "abc"))
    for outcome in outcomes:
        assert not outcome.ok
        assert re.fullmatch("the rule picky needs at least 9 contributions, got [23]", outcome.reason)


async def test_a_group_comes_about_once_one_of_those_who_wait_can_be_dialled(cluster: Cluster) -> None:
    for name in ("one", "two"):
        cluster.host(name, dialable=False)
    spec = spec_of(1000)
    rounds = asyncio.create_task(average(cluster, spec, {"one": 1.0, "two": 1.0}))
    await cluster.net.ready(spec.name, ["one", "two"])
    cluster.net.transports["one"]._dialable = True
    values, results, outcomes = await rounds
    for name, outcome in outcomes.items():
        assert outcome.ok, outcome.reason
        torch.testing.assert_close(
            results[name].double(), expected_mean(values, outcome), atol=1e-5, rtol=1e-5
        )


async def compare(cluster: Cluster, specs: dict[str, RunSpec]) -> dict[str, RunDriver]:
    """Peers that join one after the other and have heard of each other what they need."""
    runs = {}
    for number, (name, spec) in enumerate(specs.items()):
        cluster.host(name)
        runs[name] = await cluster.routers[name].join(spec)
        # As if a second apart: a busy machine may hold an answer up for longer than a join takes.
        runs[name].search.comparison._began -= len(specs) - number
        await cluster.net.acquainted(spec.name, list(runs))
    return runs


async def test_peers_that_differ_say_how_and_the_later_peer_objects(cluster: Cluster) -> None:
    small, large = (spec_of(1000, terms={"target batch size": size}) for size in ("2048", "4096"))
    runs = await compare(cluster, {"first": large, "second": small})
    first, second = (run.search for run in runs.values())
    differ = "has another spec: target batch size: here 2048, there 4096"
    assert (
        await second.objection({"first"}, set(), 10.0)
        == f"..first, which this daemon was told to join by, {differ}"
    )
    assert await second.objection(set(), set(), 10.0) == ""
    assert second.comparison.reason == f"1 peer of this name {differ}"
    assert await first.objection({"second"}, {"second"}, 10.0) == ""
    assert runs["first"].search.comparison.difference("second") == "target batch size: here 4096, there 2048"
    for run in runs.values():
        assert isinstance(run.search.state, NoPeers)
        assert "target batch size" in run.search.state.reason
        assert run.search.reason == run.search.state.reason
    outcome = await averaged(runs["first"], torch.zeros(1000), torch.zeros(1000), 1.0, 0.05)
    assert "1 peer of this name has another spec: target batch size: here 4096" in outcome.reason


async def test_a_dead_peers_record_turns_nobody_away(cluster: Cluster) -> None:
    await compare(cluster, {"dead": spec_of(1000)})
    cluster.net.kill("dead")
    cluster.host("late")
    late = await cluster.routers["late"].join(spec_of(1001))
    assert await late.search.objection({"dead"}, {"dead"}, 10.0) == ""
    assert late.search.reason == "1 peer of this name has another spec: how it differs has not been said"


async def test_a_cut_channel_keeps_nobody_out_of_the_next_round(cluster: Cluster) -> None:
    weights = {"one": 1.0, "two": 1.0, "three": 1.0}
    runs = await joined(cluster, spec_of(1000), list(weights))
    for cut in itertools.combinations(weights, 2):
        assert all(outcome.ok for outcome in await together(runs))
        for channel in list(cluster.net.transports[cut[0]].channels):
            if channel.peer == cut[1]:
                channel.close()
        outcomes = await together(runs)
        assert [len(outcome.group) for outcome in outcomes] == [3, 3, 3], cut


async def test_channels_are_kept_from_round_to_round(cluster: Cluster) -> None:
    runs = await joined(cluster, spec_of(1000), "abc")
    opened = []
    for _ in range(5):
        assert all(outcome.ok for outcome in await together(runs))
        opened.append([list(cluster.net.transports[name].channels) for name in "abc"])
    assert opened == opened[:1] * 5
    assert not any(channel.closed for channels in opened[0] for channel in channels)


async def test_a_session_carries_news_of_the_directory_once_it_is_open(cluster: Cluster) -> None:
    routers = {name: cluster.host(name) for name in "ab"}
    runs = await joined(cluster, spec_of(1000), "ab")
    mine, others = (cast(MemoryDirectory, routers[name]._directory) for name in "ab")
    assert not mine.carry("nobody", b"news")
    assert all(outcome.ok for outcome in await together(runs))
    others.received.clear()
    assert mine.carry("b", b"news")
    while not others.received:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert others.received == [("a", b"news")]


@pytest.mark.parametrize("cap", [0.0, 5e6, 9e6], ids=["measured", "capped", "slower than its cap"])
async def test_joins_and_records_say_what_a_peer_can_send_and_receive(
    cluster: Cluster,
    rounds: list[tuple[Router, RoundDriver, Manifest]],
    monkeypatch: pytest.MonkeyPatch,
    cap: float,
) -> None:
    monkeypatch.setattr(announcer, "REPORT_SECONDS", 0.0)
    measured = 7e6
    for name in "ab":
        cluster.host(name, caps=(cap, cap))
    spec = spec_of(8)
    runs = await joined(cluster, spec, "ab")
    for _ in range(2):
        for run in runs:
            run.search.announcer.report_accumulated(1.0)  # Is announced at once.
        assert all(outcome.ok for outcome in await together(runs))
        for router in cluster.routers.values():
            meter = router._sessions.meter
            meter.upload.estimate = meter.download.estimate = measured
    said = [[(join.bandwidth, join.download) for join in manifest.members] for _, _, manifest in rounds[::2]]
    told = min(cap or measured, measured)
    assert {record.bandwidth for record in cluster.net.records[spec.name].values()} == {told}
    assert said[0] == [(cap, cap)] * 2, "nothing has been measured yet"
    assert said[1] == [(told, told)] * 2


async def test_only_a_members_values_take_memory_of_a_round(
    cluster: Cluster, rounds: list[tuple[Router, RoundDriver, Manifest]]
) -> None:
    await together(await joined(cluster, spec_of(1000), "ab"))
    for router, round, manifest in rounds:
        header = round._links.header + wire.encode(wire.Contribution(0))
        size = 4 * (round.group.parts[0].stop - round.group.parts[0].start)
        (other,) = set(manifest.peers) - {router._sessions.peer}
        shared = router._sessions.scratch(size)[0].obj
        assert router.place(other, header, size)[0].obj is not shared
        assert router.place("stranger", header, size)[0].obj is shared


@pytest.mark.parametrize("early", [True, False])
async def test_undialable_members_hear_nothing_of_each_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """What one says to another nevertheless, over a channel that was open before, disturbs nobody."""
    spec = spec_of(5000)
    for name in ("a", "b", "client", "other"):
        cluster.host(name, dialable=name in "ab")
    begin, router = Rounds.begin, cluster.routers["client"]

    def overheard(table: Rounds, task: Task, keep: Callable[..., None]) -> RoundDriver:
        heartbeat = ROUND_FRAME + task.manifest.id + wire.encode(wire.Heartbeat())
        if table is not router._rounds:
            return begin(table, task, keep)
        if early:
            router.frame("other", heartbeat)
        round = begin(table, task, keep)
        router.frame("other", heartbeat)
        return round

    monkeypatch.setattr(Rounds, "begin", overheard)
    values, results, outcomes = await average(cluster, spec, dict.fromkeys(cluster.routers, 1.0))
    for name, outcome in outcomes.items():
        assert outcome.ok, outcome.reason
        assert outcome.contributors.keys() == values.keys()
        torch.testing.assert_close(
            results[name].double(), expected_mean(values, outcome), rtol=1e-6, atol=1e-6
        )


async def test_a_search_that_is_stopped_ends_at_once_with_its_reason_and_the_run_goes_on(
    cluster: Cluster,
) -> None:
    cluster.host("a")
    cluster.host("b")
    spec = spec_of(100)
    runs = [await cluster.routers[name].join(spec) for name in "ab"]
    result = torch.full((100,), 7.0)
    search = asyncio.create_task(averaged(runs[0], torch.ones(100), result, 1.0, 600.0))
    await cluster.net.ready(spec.name, ["a"])
    runs[0].search.stop("nobody is left")
    outcome = await search
    assert (outcome.ok, outcome.reason, outcome.group) == (False, "nobody is left", ())
    assert torch.equal(result, torch.full((100,), 7.0))
    runs[0].search.stop("no peer has come")
    both = await asyncio.gather(
        *(averaged(run, torch.ones(100), torch.empty(100), 1.0, 20.0) for run in runs)
    )
    assert all(outcome.ok for outcome in both), both


@pytest.mark.parametrize(
    ("begins", "bytes_", "said"),
    [
        (132, b"\x00\x00\xc0\x7f", "the scale of block 1 of 2 is nan"),
        (132, b"\x00\x00\x80\x7f", "the scale of block 1 of 2 is inf"),
        (8, b"\x80\x80\x80\x80", "code 4 of 256 is -128"),
    ],
)
async def test_codes_that_no_encoder_writes_leave_no_daemon_and_nobody_blames_its_peer(
    cluster: Cluster, begins: int, bytes_: bytes, said: str
) -> None:
    names = ["a", "b", "broken"]
    spec = spec_of(2000, codec="int8")
    runs = await joined(cluster, spec, names)
    size = spec.layout.encoded_size
    vectors = [Vectors(encoded(spec.layout, torch.ones(2000)), memoryview(bytearray(size))) for _ in names]
    # In every part, as the script may have written to its memory after the round began.
    for start in range(0, 2000, 256):
        at = spec.layout.encoded(start, 2000).start + begins
        vectors[-1].contribution[at : at + 4] = bytes_
    a, b, broken = await asyncio.gather(
        *(run.average(one, 1.0, 20.0) for run, one in zip(runs, vectors, strict=True))
    )
    assert not broken.ok
    assert f"our own values: int8:block=128: {said}" in broken.reason
    assert "\n" not in broken.reason
    assert not any(vectors[-1].mean) or broken.in_doubt
    for outcome in (a, b):
        assert outcome.ok, outcome.reason
        assert set(outcome.contributors) == {"a", "b"}
        assert not any("do not decode" in event for event in outcome.events), outcome.events


async def test_parts_may_be_reduced_on_a_device_also_on_one_that_fails(cluster: Cluster) -> None:
    weights = {"loop": 1.0, "cpu": 2.0, "meta": 3.0}
    reducers = {name: DeviceReducer(torch.device(name)) for name in weights if name != "loop"}
    for name in weights:
        cluster.host(name, reducer=reducers.get(name))
    _, results, outcomes = await average(cluster, spec_of(5000, codec="int8"), weights, 100.0)
    for name, outcome in outcomes.items():
        assert outcome.ok, outcome.reason
        assert set(outcome.contributors) == set(weights)
        assert torch.equal(results[name], results["loop"])
    assert reducers["cpu"].trouble == ""
    assert reducers["meta"].trouble.startswith("meta failed, so the CPU reduced the part: ")


async def test_nothing_waits_twice_for_a_member_that_has_not_greeted(
    cluster: Cluster, rounds: list[tuple[Router, RoundDriver, Manifest]]
) -> None:
    runs = await joined(cluster, spec_of(3000), "abc")
    await together(runs)
    router, round, manifest = next(begun for begun in rounds if begun[0] is cluster.routers["a"])
    again = RoundDriver(
        round.task,
        router._sessions,
        lambda _: None,
        lambda mean, prove: None,
    )
    again.start()
    for other in set(manifest.peers) - {"a"}:
        before = len(again._endpoint._unheard[again._links.reached[other]])
        assert before
        for _ in range(3):
            again.lost(other, "its channel broke")
        assert len(again._endpoint._unheard[again._links.reached[other]]) <= before
    again.withdraw("the test is over")
    again.close()


@pytest.mark.parametrize("size", [1, 255])
async def test_small_tensors_alone_are_averaged_exactly_under_int8(cluster: Cluster, size: int) -> None:
    weights = dict.fromkeys("abc", 1.0)
    for name in weights:
        cluster.host(name, caps=(1e6 if name == "a" else 1e9, 0.0))
    values, results, outcomes = await average(cluster, spec_of(size, codec="int8"), weights)
    for name, outcome in outcomes.items():
        assert outcome.ok, outcome.reason
        assert torch.equal(results[name], results["a"])
    torch.testing.assert_close(results["a"].double(), expected_mean(values, outcomes["a"]))


async def test_our_own_small_tensor_that_is_not_finite_fails_our_round(cluster: Cluster) -> None:
    schema = Schema.of({"t": torch.zeros(3), "w": torch.zeros(300)})
    spec = RunSpec.create("run", schema)
    runs = await joined(cluster, spec, "ab")
    zeros, poisoned = torch.zeros(2, spec.layout.size)
    poisoned[spec.layout.coded + 1] = float("nan")
    outcomes = await asyncio.gather(
        *(
            averaged(run, values, zeros.clone(), 1.0, 20.0)
            for run, values in zip(runs, (zeros, poisoned), strict=True)
        )
    )
    assert not any(outcomes)
    assert "our own values: fp32: value 1 of 3 is nan" in outcomes[1].reason


async def test_bad_input_is_refused_before_anything_happens(cluster: Cluster) -> None:
    cluster.host("a")
    run = await cluster.routers["a"].join(spec_of(10))
    with pytest.raises(ValueError, match="weight"):
        await averaged(run, torch.ones(10), torch.zeros(10), float("nan"), 1.0)
    good, bad = (memoryview(bytearray(size)) for size in (40, 36))
    for vectors in (Vectors(good, bad), Vectors(bad, good)):
        with pytest.raises(ValueError, match="expected vectors of 40 and 40 bytes, got"):
            await run.average(vectors, 1.0, 1.0)
    with pytest.raises(ValueError, match="already"):
        await cluster.routers["a"].join(spec_of(10))


async def test_a_claim_counts_if_its_peer_answers_and_up_to_what_it_gives(cluster: Cluster) -> None:
    spec = spec_of(1000)
    runs = await joined(cluster, spec, ("a", "b", "liar"))
    runs[1].search.announcer.report_accumulated(100.0)
    runs[2].search.announcer.report_accumulated(1e12)
    records = cluster.net.records[spec.name]
    while records["liar"].accumulated < 1e12 or records["b"].accumulated < 100.0:  # noqa: ASYNC110
        await asyncio.sleep(0)
    records["ghost"] = msgspec.structs.replace(records["liar"], peer="ghost")
    assert await runs[0].others_accumulated() == 100.0 + 1e12, "whoever has no target takes it as it is"
    assert await runs[0].others_accumulated(300.0) == 100.0 + 300.0 / 3
    size = spec.schema.size
    outcomes = await asyncio.gather(
        *(
            averaged(run, torch.ones(size), torch.zeros(size), weight, 20.0)
            for run, weight in zip(runs, (100.0, 100.0, 1.0), strict=True)
        )
    )
    assert outcomes[0].events[-1] == "201 of 300 came together: liar gave 1 where 100 was counted on"
    assert not outcomes[1].events, "it had counted on nobody"
    runs[2].search.announcer.report_accumulated(2e12)
    while records["liar"].accumulated < 2e12 or records["liar"].round != runs[0].round:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert await runs[0].others_accumulated(300.0) <= 2.0 + 100.0


async def test_only_rounds_that_are_due_by_weight_have_it_told_at_once(cluster: Cluster) -> None:
    cluster.host("a")
    patient, batches = spec_of(10, "patient", strategy="federated"), spec_of(10, "batches")
    for spec in (patient, batches):
        run = await cluster.routers["a"].join(spec)
        while "a" not in cluster.net.records.get(spec.name, {}):  # noqa: ASYNC110
            await asyncio.sleep(0)
        told = cluster.net.records[spec.name]["a"]
        run.search.announcer.report_accumulated(100.0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert (cluster.net.records[spec.name]["a"] is told) == (spec is patient)


async def test_a_contribution_to_a_state_that_the_others_have_left_is_told_how_late_it_is(
    cluster: Cluster,
) -> None:
    before, after = StateId(3, "b" * 64), StateId(4, "a" * 64)
    spec = spec_of(1000)

    def step(run: RunDriver, weight: float, state: StateId) -> Coroutine[Any, Any, Outcome]:
        return averaged(run, torch.ones(1000), torch.zeros(1000), weight, 20.0, state)

    runs = await joined(cluster, spec, ["one", "two"])
    assert all(await asyncio.gather(*(step(run, 1.0, before) for run in runs)))
    slow = await cluster.host("slow").join(spec)
    await company([*runs, slow])

    async def catch_up() -> tuple[Outcome, Outcome]:
        return await step(slow, 1.0, before), await step(slow, 0.0, after)

    catching_up = asyncio.create_task(catch_up())
    first, second = await asyncio.gather(*(step(run, 1.0, after) for run in runs))
    late, caught_up = await catching_up
    assert not late.ok
    assert late.late > 0
    assert late.reason.startswith(f"too late by {late.late:.3g} s: ")
    assert late.group == ()
    assert first.contributors == second.contributors == caught_up.contributors == {"one": 1.0, "two": 1.0}
