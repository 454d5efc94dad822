"""Strategies and rules as specs, and that more of them come in by their registries alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from equipoise.averaging.gossip.machine import Pairing
from equipoise.averaging.machines import matchmaker
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.options import Needs
from equipoise.averaging.outer import parse_outer
from equipoise.averaging.rules import parse_rule
from equipoise.averaging.strategy import Federated, Strategy, parse_strategy
from fakes.matchmaking import RUN, SPEC, signer, verify

FEDERATED = "federated:fraction=1,minimum=2,available=2,quorum=2,grace=10,deadline=600,late=drop"


def test_a_federated_strategy_tells_its_options() -> None:
    strategy = Federated(fraction=0.25, minimum=3, grace=0.0, tags=("gpu",))
    assert isinstance(parse_strategy(strategy.spec), Federated)
    assert vars(parse_strategy(strategy.spec)) == vars(strategy)
    assert (strategy.fraction, strategy.minimum, strategy.grace, strategy.tags) == (0.25, 3, 0.0, ("gpu",))
    assert strategy.codec == "int8"


@pytest.mark.parametrize(
    ("spec", "canonical", "name"),
    [
        ("allreduce", "allreduce:quorum=2", "allreduce"),
        ("allreduce:quorum=3", "allreduce:quorum=3", "allreduce"),
        ("allreduce:late=next,grace=10.0", "allreduce:quorum=2,grace=10,late=next", "allreduce"),
        ("allreduce:total=1.0", "allreduce:quorum=2,total=1", "allreduce"),
        ("allreduce:grace=auto", "allreduce:quorum=2,grace=auto", "allreduce"),
        ("gossip", "gossip:topology=random", "gossip"),
        ("gossip:topology=ring", "gossip:topology=ring", "gossip"),
        ("federated", FEDERATED, "federated"),
        (
            "federated:tags=gpu+big,fraction=.50,quorum=3,grace=4.0,late=next",
            "federated:fraction=0.5,minimum=2,available=2,quorum=3,grace=4,deadline=600,late=next,tags=big+gpu",
            "federated",
        ),
    ],
)
def test_the_canonical_form_spells_out_every_option(spec: str, canonical: str, name: str) -> None:
    strategy = parse_strategy(spec)
    assert (strategy.spec, strategy.name) == (canonical, name)
    assert parse_strategy(canonical).spec == canonical


@pytest.mark.parametrize(
    ("parse", "spec", "words"),
    [
        (parse_strategy, "gosip", ["'gosip'", "allreduce, gossip, federated", "did you mean 'gossip'?"]),
        (parse_strategy, "gossip:topology=star", ["'star'", "one of random, exponential, ring"]),
        (parse_strategy, "allreduce:qorum=3", ["'qorum'", "did you mean 'quorum'?"]),
        (parse_strategy, "allreduce:quorum=1", ["at least 2", "1"]),
        (parse_strategy, "allreduce:grace=soon", ["a decimal number such as 10, or auto", "'soon'"]),
        (parse_strategy, "allreduce:grace=1e9", ["a grace of at most 86400 s"]),
        (parse_strategy, "federated:fraction=0", ["a fraction above 0, at most 1, got 0"]),
        (parse_strategy, "federated:fraction=1.5", ["a fraction above 0, at most 1, got 1.5"]),
        (parse_strategy, "federated:minimum=0", ["at least 1 drawn peer, got 0"]),
        (parse_strategy, "federated:available=1", ["at least 2 available peers, got 1"]),
        (parse_strategy, "federated:quorum=1", ["a quorum of at least 2 contributors, got 1"]),
        (parse_strategy, "federated:grace=1e9", ["a grace of at most 86400 s"]),
        (parse_strategy, "federated:deadline=0", ["a deadline above 0 s"]),
        (parse_strategy, "federated:late=never", ["one of drop, next", "'never'"]),
        (
            parse_strategy,
            "federated:tags=" + "+".join(str(at) * 24 for at in range(8)),
            ["tags that fit into a spec of 256 characters"],
        ),
        (parse_rule, "medain", ["unknown rule 'medain'", "rules are mean, median, trimmed", "'median'?"]),
        (parse_strategy, "gossip:topology=randm", ["'randm'", "random, exponential, ring", "mean 'random'?"]),
        (parse_strategy, "gossip(topology=ring)", ["allreduce, gossip", "did you mean 'gossip'?"]),
        (parse_strategy, "gosip:" + "x" * 300, ["306", "'gosip:x", "allreduce", "did you mean 'gossip'?"]),
        (parse_strategy, None, ["NoneType", "allreduce, gossip, federated"]),
        (parse_outer, "nesterov(0.7)", ["'nesterov(0.7)'", "fedadam", "did you mean 'nesterov'?"]),
    ],
)
def test_refusals_name_what_came_and_what_is_known(
    parse: Callable[[Any], object], spec: object, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"\A.*\Z") as caught:
        parse(spec)
    assert all(word in str(caught.value) for word in words), caught.value


def test_each_strategy_has_the_machine_that_forms_its_groups() -> None:
    def made(strategy: Strategy) -> object:
        return matchmaker(strategy, Context(RUN, SPEC, "a", Needs(16), signer("a"), verify), Random(0))

    assert isinstance(made(parse_strategy("allreduce")), Matchmaking)
    assert isinstance(made(parse_strategy("gossip")), Pairing)
