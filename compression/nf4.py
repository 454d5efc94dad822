"""The arithmetic of the nf4 codec, as all kernels must do it.

A block of values x with a = max |x| is stored as a scale and one code of 4 bits per value:

    scale   = 0                                if a < MIN_ABSMAX
            = min(bf16(a), MAX_SCALE)          otherwise, rounded half to even
    code    = how many thresholds T satisfy x > f32(T * scale)      7 throughout a block of scale 0
    decoded = f32(LEVELS[code] * scale)

A block is its scale, bf16, and its codes, two in a byte: of m values, value i is in the low nibble of byte i for
i < ceil(m / 2); the others are in the high nibbles, in order. A nibble without a value is 7, the code of 0.

The levels are QLoRA's, quantiles of N(0, 1) in [-1, 1]. As in `blockwise`, every operation is one of IEEE-754 single
precision on normal numbers. A bound of infinity in place of scale 0 gives every finite value the code 7.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise.compression.blockwise import MIN_ABSMAX, Blocks

NF4 = Blocks(64, 2)
"""The only format."""

LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""What the codes mean, for a scale of 1; f32 [16]."""

THRESHOLDS = ((LEVELS[:-1].astype(np.float64) + LEVELS[1:]) / 2).astype(np.float32)
"""Half-way between neighbouring levels, rounded to f32; f32 [15]."""

MAX_SCALE = float.fromhex("0x1.fep+127")
"""bf16's greatest value."""

MIN_BITS = int(np.float32(MIN_ABSMAX).view(np.int32))
"""MIN_ABSMAX as the bits of an f32."""

MIN_WORD, MAX_WORD, INFINITY = MIN_BITS >> 16, 0x7F7F, 0x7F80
"""The least scale but 0, the greatest, and the bound in place of 0, as the bits of a bf16."""

ZEROS = 0x77
"""A byte of two codes of 0."""


def coarse_scales(top: Any, scales: Any, kinds: Any) -> Any:
    """Fill scales, i16 [r, 1], from the bits of the absmax of each block, i32 [r, 1]; return the bounds, f32 [r, 1]."""
    words = kinds.clip((top + 0x7FFF + ((top >> 16) & 1)) >> 16, None, MAX_WORD) * (top >= MIN_BITS)
    scales[...] = words
    return (kinds.where(words == 0, INFINITY, words) << 16).view(kinds.float32)


def widened(scales: Any, kinds: Any) -> Any:
    """Return scales, i16, as f32."""
    return (kinds.asarray(scales, dtype=kinds.int32) << 16).view(kinds.float32)


def quantise(rows: Any, scales: Any, codes: Any, blocks: Blocks, kinds: Any) -> None:
    """Encode finite values, f32 [r, m <= 64], to scales, i16 [r, 1], and codes, u8 [r, ceil(m / 2)].

    They are arrays or tensors; `kinds` is numpy or torch, whichever has made them.
    """
    bounds = coarse_scales(kinds.amax(abs(rows).view(kinds.int32), 1)[:, None], scales, kinds)
    found = kinds.zeros_like(rows, dtype=kinds.uint8)
    for threshold in THRESHOLDS.tolist():
        found += rows > bounds * threshold
    low = codes.shape[1]
    high = rows.shape[1] - low
    codes[...] = found[:, :low]
    codes[:, :high] |= found[:, low:] << 4
    codes[:, high:] |= ZEROS & 0xF0


def dequantise(scales: Any, codes: Any, out: Any, blocks: Blocks, levels: Any, kinds: Any) -> None:
    """Decode such scales and codes into `out`, f32 [r, m]; `levels` are LEVELS on their device."""
    scale = widened(scales, kinds)
    low = codes.shape[1]
    high = out.shape[1] - low
    out[:, :low] = levels[kinds.asarray(codes & 15, dtype=kinds.int64)] * scale
    out[:, low:] = levels[kinds.asarray(codes[:, :high] >> 4, dtype=kinds.int64)] * scale


def fault(scales: Any, codes: Any, blocks: Blocks, span: slice, count: int) -> str:
    """Say what no encoder writes in the codes of `span` of `count` values; empty if it is sound."""
    wrong = (scales == 0) & (codes != ZEROS)
    if wrong.any():
        index = span.start // blocks.block + int(wrong.any(1).argmax())
        return f"block {index} has scale 0 and a code other than 7; expected 7"
    spare = int(codes[-1, -1]) >> 4
    if (span.stop - span.start) % 2 and spare != 7:
        return f"the nibble behind value {count} is {spare}; expected 7"
    return ""
