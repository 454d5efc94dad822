from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.averaging.schema import SchemaError
from equipoise.peer.client.accumulate import Accumulator

LIKE = {"a": torch.zeros(2, 2), "b": torch.zeros(3, dtype=torch.bfloat16), "empty": torch.zeros(0)}

SIZES = {"a": 3, "b": 17, "c": 0, "d": 16}

values = st.floats(-1e6, 1e6, width=32)
weights = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


def gradients(value: float) -> dict[str, torch.Tensor | None]:
    return {name: torch.full_like(tensor, value) for name, tensor in LIKE.items()}


@settings(deadline=None)
@given(st.lists(st.tuples(values, weights), max_size=8))
def test_the_mean_is_the_weighted_mean(parts: list[tuple[float, float]]) -> None:
    accumulator = Accumulator(LIKE)
    for value, weight in parts:
        accumulator.add({**gradients(value), "b": None}, weight)

    total = sum(weight for _, weight in parts)
    expected = sum(value * weight for value, weight in parts) / total if total else 0.0
    scale = max((abs(value) for value, _ in parts), default=0.0)
    assert accumulator.weight == pytest.approx(total)
    # A product with a weight of 1e-3 may be less than fp32's least number, and the sum of weights divides what is lost.
    atol = 1e-5 * scale + 1e3 * torch.finfo(torch.float32).tiny
    torch.testing.assert_close(accumulator.mean()["a"], torch.full((2, 2), expected), rtol=1e-5, atol=atol)
    assert torch.equal(accumulator.mean()["b"], torch.zeros(3))


def test_sums_are_kept_in_fp32() -> None:
    accumulator = Accumulator(LIKE)
    for _ in range(1000):
        accumulator.add(gradients(1.0), 1.0)  # bf16 cannot count beyond 256

    assert torch.equal(accumulator.mean()["b"], torch.ones(3))


