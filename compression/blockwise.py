"""The arithmetic of the int8 codec, as all kernels must do it, and what blocks and compiled kernels have in common.

A block of values x with a = max |x| is stored as a scale and one code per value:

    scale   = 0                               if a < MIN_ABSMAX
            = min(f32(a / 127), MAX_SCALE)    otherwise
    inverse = 0                               if a < MIN_ABSMAX
            = f32(127 / a)                    otherwise
    code    = round_half_even(f32(x * inverse))         in [-127, 127]
    decoded = f32(f32(code) * scale)

A payload is the blocks, one after another: the scale, f32, and the codes, int8. Only the last may be short. `nf4`
and `sparse` define the other formats of blocks.

Every operation is one IEEE-754 single-precision operation: a true division (no multiplication by a reciprocal), no
fused multiply-add. All intermediate results that matter are normal numbers, so that hardware which flushes
subnormal numbers to zero computes the same bytes.

The error of a value is at most half a step, a / 254, and a few units in the last place of a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


class Blocks(NamedTuple):
    """A format of blocks, each of a scale and codes.

    Attributes:
        block: Values of a block.
        per_byte: Values of a byte of codes: 1 of int8, whose scales are f32; 2 of nf4, or the group of sparse, whose
            scales are bf16.
    """

    block: int
    per_byte: int = 1

    @property
    def scale_bytes(self) -> int:
        """Length of a scale."""
        return 4 if self.per_byte == 1 else 2

    def size(self, count: int) -> int:
        """Return the bytes of `count` encoded values."""
        return -(-count // self.block) * self.scale_bytes + -(-count // self.per_byte)


def pieces(
    payload: Any, count: int, blocks: Blocks, step: int, kinds: Any
) -> Iterator[tuple[slice, Any, Any]]:
    """Yield, for some blocks at a time, where their values lie, and views of their scales and codes.

    The short block comes last, by itself.

    Args:
        payload: uint8, array or tensor.
        step: Most values of a piece, a multiple of the block.
        kinds: numpy or torch, whichever has made the payload.

    Yields:
        The slice of the values, their scales, [r, 1], and their codes, [r, bytes of a block]: f32 and int8 of int8, i16
        and u8 of the others.
    """
    whole, length = count - count % blocks.block, blocks.size(blocks.block)
    types = (kinds.float32, kinds.int8) if blocks.per_byte == 1 else (kinds.int16, kinds.uint8)
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        rows = payload[blocks.size(start) : blocks.size(stop)].reshape(-1, length)
        yield slice(start, stop), *_views(rows, blocks.scale_bytes, types)
    if whole < count:
        scales, codes = _views(payload[blocks.size(whole) :], blocks.scale_bytes, types)
        yield slice(whole, count), scales[None], codes[None]


def _views(rows: Any, scale_bytes: int, types: tuple[Any, Any]) -> tuple[Any, Any]:
    return rows[..., :scale_bytes].view(types[0]), rows[..., scale_bytes:].view(types[1])


@dataclass(frozen=True, slots=True)
class ArrayKernels:
    """Compiled kernels for arrays on a CPU, which write the same bytes: they do all that a part needs in one call.

    A wrong size or alignment, a value that is not finite, or a payload that no encoder wrote makes them return False,
    with all content undefined; numpy's or torch's operations then find out which it was. values, out, scratch: f32 [n];
    payload: uint8; weights: f64 [m]; block, per_byte: those of `Blocks`.

    Attributes:
        encode: `(values, payload, block, per_byte)`: fill `payload`.
        decode: `(payload, out, block, per_byte, past_cache)`: fill `out`, if an encoder could have written `payload`.
            Past the cache, a processor need not read the memory that it overwrites; what reads `out` next does.
        sound: `(payload, n, block, per_byte)`: whether an encoder could have written it.
        squares: `(payload, n, block, per_byte)`: the sum of the squares of the values, to a thousandth; in place of
            False, a negative number near it, or NaN where other code must do it.
        accumulate: `(payload, weight, into, block, per_byte)`: add f32(f32(weight) * decoded) to `into`, f32 [n].
        reduce: `(addresses, weights, payload, scratch, block, per_byte)`: add up payloads in turn, each times its
            weight in f32, and encode the sum into `payload`. addresses, int64 [m >= 1]: where the payloads begin, each
            as large as `payload`, kept alive by the caller.
        widen: By format, fp16 and bf16, `(words, bits)`: decode words, u16 [n], to the bits of f32 values, u32 [n].
        narrow: By format, `(bits, words, limit)`: encode, and return the number of values that were clamped to the
            limit, bits of an f32; -1 if one is not finite.
    """

    encode: Callable[[Values, Bytes, int, int], bool]
    decode: Callable[[Bytes, Values, int, int, bool], bool]
    sound: Callable[[Bytes, int, int, int], bool]
    squares: Callable[[Bytes, int, int, int], float]
    accumulate: Callable[[Bytes, float, Values, int, int], bool]
    reduce: Callable[[NDArray[np.int64], NDArray[np.float64], Bytes, Values, int, int], bool]
    widen: Mapping[str, Callable[[NDArray[np.uint16], NDArray[np.uint32]], None]]
    narrow: Mapping[str, Callable[[NDArray[np.uint32], NDArray[np.uint16], np.uint32], int]]


Kind: TypeAlias = "Blocks | torch.dtype"
"""The format of a payload: its blocks, or the dtype of plain floating-point values."""

UNKNOWN = Blocks(0)
"""The format of payloads that no kernel knows."""


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
