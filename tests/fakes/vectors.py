"""Flat vectors, f32 [D], to the encoded vectors that a script shares with its daemon, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.layout import EXACT, Layout, Vectors
from equipoise.averaging.outcome import Outcome
from equipoise.compression import CodecError


def encoded(layout: Layout, flat: torch.Tensor) -> memoryview:
    """The values, encoded; of fp32 also those that an encoder refuses."""
    stored = memoryview(bytearray(layout.encoded_size))
    for part in layout.cut([1.0], max(layout.size, 1)):
        codec, values = layout.codec_of(part), flat[part.start : part.stop]
        payload = stored[layout.encoded(part.start, part.stop)]
        if codec == EXACT:
            payload[:] = values.numpy().tobytes()
        else:
            codec.encode(values, payload)
    return stored


def decoded(layout: Layout, stored: memoryview, shares: Sequence[float] = (1.0,)) -> torch.Tensor:
    """The values of the mean of contributions with these shares, or of one contribution."""
    flat = torch.zeros(layout.size)
    for part in layout.cut([1.0], max(layout.size, 1)):
        mean = bytearray().join(stored[one] for one in layout.mean(part.start, part.stop, len(shares)))
        layout.codec_of(part).decode_mean(mean, shares, flat[part.start : part.stop])
    return flat


def norm_of(layout: Layout, stored: memoryview) -> float:
    """The 2-norm of an encoded contribution; infinite if it does not decode."""
    try:
        return float(decoded(layout, stored).double().norm())
    except CodecError:
        return math.inf


async def averaged(
    run: RunDriver, values: torch.Tensor, result: torch.Tensor, *rest: Any, lie: float = 0.0
) -> Outcome:
    """Take part in a round, with its true norm or a `lie`; `result` changes if it is ok."""
    layout = run.spec.layout
    mean = memoryview(bytearray(layout.mean_size(run.spec.options.group_size)))
    stored = encoded(layout, values)
    vectors = Vectors(stored, mean, norm=lie or norm_of(layout, stored))
    outcome = await run.average(vectors, *rest)
    if outcome.ok:
        result.copy_(decoded(layout, mean, outcome.shares))
    return outcome
