"""The schema of a run: names, shapes and dtypes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import msgspec

if TYPE_CHECKING:
    import torch

MAX_TENSORS = 100_000
"""Most tensors of a schema, far above any model of today: it bounds the memory that a hostile schema costs a peer."""

MAX_NAME_CHARS = 512
"""Longest name of a tensor; module paths of deep models reach about 150 characters."""

MAX_DIMENSIONS = 64
"""Most dimensions of a tensor, as in torch itself."""

Dtype = Literal["float64", "float32", "float16", "bfloat16"]
"""The dtypes that can be averaged: floating point, exchanged through fp32."""


class SchemaError(ValueError):
    """Tensors do not fit the schema; the message names the tensor, what was expected and what came."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a schema. The types bound what another process may send.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype, in torch's name (`float32`).
        buffer: Whether it is a module's buffer, which travels in fp32: a statistic moves by small steps, which a coarse
            codec would round away every time.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    dtype: Dtype
    buffer: bool = False

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class Schema(msgspec.Struct, frozen=True):
    """The tensors of a run; `layout` places them in the flat vector.

    Raises:
        SchemaError: Two tensors have the same name. (A message that holds such a schema does not decode.)
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    def __post_init__(self) -> None:
        if len({spec.name for spec in self.tensors}) < len(self.tensors):
            raise SchemaError(f"expected {len(self.tensors)} tensors of different names")

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], buffers: Collection[str] = ()) -> Schema:
        """Describe named tensors, in the order given; those named in `buffers` are a module's buffers.

        Raises:
            SchemaError: There is no tensor, there are too many, or one is not a dense floating-point tensor.
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
        count = f"{len(self.tensors)} tensors, got {len(tensors)}"
        for spec in self.tensors:
            if spec.name not in tensors:
                raise SchemaError(f"tensor {spec.name!r} is missing: the run has {count}")
            shape, dtype = tuple(tensors[spec.name].shape), _name(tensors[spec.name].dtype)
            if shape != spec.shape:
                raise SchemaError(
                    f"tensor {spec.name!r}: expected shape {list(spec.shape)}, got {list(shape)}"
                )
            if dtype != spec.dtype:
                raise SchemaError(f"tensor {spec.name!r}: expected dtype {spec.dtype}, got {dtype}")
        if len(tensors) > len(self.tensors):
            known = {spec.name for spec in self.tensors}
            extra = next(name for name in tensors if name not in known)
            raise SchemaError(f"tensor {extra!r} is not part of the run: it has {count}")


def tensors_by_name(tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mapping as it is, or a sequence named by its indices `0`, `1`, ..."""
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _describe(name: str, tensor: torch.Tensor, buffer: bool) -> TensorSpec:
    import torch  # Imported here, because processes without torch use schemas too.

    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise SchemaError(
            f"expected a tensor name of 1 to {MAX_NAME_CHARS} characters, got {str(name)[:64]!r}"
        )
    if not isinstance(tensor, torch.Tensor):
        hint = "; torch.from_numpy makes one" if hasattr(tensor, "__array__") else ""
        raise SchemaError(f"tensor {name!r}: expected a torch.Tensor, got {type(tensor).__name__}{hint}")
    if tensor.layout is not torch.strided:
        raise SchemaError(f"tensor {name!r}: expected a dense tensor, got layout {tensor.layout}")
    dtype = _name(tensor.dtype)
    if dtype not in get_args(Dtype):
        told = f"tensor {name!r}: expected dtype {' or '.join(get_args(Dtype))}, got {dtype}"
        raise SchemaError(f"{told}; join with a mapping that leaves it out")
    return TensorSpec(name, tuple(tensor.shape), cast(Dtype, dtype), buffer)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