def test_merging_is_as_if_all_had_been_added_to_one() -> None:
    first, second = Accumulator(LIKE), Accumulator(LIKE)
    first.add(gradients(1.0), 1)
    second.add(gradients(4.0), 2)

    first.merge(second)

    assert first.weight == 3.0
    assert torch.equal(first.mean()["a"], torch.full((2, 2), 3.0))
    first.clear()
    assert first.weight == 0.0
    assert torch.equal(first.mean()["a"], torch.zeros(2, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named_and_nothing_is_added(bad: float) -> None:
    accumulator = Accumulator(LIKE)
    accumulator.add(gradients(1.0), 1)
    spoilt = gradients(2.0)
    assert spoilt["b"] is not None
    spoilt["b"][1] = bad

    with pytest.raises(SchemaError, match=rf"'b' holds {bad} at flat index 1 \(1 such"):
        accumulator.add(spoilt, 1)
    assert accumulator.weight == 1.0
    assert torch.equal(accumulator.mean()["a"], torch.ones(2, 2))


def test_a_sum_that_would_overflow_is_refused_before() -> None:
    accumulator = Accumulator(LIKE)
    accumulator.add({**gradients(0.0), "a": torch.full((2, 2), 1e38)}, 2)

    with pytest.raises(SchemaError, match="would exceed fp32"):
        accumulator.add({**gradients(0.0), "a": torch.full((2, 2), -1e38)}, 2)
    with pytest.raises(SchemaError, match="would exceed fp32"):
        accumulator.add(gradients(2.0), 3e38)
    assert torch.equal(accumulator.mean()["a"], torch.full((2, 2), 1e38))


def test_doubles_beyond_fp32_are_refused() -> None:
    accumulator = Accumulator({"a": torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(SchemaError, match="'a' holds 1e"):
        accumulator.add({"a": torch.full((1,), 1e39, dtype=torch.float64)}, 1)


def sparse(rows: list[int], values: torch.Tensor, size: int = 4) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (size, values.shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sparse_gradients_are_added_to_the_rows_they_touch(dtype: torch.dtype) -> None:
    like = {"e": torch.zeros(4, 2)}
    accumulator, dense = Accumulator(like), Accumulator(like)
    gradient = sparse([3, 1, 3], torch.tensor([[1.0, 2.0], [3.0, 4.0], [256.0, 1.0]], dtype=dtype))
    for weight in (2.0, 1.0):
        accumulator.add({"e": gradient}, weight)
        dense.add({"e": gradient.float().to_dense()}, weight)
    accumulator.add({"e": sparse([], torch.zeros(0, 2))}, 1.0)
    dense.add({"e": None}, 1.0)

    assert torch.equal(accumulator.mean()["e"], dense.mean()["e"])
    assert accumulator.weight == dense.weight


def test_a_sparse_gradient_that_is_not_finite_or_does_not_fit_is_named() -> None:
    accumulator = Accumulator({"e": torch.zeros(4, 2)})
    spoilt = torch.tensor([[1.0, math.nan]])
    with pytest.raises(SchemaError, match="'e' holds nan at flat index 5"):
        accumulator.add({"e": sparse([2], spoilt)}, 1.0)
    with pytest.raises(SchemaError, match=r"expected shape \[4, 2\], got \[5, 2\]"):
        accumulator.add({"e": sparse([2], torch.ones(1, 2), size=5)}, 1.0)
    with pytest.raises(SchemaError, match=r"dense or sparse COO, got torch\.float32, torch\.sparse_csr"):
        accumulator.add({"e": torch.ones(4, 2).to_sparse_csr()}, 1.0)
    with pytest.raises(SchemaError, match="would exceed fp32"):  # The sum of what is given for one row twice.
        accumulator.add({"e": sparse([2, 2], torch.full((2, 2), 1e38))}, 3.0)
    assert accumulator.weight == 0.0


@pytest.mark.parametrize("beginning", ["a", "nothing", "merged"])
def test_cleared_sums_do_not_come_back(beginning: str) -> None:
    accumulator, other = Accumulator(LIKE), Accumulator(LIKE)
    accumulator.add(gradients(7.0), 3)
    accumulator.clear()
    assert accumulator.weight == 0
    if beginning == "a":
        accumulator.add({**gradients(2.0), "b": None}, 2)
    elif beginning == "merged":
        other.add({**gradients(2.0), "b": None}, 2)
        accumulator.merge(other)

    expected = 0.0 if beginning == "nothing" else 2.0
    assert torch.equal(accumulator.mean()["a"], torch.full((2, 2), expected))
    assert torch.equal(accumulator.mean()["b"], torch.zeros(3))
    accumulator.merge(Accumulator(LIKE))
    accumulator.add(gradients(2.0), 2 + accumulator.weight)
    assert torch.equal(accumulator.mean()["a"], torch.full((2, 2), 2.0))


@pytest.mark.parametrize("weight", [1e39, 1e300, 1e-50, 1e-40])
def test_a_weight_that_fp32_does_not_hold_is_refused_before(weight: float) -> None:
    accumulator = Accumulator(LIKE)
    accumulator.add(gradients(0.0), 1.0)
    with pytest.raises(ValueError, match=re.escape(f"as fp32 holds, got {weight:g}")):
        accumulator.add(gradients(0.0), weight)
    assert accumulator.weight == 1.0


def test_sums_made_in_inference_mode_are_added_to_outside_of_it() -> None:
    with torch.inference_mode():
        accumulator = Accumulator(LIKE)
        accumulator.add(gradients(1.0), 1.0)
    accumulator.add(gradients(3.0), 1.0)
    assert torch.equal(accumulator.mean()["a"], torch.full((2, 2), 2.0))


def test_sums_of_a_device_lie_behind_each_other_in_one_buffer() -> None:
    like = {"here": torch.zeros(5)} | {name: torch.zeros(size, device="meta") for name, size in SIZES.items()}
    sums = Accumulator(like).sums
    assert {name: sums[name].storage_offset() for name in SIZES} == {"a": 0, "b": 16, "c": 48, "d": 48}
    assert {sums[name].untyped_storage().nbytes() for name in SIZES} == {4 * 64}
    assert {name: (one.shape, one.device) for name, one in sums.items()} == {
        name: (one.shape, one.device) for name, one in like.items()
    }
