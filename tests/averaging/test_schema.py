from __future__ import annotations

import pytest
import torch

from equipoise.averaging.schema import Schema, SchemaError, tensors_by_name


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.tensor([7.0, 8.0], dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
    }


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


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "at least one tensor"),
        (
            {"n": torch.tensor(3)},
            "tensor 'n': expected dtype .*, got int64; join with a mapping that leaves it out",
        ),
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
