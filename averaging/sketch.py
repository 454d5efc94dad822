"""Sketches of contributions: two that are nearly equal were made of the same data, whatever the kernels and dtypes.

A sketch is a random projection of a sample of the values to a few dimensions (Charikar, Chen and Farach-Colton 2002),
which keeps distances. In each piece of the sample, values count up to the mean of their magnitudes: gradients of
different data may share a few large values, as those of a bias, but not the many small ones.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from equipoise.averaging.layout import EXACT, Layout
from equipoise.compression import CodecError

SAMPLE_VALUES, PIECE_VALUES = 8 * 1024, 256
"""Values of a contribution that are looked at, and those of a piece, at least: they take 0.2 ms."""

DIMENSIONS, SKETCH_BYTES = 16, 32
UNIT = 4096
"""The length of a sketch, in steps of its numbers, i16."""

LEAST_VALUES = 32
"""Values that a contribution must have, counted as the sketch counts them: a few are alike by chance."""

NEAR = 0.04
"""The distance of two sketches, of length 1, below which the contributions are nearly equal. Where int8 carries them,
gradients of the text model for one batch in bf16 and in fp32 are .005 to .044 apart; those for different batches .05 in
a first step of 16,384 tokens, .14 in one of 1,024, and from the sixth step on .26 or more."""


def sketch(layout: Layout, contribution: memoryview) -> bytes:
    """Return the sketch of an encoded contribution; empty if that has few values above 0, or does not decode."""
    pieces = _sample(layout, contribution)
    size = np.abs(pieces).mean(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        pieces = np.where(size > 0, np.clip(pieces / size, -1, 1), 0)
    if not float(np.square(pieces).sum()) >= LEAST_VALUES:
        return b""
    summed = (pieces.ravel() * _signs()[: pieces.size]).reshape(-1, DIMENSIONS).sum(0)
    length = float(np.sqrt(summed.dot(summed)))
    return np.rint(summed * (UNIT / length)).astype("<i2").tobytes() if length else b""


def near(first: bytes, second: bytes) -> bool:
    """Whether two sketches are those of nearly equal contributions; an empty one is near no other."""
    if len(first) != SKETCH_BYTES or len(second) != SKETCH_BYTES:
        return False
    apart = np.frombuffer(first, "<i2").astype(np.int64) - np.frombuffer(second, "<i2")
    return int(apart.dot(apart)) < (NEAR * UNIT) ** 2


def _sample(layout: Layout, contribution: memoryview) -> NDArray[np.float32]:
    """Pieces of the contribution, all alike far apart, f32 [pieces, values]; zeros behind the end of a region."""
    piece = max(PIECE_VALUES, layout.codec.granule)
    most = SAMPLE_VALUES // piece
    step = piece * -(-layout.size // (most * piece))
    starts = range(0, layout.size, step)
    values = np.zeros((len(starts), piece), np.float32)
    for into, start in zip(values, starts, strict=True):
        codec, end = (layout.codec, layout.coded) if start < layout.coded else (EXACT, layout.size)
        stop = min(start + piece, end)
        try:
            codec.decode(contribution[layout.encoded(start, stop)], into[: stop - start])
        except CodecError:  # The script writes to it; the round finds that out.
            into[:] = 0
    return values


@functools.cache
def _signs() -> NDArray[np.float32]:
    """Signs, alike on all machines, f32 [SAMPLE_VALUES]."""
    drawn = np.frombuffer(hashlib.shake_128(b"equipoise sketch").digest(SAMPLE_VALUES // 8), np.uint8)
    return np.unpackbits(drawn).astype(np.float32) * 2 - 1
