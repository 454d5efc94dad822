"""Finding what is not finite, fast when there is nothing to find."""

from __future__ import annotations

import torch

from equipoise.compression.chunks import spans

F32_MAX = torch.finfo(torch.float32).max


def extremes(values: torch.Tensor) -> tuple[float, float]:
    """Return the least and greatest of `values`, f32 [n >= 1]; both are NaN where any value is."""
    low, high = torch.aminmax(values)
    return low.item(), high.item()


def within(low: float, high: float, limit: float = F32_MAX) -> bool:
    """Say whether extremes lie in [-limit, limit]; NaN does not."""
    return low >= -limit and high <= limit


def first_non_finite(values: torch.Tensor) -> int | None:
    """Return the index of the first NaN or infinity in `values`, f32 [n], or None."""
    for span in spans(values.numel(), values.device):
        if not within(*extremes(values[span])):
            return int(span.start) + locate(~torch.isfinite(values[span]))
    return None


def locate(faulty: torch.Tensor) -> int:
    """Return the index of the first True of `faulty`, bool [n], which has one."""
    return int(faulty.to(torch.uint8).argmax())
