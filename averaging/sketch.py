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
from equipoise.averaging.manifest import DIMENSIONS, UNIT
from equipoise.compression import CodecError

SAMPLE_VALUES, PIECE_VALUES = 8 * 1024, 256
"""Values of a contribution that are looked at, and those of a piece, at least: they take 0.2 ms."""

LEAST_VALUES = 32
"""Values that a contribution must have, counted as the sketch counts them: a few are alike by chance."""


def sketch(layout: Layout, contribution: memoryview) -> bytes:
    """Return the sketch of an encoded contribution; empty if that has few values above 0, or does not decode."""
    pieces = _sample(layout, contribution)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        size = np.abs(pieces).mean(1, keepdims=True)
        pieces = np.where(size > 0, np.clip(pieces / size, -1, 1), 0)
    if not float(np.square(pieces).sum()) >= LEAST_VALUES:
        return b""
    summed = (pieces.ravel() * _signs()[: pieces.size]).reshape(-1, DIMENSIONS).sum(0)
    length = float(np.sqrt(summed.dot(summed)))
    return np.rint(summed * (UNIT / length)).astype("<i2").tobytes() if length else b""


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
