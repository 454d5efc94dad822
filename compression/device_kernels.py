"""Kernels for tensors where they are, on a GPU: what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from equipoise.compression.late_torch import torch

Kind: TypeAlias = "int | torch.dtype"
"""The format of a payload: the block of int8, or the dtype of plain floating-point values."""


@dataclass(frozen=True, slots=True)
class TensorKernels:
    """Kernels that are launched on the current stream of the device of their tensors, and return before they end.

    All tensors are contiguous and on one device, and no payload overlaps `mean`. values, out: f32 [n >= 1];
    payload, mean: uint8, as large as n values of the kind. Notes are int32, one for each piece of the vector: how many
    values the encoding clamped, or -1 where a value, or a sum, is not finite; then the content of the rest is
    undefined. `clamped` waits for them.

    Attributes:
        encode: `(values, payload, kind)`: fill `payload`, return notes.
        decode: `(payload, out, kind)`: fill `out`.
        reduce: `(payloads, weights, mean, n, kind)`: add up payloads in turn, each times its weight in f32, and encode
            the sum into `mean`, in one pass; return notes.
    """

    encode: Callable[[torch.Tensor, torch.Tensor, Kind], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor, Kind], None]
    reduce: Callable[[Sequence[torch.Tensor], Sequence[float], torch.Tensor, int, Kind], torch.Tensor]


def clamped(notes: torch.Tensor) -> int | None:
    """Wait for a kernel's notes; return how many values it clamped, or None where one is not finite."""
    seen = notes.cpu()
    return None if int(seen.amin()) < 0 else int(seen.sum())
