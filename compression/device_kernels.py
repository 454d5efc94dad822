"""Kernels for tensors where they are, on a GPU: what they do, and whether their bytes are those of torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from equipoise.compression import blockwise
from equipoise.compression.late_torch import torch

Kind: TypeAlias = "int | torch.dtype"
"""The format of a payload: the block of int8, or the dtype of plain floating-point values."""

_PROBE_WEIGHTS = (0.3, 1 / 3, 0.2, 0.7)


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


def agree(kernels: TensorKernels, device: torch.device) -> bool:
    """Compare bytes with torch's on a CPU; a fused operation, another order or way to round changes some of them."""
    count = 64 * 128 + 5
    exponents = torch.arange(count, dtype=torch.float32).div_(128).floor_().mul_(4).sub_(140)
    # Of many magnitudes; of one, so that all count in a sum; half-way between two of bf16.
    values = torch.linspace(-1.9, 1.7, count).mul_(torch.exp2(exponents.clamp_(max=127)))
    even = torch.linspace(-1.9, 1.7, count)
    ties = (
        torch.arange(0x3F80, 0x3F80 + count, dtype=torch.int32)
        .mul_(1 << 16)
        .add_(1 << 15)
        .view(torch.float32)
    )
    rows = [values, even, even.roll(3).neg_(), ties]
    kinds: tuple[Kind, ...] = (32, 128, torch.float16, torch.bfloat16, torch.float32)
    return all(_agree(kernels, kind, rows, device) for kind in kinds)


def _agree(kernels: TensorKernels, kind: Kind, rows: list[torch.Tensor], device: torch.device) -> bool:
    expected = [_encoded(row, kind) for row in rows]
    payloads = [torch.zeros_like(payload, device=device) for payload in expected]
    total, out = torch.zeros_like(rows[0]), torch.zeros_like(rows[0], device=device)
    for row, payload, theirs, weight in zip(rows, payloads, expected, _PROBE_WEIGHTS, strict=True):
        decoded = _decoded(theirs, row, kind)
        notes = kernels.encode(row.to(device), payload, kind)
        kernels.decode(payload, out, kind)
        if clamped(notes) is None or not (_same(payload, theirs) and _same(out, decoded)):
            return False
        total += decoded * torch.tensor(weight)
    mean, found = _encoded(total, kind), torch.zeros_like(payloads[0])
    notes = kernels.reduce(payloads, _PROBE_WEIGHTS, found, total.numel(), kind)
    return clamped(notes) is not None and _same(found, mean)


def _encoded(values: torch.Tensor, kind: Kind) -> torch.Tensor:
    if isinstance(kind, torch.dtype):
        limit = torch.finfo(kind).max
        return values.clamp(-limit, limit).to(kind).view(torch.uint8)
    payload = torch.empty(blockwise.payload_size(values.numel(), kind), dtype=torch.uint8)
    blockwise.quantise(values, payload, kind)
    return payload


def _decoded(payload: torch.Tensor, like: torch.Tensor, kind: Kind) -> torch.Tensor:
    out = torch.empty_like(like)
    if isinstance(kind, torch.dtype):
        return out.copy_(payload.view(kind))
    blockwise.dequantise(payload, out, kind)
    return out


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
