from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.schema import Schema, SchemaError, tensors_by_name


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.tensor([7.0, 8.0], dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
    }


def test_flatten_and_unflatten_are_inverse() -> None:
    schema = Schema.of(tensors())
    flat = torch.empty(schema.size)
    schema.flatten(tensors(), flat)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 0.5]
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    schema.unflatten(flat, targets)
    for name, tensor in tensors().items():
        assert torch.equal(targets[name], tensor)


def test_flatten_reads_strided_tensors_and_unflatten_writes_them_in_place() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    schema = Schema.of({"columns": base.t()})
    flat = torch.empty(12)
    schema.flatten({"columns": base.t()}, flat)
    assert torch.equal(flat, base.t().reshape(-1))
    schema.unflatten(torch.zeros(12), {"columns": base.t()})
    assert not base.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, r"tensor 'weight': expected shape \[2, 3\], got \[3, 2\]"),
        ({"bias": torch.zeros(2)}, r"tensor 'bias': expected dtype float64, got float32"),
        ({"extra": torch.zeros(1)}, r"tensor 'extra' is not part of the run: it has 3 tensors, got 4"),
    ],
)
def test_check_names_the_tensor_that_differs(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.of(tensors()).check({**tensors(), **change})


def test_check_names_a_missing_tensor() -> None:
    partial = tensors()
    del partial["bias"]
    with pytest.raises(SchemaError, match="tensor 'bias' is missing: the run has 3 tensors, got 2"):
        Schema.of(tensors()).check(partial)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_what_fp32_cannot_hold_is_refused_by_name(value: float) -> None:
    poisoned = tensors()
    poisoned["bias"][1] = value
    with pytest.raises(SchemaError, match=r"tensor 'bias' holds .* at flat index 1: "):
        Schema.of(tensors()).flatten(poisoned, torch.empty(9))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "at least one tensor"),
        ({"n": torch.tensor(3)}, "tensor 'n': expected dtype .*, got int64; leave it out"),
        ({"": torch.zeros(1)}, "a tensor name of 1 to"),
        ({"x": [1.0]}, "tensor 'x': expected a torch.Tensor, got list"),
        ({"x": torch.zeros(3).to_sparse()}, "tensor 'x': expected a dense tensor"),
    ],
)
def test_what_cannot_be_averaged_is_refused(bad: dict, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.of(bad)


def test_a_list_is_named_by_its_indices() -> None:
    assert list(tensors_by_name([torch.zeros(1), torch.ones(1)])) == ["0", "1"]


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6))
def test_slices_cover_the_vector_in_order(shapes: list[list[int]]) -> None:
    schema = Schema.of({str(i): torch.zeros(shape) for i, shape in enumerate(shapes)})
    ends = [where.stop for _, where in schema.slices()]
    starts = [where.start for _, where in schema.slices()]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == schema.size
