"""Strategies and rules as specs, and that more of them come in by their registries alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch

from equipoise.averaging.gossip.machine import Pairing
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.rules import Mean, parse_rule
from equipoise.averaging.strategy import Strategy, parse_strategy
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
    strategy = parse_strategy(spec)
    assert (strategy.spec, strategy.name) == (canonical, name)
    assert parse_strategy(canonical).spec == canonical


@pytest.mark.parametrize(
    ("parse", "spec", "words"),
    [
        (parse_strategy, "gosip", ["'gosip'", "allreduce, gossip", "did you mean 'gossip'?"]),
        (parse_strategy, "gossip:topology=star", ["'star'", "one of random, exponential, ring"]),
        (parse_strategy, "allreduce:qorum=3", ["'qorum'", "did you mean 'quorum'?"]),
        (parse_strategy, "allreduce:quorum=1", ["at least 2", "1"]),
        (parse_strategy, "allreduce:quorum=two", ["whole number", "'two'"]),
        (parse_strategy, "gossip:topology=ring,topology=ring", ["given twice"]),
        (parse_strategy, "x" * 200, ["at most 128 characters"]),
        (parse_rule, "median", ["unknown rule 'median'", "rules are mean"]),
        (parse_rule, "mean:beta=1", ["takes no options", "'beta=1'"]),
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

    assert isinstance(made(parse_strategy("allreduce")), Matchmaking)
    assert isinstance(made(parse_strategy("gossip")), Pairing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_is_weighted_and_keeps_the_precision(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1.0, -1.0], [4.0, 2.0], [7.0, 1.0]], dtype=dtype)
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    values, scores = Mean().reduce(rows, weights)
    assert values.dtype == dtype
    torch.testing.assert_close(values, (rows * weights[:, None].to(dtype)).sum(0) / 3.5)
    torch.testing.assert_close(scores, weights / 3.5)
