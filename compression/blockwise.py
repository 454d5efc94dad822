"""The arithmetic of the int8 codec: its definition for all kernels, and torch operations that do it on every device.

A block of values x with a = max |x| is stored as a scale and one code per value:

    scale   = 0                               if a < MIN_ABSMAX
            = min(f32(a / 127), MAX_SCALE)    otherwise
    inverse = 0                               if a < MIN_ABSMAX
            = f32(127 / a)                    otherwise
    code    = round_half_even(f32(x * inverse))         in [-127, 127]
    decoded = f32(f32(code) * scale)

Every operation is one IEEE-754 single-precision operation: a true division (no multiplication by a reciprocal), no
fused multiply-add. All intermediate results that matter are normal numbers, so that hardware which flushes
subnormal numbers to zero computes the same bytes.

The error of a value is at most half a step, a / 254, and a few units in the last place of a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.chunks import CHUNK_VALUES, F32_MAX, scratch
from equipoise.compression.late_torch import torch

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]

LEVELS = 127.0
"""Greatest code. -128 is never written, so that the codes are symmetric."""

MIN_ABSMAX = 2.0**-116
"""Least absmax of a block that is not stored as zeros (1.2e-35). From here on the scale is a normal number, with room
to spare, and 127 / absmax is finite."""

MAX_SCALE = float.fromhex("0x1.020406p+121")
"""Greatest scale (2.7e36) whose 127-fold is finite in f32: one step below f32(f32_max / 127)."""

MIN_SCALE = 2.0**-123
"""Bound below every scale but 0 that an encoder writes; the least, f32(MIN_ABSMAX / 127), is a little more."""

SCALE_BYTES = 4
"""Length of a scale, an f32."""


def payload_size(count: int, block: int) -> int:
    """Return the bytes of `count` encoded values."""
    return -(-count // block) * SCALE_BYTES + count


def planes(payload: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, f32 [ceil(count / block)], and codes, int8 [count], of a payload; its memory, not copies."""
    split = -(-count // block) * SCALE_BYTES
    return payload[:split].view(torch.float32), payload[split:].view(torch.int8)


@dataclass(frozen=True, slots=True)
class ArrayKernels:
    """Compiled kernels for arrays on a CPU, which write the same bytes: they do all that a part needs in one call.

    A wrong size or alignment, a value that is not finite, or a payload that no encoder wrote makes them return False,
    with all content undefined; numpy's or torch's operations then find out which it was. values, out, scratch: f32 [n];
    payload: uint8; weights: f64 [m].

    Attributes:
        encode: `(values, payload, block)`: fill `payload`.
        decode: `(payload, out, block)`: fill `out`, if an encoder could have written `payload`.
        sound: `(payload, n, block)`: whether an encoder could have written it.
        reduce: `(addresses, weights, payload, scratch, block)`: add up payloads in turn, each times its weight in f32,
            and encode the sum into `payload`. addresses, int64 [m >= 1]: where the payloads begin, each as large as
            `payload`, kept alive by the caller.
        address: `(payload)`: where it begins.
        widen: By format, fp16 and bf16, `(words, bits)`: decode words, u16 [n], to the bits of f32 values, u32 [n].
        narrow: By format, `(bits, words, limit)`: encode, and return the number of values that were clamped to the
            limit, bits of an f32; -1 if one is not finite.
    """

    encode: Callable[[Values, Bytes, int], bool]
    decode: Callable[[Bytes, Values, int], bool]
    sound: Callable[[Bytes, int, int], bool]
    reduce: Callable[[NDArray[np.int64], NDArray[np.float64], Bytes, Values, int], bool]
    address: Callable[[Bytes], int]
    widen: Mapping[str, Callable[[NDArray[np.uint16], NDArray[np.uint32]], None]]
    narrow: Mapping[str, Callable[[NDArray[np.uint32], NDArray[np.uint16], np.uint32], int]]


def quantise(values: torch.Tensor, payload: torch.Tensor, block: int) -> bool:
    """Encode `values` into `payload`; return False, with its content undefined, if a value is not finite.

    Tensors here are contiguous and on one device. values, out, into: f32 [n]; block: a power of two; payload: uint8
    [`payload_size(n, block)`], aligned to `SCALE_BYTES`, planar: f32 scales of the b = ceil(n / block) blocks, of which
    the last may be short, then int8 codes [n].
    """
    scales, codes = planes(payload, values.numel(), block)
    absmax = torch.empty_like(scales)
    # Divided by and into tensors of the device: CUDA turns division by a scalar into multiplication by its
    # reciprocal, and so does torch everywhere with scalar / tensor.
    levels = torch.full((), LEVELS, device=values.device)
    for rows, row_codes, row_absmax in _pieces(values, codes, absmax, block):
        torch.amax(rows, 1, keepdim=True, out=row_absmax)
        torch.maximum(row_absmax, torch.amin(rows, 1, keepdim=True).neg_(), out=row_absmax)
        inverse = torch.div(levels, row_absmax).masked_fill_(row_absmax < MIN_ABSMAX, 0.0)
        work = scratch(rows.numel(), rows.device).view(rows.shape)
        row_codes.copy_(torch.mul(rows, inverse, out=work).round_())
    torch.div(absmax, levels, out=scales).clamp_(max=MAX_SCALE).masked_fill_(absmax < MIN_ABSMAX, 0.0)
    # amax and amin carry NaN along, and NaN compares false.
    return bool((absmax <= F32_MAX).all())


def dequantise(payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
    """Decode `payload` into `out`."""
    scales, codes = planes(payload, out.numel(), block)
    for rows, row_codes, row_scales in _pieces(out, codes, scales, block):
        rows.copy_(row_codes).mul_(row_scales)


def accumulate(payload: torch.Tensor, weight: float, into: torch.Tensor, block: int) -> None:
    """Add f32(f32(weight) * decoded) to `into`."""
    scales, codes = planes(payload, into.numel(), block)
    for rows, row_codes, row_scales in _pieces(into, codes, scales, block):
        decoded = scratch(rows.numel(), rows.device).view(rows.shape)
        # add_(..., alpha=weight) would fuse the multiplication on CPUs that can.
        rows.add_(decoded.copy_(row_codes).mul_(row_scales).mul_(weight))


def _pieces(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield views (values [r, block], codes [r, block], scales [r, 1]); last, by itself, a short block."""
    blocks = values.numel() // block
    whole = blocks * block
    if blocks:
        # Splitting makes all the views in one call each; slices in the loop would cost a fifth of the time.
        step = CHUNK_VALUES // block if values.device.type == "cpu" else blocks
        yield from zip(
            torch.split(values[:whole].view(blocks, block), step),
            torch.split(codes[:whole].view(blocks, block), step),
            torch.split(scales[:blocks].view(blocks, 1), step),
            strict=True,
        )
    if whole < values.numel():
        yield values[whole:].view(1, -1), codes[whole:].view(1, -1), scales[blocks:].view(1, 1)
