"""The arithmetic of the sparse codec, as all kernels must do it.

Of each `group` values, 64 or 32, the one of the largest magnitude a, the first of equals, becomes one byte:

    index of the value       in the low 6 (5) bits
    sign                     in the next bit: 1 of a value below 0
    m                        in the last 1 (2) bits: how many of THRESHOLDS T satisfy a > f32(T * scale)
    decoded                  +-f32(LEVELS[m] * scale); all other values decode to 0

Where m is 0, the byte is 0. The scale is that of `nf4`, for 512 values. A block is its scale, bf16, and its bytes, one
a group; the last group may be short. In a block of scale 0 every byte is 0.

Multiples of 1/8 of a bf16 are exact in f32, so no operation rounds. An encoder leaves most values out: it needs error
feedback, which sends them later.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise.compression.blockwise import Blocks
from equipoise.compression.nf4 import coarse_scales, widened

BLOCK = 512
"""Values of one scale."""

GROUPS = {64: Blocks(BLOCK, 64), 32: Blocks(BLOCK, 32)}
"""The formats, by their groups."""

THRESHOLDS = {64: (0.375,), 32: (0.125, 0.375, 0.75)}

LEVELS = {
    64: np.array([0, 0, 0.75, -0.75], np.float32),
    32: np.array([0, 0, 0.25, -0.25, 0.5, -0.5, 1, -1], np.float32),
}
"""What the bits above the index mean, for a scale of 1: the sign is the lowest of them. No decoded value is -0."""

MOST_MEMBERS = {64: 32, 32: 16}
"""Largest groups of peers: a mean is the contributions of all, so in larger ones nf4 sends fewer bytes."""


def quantise(rows: Any, scales: Any, codes: Any, blocks: Blocks, kinds: Any) -> None:
    """Encode finite values, f32 [r, m <= 512], to scales, i16 [r, 1], and codes, u8 [r, ceil(m / group)].

    They are arrays or tensors; `kinds` is numpy or torch, whichever has made them.
    """
    group = blocks.per_byte
    if short := codes.shape[1] * group - rows.shape[1]:
        zeros = kinds.broadcast_to(kinds.zeros_like(rows[:, :1]), (len(rows), short))
        rows = kinds.concatenate([rows, zeros], 1)
    rows = rows.reshape(-1, group)
    bits = abs(rows).view(kinds.int32)
    index, top = kinds.argmax(bits, 1), kinds.amax(bits, 1)
    bounds = coarse_scales(kinds.amax(top.reshape(codes.shape), 1)[:, None], scales, kinds)
    bounds = kinds.broadcast_to(bounds, codes.shape).reshape(-1)
    below = rows.reshape(-1)[_places(index, group, kinds)] < 0
    found = kinds.zeros_like(index)
    for threshold in THRESHOLDS[group]:
        found += top.view(kinds.float32) > bounds * threshold
    code = index + group * below + 2 * group * found
    codes[...] = kinds.where(found == 0, 0, code).reshape(codes.shape)


def dequantise(scales: Any, codes: Any, out: Any, blocks: Blocks, levels: Any, kinds: Any) -> None:
    """Decode such scales and codes into `out`, f32 [r, m]; `levels` are LEVELS on their device."""
    group = blocks.per_byte
    code = kinds.asarray(codes, dtype=kinds.int64).reshape(-1)
    values = (levels[code // group].reshape(codes.shape) * widened(scales, kinds)).reshape(-1)
    short = out.shape[1] < codes.shape[1] * group
    whole = kinds.tile(levels[:1], (codes.shape[1] * group,)) if short else out.reshape(-1)
    whole[...] = 0
    whole[_places(code % group, group, kinds)] = values
    if short:
        out[...] = whole[: out.shape[1]]


def fault(scales: Any, codes: Any, blocks: Blocks, span: slice, count: int) -> str:
    """Say what no encoder writes in the codes of `span` of `count` values; empty if it is sound."""
    first, group = span.start // BLOCK, blocks.per_byte
    wrong = (scales == 0) & (codes != 0)
    if wrong.any():
        return f"block {first + int(wrong.any(1).argmax())} has scale 0 and a byte other than 0; expected 0"
    left = (span.stop - span.start) % group
    index = int(codes[-1, -1]) % group
    if left and index >= left:
        return f"an index in the last group, of {left} values, is {index}; expected less than {left}"
    return ""


def _places(index: Any, group: int, kinds: Any) -> Any:
    """Where the chosen value of each group lies in all values."""
    return kinds.cumsum(kinds.full_like(index, group), 0) - group + index
