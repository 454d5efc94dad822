"""RunSpecs that differ in what a test is about."""

from __future__ import annotations

from typing import Any

from equipoise.averaging.options import RunOptions
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.averaging.spec import RunSpec

TENSORS = {"a": (2,), "b": (3, 4), "c": (5,)}


def spec(
    tensors: dict[str, tuple[int, ...]] | None = None, terms: dict[str, str] | None = None, **options: Any
) -> RunSpec:
    shapes = TENSORS if tensors is None else tensors
    schema = Schema(tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items()))
    return RunSpec.create("run", schema, RunOptions(**{"codec": "fp32", **options}), terms)
