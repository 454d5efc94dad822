"""The schema of a run: names, shapes and dtypes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import torch

MAX_TENSORS = 100_000
"""Far above any model of today; bounds what a hostile schema can make us allocate."""

MAX_NAME_CHARS = 512
"""Module paths of deep models reach about 150 characters."""

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What can be averaged: floating-point tensors, exchanged through fp32."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SchemaError(ValueError):
    """Tensors do not fit the schema; the message names the tensor, what was expected and what came."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a schema.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: As torch names it (`float32`).
        buffer: Whether it is a module's buffer, which travels in fp32: a statistic moves by small steps, and a coarse
            codec rounds them away every time.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: bool = False

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class Schema(msgspec.Struct, frozen=True):
    """The tensors of a run; `layout` says where they lie in the flat vector."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], buffers: Collection[str] = ()) -> Schema:
        """Describe named tensors, in the order given; those named in `buffers` are a module's buffers.

        Raises:
            SchemaError: There are none, or too many, or one is not a dense floating-point tensor.
        """
        if not tensors:
            raise SchemaError("expected at least one tensor to average, got none")
        if len(tensors) > MAX_TENSORS:
            raise SchemaError(f"expected at most {MAX_TENSORS} tensors, got {len(tensors)}")
        return cls(tuple(_describe(name, tensor, name in buffers) for name, tensor in tensors.items()))

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(spec.size for spec in self.tensors)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse tensors that differ from this schema in name, count, shape or dtype.

        Raises:
            SchemaError: Naming the first tensor that differs.
        """
        for spec in self.tensors:
            if spec.name not in tensors:
                raise SchemaError(
                    f"tensor {spec.name!r} is missing: the run has {len(self.tensors)} tensors, got {len(tensors)}"
                )
            tensor = tensors[spec.name]
            if tuple(tensor.shape) != spec.shape:
                raise SchemaError(
                    f"tensor {spec.name!r}: expected shape {list(spec.shape)}, got {list(tensor.shape)}"
                )
            if _DTYPE_NAMES.get(tensor.dtype) != spec.dtype:
                raise SchemaError(
                    f"tensor {spec.name!r}: expected dtype {spec.dtype}, got {_short(tensor.dtype)}"
                )
        if len(tensors) > len(self.tensors):
            known = {spec.name for spec in self.tensors}
            extra = next(name for name in tensors if name not in known)
            raise SchemaError(
                f"tensor {extra!r} is not part of the run: it has {len(self.tensors)} tensors, got {len(tensors)}"
            )


def tensors_by_name(tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mapping as it is, or a sequence named by its indices `0`, `1`, ..."""
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _describe(name: str, tensor: torch.Tensor, buffer: bool) -> TensorSpec:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise SchemaError(
            f"expected a tensor name of 1 to {MAX_NAME_CHARS} characters, got {str(name)[:64]!r}"
        )
    if not isinstance(tensor, torch.Tensor):
        raise SchemaError(f"tensor {name!r}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise SchemaError(f"tensor {name!r}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in _DTYPE_NAMES:
        raise SchemaError(
            f"tensor {name!r}: expected dtype {' or '.join(DTYPES)}, got {_short(tensor.dtype)}; leave it out"
        )
    return TensorSpec(name, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype], buffer)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
