"""Strategies and rules as specs, and that more of them come in by their registries alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from equipoise.averaging.gossip.machine import Pairing
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.rules import RULES, Mean
from equipoise.averaging.strategy import STRATEGIES, Strategy
from simulator.matchmaking import RUN, SPEC, signer, verify


@pytest.mark.parametrize(
    ("spec", "canonical", "name"),
    [
        ("allreduce", "allreduce:quorum=2", "allreduce"),
        ("allreduce:quorum=3", "allreduce:quorum=3", "allreduce"),
        ("gossip", "gossip:topology=random", "gossip"),
        ("gossip:topology=ring", "gossip:topology=ring", "gossip"),
    ],
)
def test_the_canonical_form_spells_out_every_option(spec: str, canonical: str, name: str) -> None:
    strategy = STRATEGIES.parse(spec)
    assert (strategy.spec, strategy.name) == (canonical, name)
    assert STRATEGIES.parse(canonical).spec == canonical


@pytest.mark.parametrize(
    ("parse", "spec", "words"),
    [
        (STRATEGIES.parse, "gosip", ["'gosip'", "allreduce, gossip", "did you mean 'gossip'?"]),
        (STRATEGIES.parse, "gossip:topology=star", ["'star'", "one of random, exponential, ring"]),
        (STRATEGIES.parse, "allreduce:qorum=3", ["'qorum'", "did you mean 'quorum'?"]),
        (STRATEGIES.parse, "allreduce:quorum=1", ["at least 2", "1"]),
        (STRATEGIES.parse, "allreduce:quorum=two", ["whole number", "'two'"]),
        (STRATEGIES.parse, "gossip:topology=ring,topology=ring", ["given twice"]),
        (STRATEGIES.parse, "x" * 200, ["at most 128 characters"]),
        (RULES.parse, "median", ["unknown rule 'median'", "rules are mean"]),
        (RULES.parse, "mean:beta=1", ["takes no options", "'beta=1'"]),
    ],
)
def test_refusals_name_what_came_and_what_is_known(
    parse: Callable[[str], object], spec: str, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"\A.*\Z") as caught:
        parse(spec)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_strategy_makes_what_forms_the_groups() -> None:
    def made(strategy: Strategy) -> object:
        return strategy.matchmaker(Context(RUN, SPEC, "a", 16, signer("a"), verify), Random(0))

    assert isinstance(made(STRATEGIES.parse("allreduce")), Matchmaking)
    assert isinstance(made(STRATEGIES.parse("gossip")), Pairing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_weighted_and_keeps_the_precision(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, -1.0], [4.0, 2.0], [7.0, 1.0]], dtype=dtype)
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    values = Mean().reduce(rows, weights)
    assert values.dtype == dtype
    torch.testing.assert_close(values, (rows * weights[:, None].to(dtype)).sum(0) / 3.5)
