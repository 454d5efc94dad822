"""The names that programs outside of this repository build on: specs, and their interfaces."""

from __future__ import annotations

import pytest
import torch

from equipoise.averaging.gossip.topology import partners
from equipoise.averaging.rules import parse_rule
from equipoise.averaging.strategy import parse_strategy


@pytest.mark.parametrize(
    ("parse", "spec", "canonical"),
    [
        (parse_strategy, "allreduce", "allreduce:quorum=2"),
        (parse_strategy, "gossip", "gossip:topology=random"),
        (parse_rule, "mean", "mean"),
    ],
)
def test_specs_are_parsed_and_canonical(parse, spec: str, canonical: str) -> None:
    assert parse(spec).spec == parse(canonical).spec == canonical
    assert parse(spec).name == spec
    with pytest.raises(ValueError, match="no-such-thing"):
        parse("no-such-thing")


def test_a_rule_returns_values_and_scores() -> None:
    reduced = parse_rule("mean").reduce(
        torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([1.0, 3.0]).double()
    )
    assert reduced.values.tolist() == [2.5, 5.0]
    assert reduced.scores.tolist() == [0.25, 0.75]


def test_a_topology_names_partners() -> None:
    assert set(partners("ring", "abcd", "a")) == {"b", "d"}
