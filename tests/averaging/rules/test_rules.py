"""Rules against slow references, and that every owner gets the same bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from equipoise.averaging.rules import CHUNK_VALUES, RuleError, _comparisons, parse_rule
from oracles.federated import RULES

rules = pytest.mark.parametrize("spec", ["mean", "median", "trimmed", "trimmed:beta=0.45", "trimmed:beta=0"])


def contributions(count: int, size: int = 257, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values of many magnitudes, with ties, zeros of both signs, and a peer whose values are broken."""
    chance = torch.Generator().manual_seed(count)
    rows = torch.randn(count, size, generator=chance, dtype=dtype) * 10 ** torch.linspace(
        -3, 3, size, dtype=dtype
    )
    rows[:, ::7] = rows[:, ::7].round()
    rows[count // 2, 1::11] = -0.0
    rows[-1] *= 1e6
    return rows


def weights_of(count: int) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64) ** 2


def test_the_canonical_form_spells_out_every_option() -> None:
    specs = ["mean", "median", "trimmed", "trimmed:beta=.10", "trimmed:beta=0"]
    assert [parse_rule(spec).spec for spec in specs] == [
        "mean",
        "median",
        "trimmed:beta=0.2",
        "trimmed:beta=0.1",
        "trimmed:beta=0",
    ]


@rules
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 9, 11, 20])
def test_a_rule_is_its_reference(spec: str, count: int) -> None:
    rows, weights = contributions(count), weights_of(count)
    values, scores = parse_rule(spec).reduce(rows, weights)
    name, _, beta = spec.partition(":beta=")
    for at, column in enumerate(rows.T.tolist()):
        expected = RULES[name](column, weights.tolist(), *([float(beta)] if beta else []))
        assert math.isclose(float(values[at]), expected, rel_tol=1e-12, abs_tol=1e-12)
    assert values.dtype == torch.float64
    assert scores.dtype == torch.float64
    assert scores.shape == (count,)
    assert bool((scores >= 0).all())
    assert math.isclose(float(scores.sum()), 1, rel_tol=1e-12)


@rules
def test_float32_stays_float32_and_the_rows_are_not_changed(spec: str) -> None:
    rows = contributions(7, dtype=torch.float32)
    before = rows.clone()
    values = parse_rule(spec).reduce(rows, weights_of(7)).values
    assert values.dtype == torch.float32
    assert torch.equal(rows, before)
    exact = parse_rule(spec).reduce(rows.double(), weights_of(7)).values
    torch.testing.assert_close(values.double(), exact, rtol=2e-6, atol=1e-6)


@rules
def test_every_owner_gets_the_same_bytes_whatever_its_share_and_its_threads(spec: str) -> None:
    rule, rows, weights = (
        parse_rule(spec),
        contributions(9, 2 * CHUNK_VALUES + 12_345, torch.float32),
        weights_of(9),
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = rule.reduce(rows, weights).values
        torch.set_num_threads(4)
        assert bits(rule.reduce(rows, weights).values) == bits(alone)
    finally:
        torch.set_num_threads(threads)
    for start, stop in ((0, 1), (1, 1000), (CHUNK_VALUES - 3, 2 * CHUNK_VALUES)):
        assert bits(rule.reduce(rows[:, start:stop], weights).values) == bits(alone[start:stop])


@pytest.mark.parametrize("spec", ["median", "trimmed"])
def test_the_order_of_the_members_and_their_weights_change_no_bit(spec: str) -> None:
    rule, rows = parse_rule(spec), contributions(8, dtype=torch.float32)
    expected = bits(rule.reduce(rows, weights_of(8)).values)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [4, 5, 6, 7, 0, 1, 2, 3]):
        assert bits(rule.reduce(rows[order], torch.ones(8, dtype=torch.float64)).values) == expected


@pytest.mark.parametrize("zeros", list(itertools.product([0.0, -0.0], repeat=3)))
def test_a_zero_is_positive_whichever_came(zeros: Sequence[float]) -> None:
    rows = torch.tensor(zeros)[:, None]
    for spec in ("median", "trimmed", "trimmed:beta=0.4"):
        for count in (1, 2, 3):
            values = parse_rule(spec).reduce(rows[:count], torch.ones(count, dtype=torch.float64)).values
            assert math.copysign(1, float(values[0])) == 1


def test_a_broken_contribution_counts_nothing_beside_four_whole_ones() -> None:
    rows = torch.tensor([[1.0, 2.0], [2.0, 3.0], [1e30, -1e30], [3.0, 4.0], [4.0, 5.0]])
    weights = torch.tensor([1.0, 1.0, 1e9, 1.0, 1.0], dtype=torch.float64)
    assert parse_rule("median").reduce(rows, weights).values.tolist() == [3.0, 3.0]
    values, scores = parse_rule("trimmed").reduce(rows, weights)
    assert values.tolist() == [3.0, 3.0]
    assert float(scores[2]) == 0
    assert float(parse_rule("mean").reduce(rows, weights).values[0]) > 1e29


def test_nan_is_not_hidden() -> None:
    rows = torch.tensor([[1.0, 1.0], [torch.nan, 2.0], [3.0, 3.0]])
    for spec in ("mean", "median", "trimmed:beta=0.4"):
        values = parse_rule(spec).reduce(rows, torch.ones(3, dtype=torch.float64)).values
        assert values.isnan().tolist() == [True, False]


@rules
def test_nothing_to_combine_is_an_error_of_one_line(spec: str) -> None:
    with pytest.raises(RuleError, match=rf"\Athe rule {spec}.* needs at least 1 contributions, got 0\Z"):
        parse_rule(spec).reduce(torch.empty(0, 3), torch.empty(0, dtype=torch.float64))


@rules
def test_a_share_may_be_empty(spec: str) -> None:
    values, scores = parse_rule(spec).reduce(torch.empty(4, 0), torch.ones(4, dtype=torch.float64))
    assert values.shape == (0,)
    assert scores.tolist() == [0.25] * 4


@pytest.mark.parametrize("beta", ["0.5", "1", "600"])
def test_a_rule_that_drops_half_at_each_end_has_nothing_left(beta: str) -> None:
    with pytest.raises(ValueError, match=r"\Atrimmed: expected beta from 0 to below 0\.5, got .*\Z"):
        parse_rule(f"trimmed:beta={beta}")


@pytest.mark.parametrize("count", range(1, 13))
def test_the_network_sorts_all_zeros_and_ones_and_so_everything(count: int) -> None:
    """The zero-one principle (Knuth, volume 3, section 5.3.4, theorem Z)."""
    lanes = torch.tensor(list(itertools.product([0, 1], repeat=count))).T.clone()
    for low, high in _comparisons(count):
        assert low < high < count
        lanes[low], lanes[high] = (
            torch.minimum(lanes[low], lanes[high]),
            torch.maximum(lanes[low], lanes[high]),
        )
    assert bool((lanes[1:] >= lanes[:-1]).all())


@pytest.mark.parametrize("count", [13, 31, 33, 64])
def test_the_network_of_large_groups_sorts(count: int) -> None:
    rows = torch.randn(count, 500, generator=torch.Generator().manual_seed(count))
    middle = parse_rule("median").reduce(rows, torch.ones(count, dtype=torch.float64)).values
    ranked = rows.sort(dim=0).values
    assert torch.equal(middle, (ranked[(count - 1) // 2] + ranked[count // 2]) / 2)


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()
