"""Rules in whole rounds: all members get the same result, and a rule that fails ends the round with its reason."""

from __future__ import annotations

import asyncio
import re

import pytest
import torch

from equipoise.averaging.aio.router import Router
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.rules import RULES, Reduced, Rule, RuleError, parse_rule
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.cluster import company
from fakes.memory import FakeIdentity, Net
from fakes.vectors import averaged

VALUES = 3000


class Picky(Rule):
    """A rule that needs more contributions than come."""

    name = spec = "picky"

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        raise RuleError(f"the rule picky needs at least 9 contributions, got {len(rows)}")


async def in_a_round(rule: str, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[Outcome]]:
    """The results and outcomes of one round in fp32, by peer."""
    options = RunOptions(rule=rule, codec="fp32", part_values=256)
    spec = RunSpec.create("run", Schema.of({"w": torch.zeros(VALUES)}), options)
    net = Net()
    names = [f"peer{index}" for index in range(len(given))]
    routers = [Router(*net.peer(name), FakeIdentity(name)) for name in names]
    runs = [await router.join(spec) for router in routers]
    await net.acquainted(spec.name, names)
    await company(runs)
    results = [torch.zeros(VALUES) for _ in given]
    weights = [1.0 + index for index in range(len(given))]
    calls = zip(runs, given, results, weights, strict=True)
    outcomes = await asyncio.gather(
        *(averaged(run, own, out, weight, 20.0) for run, own, out, weight in calls)
    )
    await asyncio.gather(*(router.stop() for router in routers))
    return results, list(outcomes)


@pytest.mark.parametrize(
    ("rule", "peers"), [("median", 5), ("median", 4), ("trimmed", 5), ("trimmed:beta=0.4", 3)]
)
async def test_all_members_get_what_the_rule_makes_of_the_contributions(rule: str, peers: int) -> None:
    given = [torch.randn(VALUES, generator=torch.Generator().manual_seed(index)) for index in range(peers)]
    given[0] *= 1e12
    results, outcomes = await in_a_round(rule, given)
    assert all(outcome.ok for outcome in outcomes), outcomes[0].reason
    assert len({outcome.digest for outcome in outcomes}) == 1
    expected = parse_rule(rule).reduce(torch.stack(given), torch.ones(peers, dtype=torch.float64)).values
    assert all(torch.equal(result, expected) for result in results)


async def test_a_rule_that_fails_ends_the_round_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_known", {**RULES._known, "picky": (Picky, {})})
    given = [torch.ones(VALUES) for _ in range(3)]
    _, outcomes = await in_a_round("picky", given)
    for outcome in outcomes:
        assert not outcome.ok
        assert re.fullmatch("the rule picky needs at least 9 contributions, got [23]", outcome.reason)
