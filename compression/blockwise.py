"""What the int8 codec computes, defined once for all of its kernels.

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

from collections.abc import Sequence
from typing import Protocol

import torch

LEVELS = 127.0
"""Greatest code. -128 is never written, so that the codes are symmetric."""

MIN_ABSMAX = 2.0**-116
"""Blocks that stay below are stored as zeros (1.2e-35). From here on the scale is a normal number, with room to
spare, and 127 / absmax is finite."""

MAX_SCALE = float.fromhex("0x1.020406p+121")
"""Greatest scale (2.7e36) whose 127-fold is finite in f32: one step below f32(f32_max / 127)."""

MIN_SCALE = 2.0**-123
"""Below f32(MIN_ABSMAX / 127); a payload with a scale between 0 and this was not written by an encoder."""


SCALE_BYTES = 4
"""Scales are f32."""


def payload_size(count: int, block: int) -> int:
    """Return the bytes of `count` encoded values."""
    return -(-count // block) * SCALE_BYTES + count


def planes(payload: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, f32 [ceil(count / block)], and codes, int8 [count], of a payload; its memory, not copies."""
    split = -(-count // block) * SCALE_BYTES
    return payload[:split].view(torch.float32), payload[split:].view(torch.int8)


class Kernels(Protocol):
    """The arithmetic above; implementations differ in speed and never in a byte.

    All tensors are contiguous and on one device. values, out, into: f32 [n]; block: a power of two; payload:
    uint8 [`payload_size(n, block)`], aligned to `SCALE_BYTES`, planar: f32 scales of the b = ceil(n / block) blocks, of
    which the last may be short, then int8 codes [n].
    """

    @property
    def name(self) -> str:
        """What EQUIPOISE_KERNELS calls it."""

    def quantise(self, values: torch.Tensor, payload: torch.Tensor, block: int) -> bool:
        """Fill `payload`; False, with its content undefined, if a value is not finite."""

    def dequantise(self, payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
        """Fill `out` with the decoded values."""

    def accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor, block: int) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""

    def reduce(
        self,
        stack: torch.Tensor,
        stride: int,
        weights: Sequence[float],
        payload: torch.Tensor,
        out: torch.Tensor,
        block: int,
    ) -> bool:
        """Accumulate payloads in turn into zeros, quantise the sum, dequantise that into `out`.

        Args:
            stack: uint8 [len(weights) * stride]: payload i begins at i * stride, a multiple of 4.
            stride: Bytes from one payload to the next.
            weights: One per payload; payloads of weight 0 are not looked at.
            payload: Of the sum.
            out: The sum as decoded from it.
            block: Values per block.

        Returns:
            False, with all content undefined, if a value of the sum is not finite.
        """

    def sound(self, payload: torch.Tensor, count: int, block: int) -> bool:
        """Whether an encoder could have written this: no scale but 0 or MIN_SCALE to MAX_SCALE, no code -128."""
