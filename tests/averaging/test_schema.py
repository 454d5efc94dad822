from __future__ import annotations

import pytest
import torch

from equipoise.averaging.schema import Schema, SchemaError, tensors_by_name


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "at least one tensor"),
        (
            {"n": torch.tensor(3)},
            "tensor 'n': expected dtype .*, got int64; join with a mapping that leaves it out",
        ),
        ({"": torch.zeros(1)}, "a tensor name of 1 to"),
        ({"x": [1.0]}, "tensor 'x': expected a torch.Tensor, got list$"),
        ({"x": torch.zeros(3).numpy()}, "expected a torch.Tensor, got ndarray; torch.from_numpy makes one"),
        ({"x": torch.zeros(3).to_sparse()}, "tensor 'x': expected a dense tensor"),
    ],
)
def test_tensors_that_cannot_be_averaged_are_refused(bad: dict, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.of(bad)


def test_a_list_is_named_by_its_indices() -> None:
    assert list(tensors_by_name([torch.zeros(1), torch.ones(1)])) == ["0", "1"]
