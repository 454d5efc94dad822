"""Passes over long vectors, in pieces that stay in a core's cache, with scratch space that is allocated once.

Measured on 64 MB of fp32: several passes over a piece in the second-level cache cost less than one more pass over
main memory, and every fresh tensor above 128 KB pays page faults.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from equipoise.compression.late_torch import torch

CHUNK_VALUES = 512 * 1024
"""Values per piece. Its 2 MiB of fp32 stay within second- and third-level caches; pieces of 256 Ki values are 10-15 %
slower for the fixed cost of torch calls, larger ones are not faster."""

F32_MAX = float(np.finfo(np.float32).max)

_of_thread = threading.local()


def spans(count: int, device: torch.device) -> Iterator[slice]:
    """Yield the slices that cover `count` values: pieces on a CPU, everything at once elsewhere.

    An accelerator gains nothing from small pieces and pays a kernel launch for each.
    """
    step = CHUNK_VALUES if device.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def scratch(count: int, device: torch.device) -> torch.Tensor:
    """Return scratch space, uninitialised, f32 [count], valid until this thread asks again.

    On a CPU it belongs to the calling thread, so that threads do not share it; `count` may be CHUNK_VALUES at most.
    """
    if device.type != "cpu":
        return torch.empty(count, dtype=torch.float32, device=device)
    if not hasattr(_of_thread, "scratch"):
        # Under inference_mode a kept tensor would be unusable outside of it.
        with torch.inference_mode(False):
            _of_thread.scratch = torch.empty(CHUNK_VALUES, dtype=torch.float32, device="cpu")
    piece: torch.Tensor = _of_thread.scratch[:count]
    return piece


def within(values: torch.Tensor, limit: float = F32_MAX) -> bool:
    """Say whether all `values`, f32 [n >= 1], lie in [-limit, limit]; NaN does not, and makes both extremes NaN."""
    low, high = torch.aminmax(values)
    return low.item() >= -limit and high.item() <= limit


def first_non_finite(values: torch.Tensor) -> int | None:
    """Return the index of the first NaN or infinity in `values`, f32 [n], or None."""
    for span in spans(values.numel(), values.device):
        if not within(values[span]):
            return int(span.start) + int((~torch.isfinite(values[span])).to(torch.uint8).argmax())
    return None
