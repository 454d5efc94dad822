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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]

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

OWN_ADDRESS = 0
"""Where no payload is: in its stead, to `ArrayKernels.reduce`, stand values that have not been encoded."""


def payload_size(count: int, block: int) -> int:
    """Return the bytes of `count` encoded values."""
    return -(-count // block) * SCALE_BYTES + count


def planes(payload: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, f32 [ceil(count / block)], and codes, int8 [count], of a payload; its memory, not copies."""
    split = -(-count // block) * SCALE_BYTES
    return payload[:split].view(torch.float32), payload[split:].view(torch.int8)


@dataclass(frozen=True, slots=True)
class ArrayKernels:
    """The same for arrays on a CPU, checks and all in one call: what a part takes on its way through a round.

    Whatever is not as it should be (a size, an alignment, a value that is not finite, a payload that no encoder wrote)
    makes them return False, with all content undefined; to say what it was is for others. values, out, own: f32 [n];
    payload: uint8; weights: f64 [m].

    Attributes:
        encode: `(values, payload, block)`: fill `payload`.
        decode: `(payload, out, block)`: fill `out`, if an encoder could have written `payload`.
        sound: `(payload, n, block)`: whether an encoder could have written it.
        reduce: `(addresses, weights, own, payload, out, block)`: add up payloads in turn, each times its weight in f32,
            encode the sum into `payload`, and decode that into `out`. addresses, int64 [m]: where the payloads begin,
            each as large as `payload`, kept alive by the caller; OWN_ADDRESS for `own` (empty if there is none) as it
            would come back from its encoding. What has weight 0 is not looked at.
        address: `(payload)`: where it begins.
    """

    encode: Callable[[Values, Bytes, int], bool]
    decode: Callable[[Bytes, Values, int], bool]
    sound: Callable[[Bytes, int, int], bool]
    reduce: Callable[[NDArray[np.int64], NDArray[np.float64], Values, Bytes, Values, int], bool]
    address: Callable[[Bytes], int]


class Kernels(Protocol):
    """The arithmetic above; implementations differ in speed and never in a byte.

    All tensors are contiguous and on one device. values, out, into: f32 [n]; block: a power of two; payload:
    uint8 [`payload_size(n, block)`], aligned to `SCALE_BYTES`, planar: f32 scales of the b = ceil(n / block) blocks, of
    which the last may be short, then int8 codes [n].
    """

    @property
    def name(self) -> str:
        """What EQUIPOISE_KERNELS calls it."""

    @property
    def arrays(self) -> ArrayKernels | None:
        """The same in fewer steps, if there is such a thing."""

    def quantise(self, values: torch.Tensor, payload: torch.Tensor, block: int) -> bool:
        """Fill `payload`; False, with its content undefined, if a value is not finite."""

    def dequantise(self, payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
        """Fill `out` with the decoded values."""

    def accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor, block: int) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""

    def sound(self, payload: torch.Tensor, count: int, block: int) -> bool:
        """Whether an encoder could have written this: no scale but 0 or MIN_SCALE to MAX_SCALE, no code -128."""
