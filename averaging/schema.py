"""The schema of a run: names, shapes and dtypes of its tensors, seen as one flat fp32 vector `[D]`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch

from equipoise.compression import first_non_finite

MAX_TENSORS = 100_000
"""Far above any model of today; bounds what a hostile schema can make us allocate."""

CHECKED_VALUES = 512 * 1024
"""Values looked at together for being finite: few enough to be in the cache still, many enough for small tensors."""

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
    """One tensor of a schema: its name, shape, and dtype as torch names it (`float32`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class Schema(msgspec.Struct, frozen=True):
    """The tensors of a run in their order in the flat vector."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Schema:
        """Describe named tensors, in the order given.

        Raises:
            SchemaError: There are none, or too many, or one is not a dense floating-point tensor.
        """
        if not tensors:
            raise SchemaError("expected at least one tensor to average, got none")
        if len(tensors) > MAX_TENSORS:
            raise SchemaError(f"expected at most {MAX_TENSORS} tensors, got {len(tensors)}")
        return cls(tuple(_describe(name, tensor) for name, tensor in tensors.items()))

    @property
    def size(self) -> int:
        """D, the number of values of the flat vector."""
        return sum(spec.size for spec in self.tensors)

    def slices(self) -> Iterator[tuple[TensorSpec, slice]]:
        """Each tensor with its slice of the flat vector."""
        start = 0
        for spec in self.tensors:
            yield spec, slice(start, start + spec.size)
            start += spec.size

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

    def flatten(self, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Copy checked tensors, converted to fp32, into the flat vector `out`, f32 [D].

        Raises:
            SchemaError: A tensor holds NaN or Inf (also one that overflows fp32); `out` is then undefined.
        """
        checked = 0
        for spec, where in self.slices():
            flat = tensors[spec.name].detach().reshape(-1)
            # Checked while it is in the cache, a piece or several tensors at a time.
            for start in range(0, spec.size, CHECKED_VALUES):
                stop = min(start + CHECKED_VALUES, spec.size)
                out[where.start + start : where.start + stop].copy_(flat[start:stop])
                if where.start + stop - checked >= CHECKED_VALUES:
                    self._require_finite(out, checked, where.start + stop)
                    checked = where.start + stop
        self._require_finite(out, checked, self.size)

    def unflatten(self, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the flat vector, f32 [D], into checked tensors in place."""
        with torch.no_grad():
            for spec, where in self.slices():
                tensors[spec.name].copy_(flat[where].view(spec.shape))

    def locate(self, index: int) -> tuple[str, int]:
        """The tensor that holds value `index` of the flat vector, and the value's place in that tensor."""
        return next((spec.name, index - where.start) for spec, where in self.slices() if index < where.stop)

    def _require_finite(self, flat: torch.Tensor, start: int, stop: int) -> None:
        bad = first_non_finite(flat[start:stop])
        if bad is not None:
            name, at = self.locate(start + bad)
            raise SchemaError(
                f"tensor {name!r} holds {float(flat[start + bad])} at flat index {at}: "
                f"expected finite values within fp32's range"
            )


def tensors_by_name(tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mapping as it is, or a sequence named by its indices `0`, `1`, ..."""
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def _describe(name: str, tensor: torch.Tensor) -> TensorSpec:
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
    return TensorSpec(name, tuple(tensor.shape), _DTYPE_NAMES[tensor.dtype])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
