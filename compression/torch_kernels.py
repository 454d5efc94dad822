"""Blockwise int8 by torch operations: on every device, and what other kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from equipoise.compression.blockwise import LEVELS, MAX_SCALE, MIN_ABSMAX, MIN_SCALE, planes
from equipoise.compression.chunks import CHUNK_VALUES, scratch
from equipoise.compression.finite import F32_MAX


class TorchKernels:
    """See `blockwise.Kernels`; every pass over values works in place on scratch space in cache."""

    name = "torch"
    arrays = None

    def quantise(self, values: torch.Tensor, payload: torch.Tensor, block: int) -> bool:
        """Fill `payload`; False, with its content undefined, if a value is not finite."""
        scales, codes = planes(payload, values.numel(), block)
        absmax = torch.empty_like(scales)
        # Divided by and into tensors of the device: CUDA turns division by a scalar into multiplication by its
        # reciprocal, and so does torch everywhere with scalar / tensor.
        levels = torch.full((), LEVELS, device=values.device)
        for rows, row_codes, row_absmax in _pieces(values, codes, absmax, block):
            torch.amax(rows, 1, keepdim=True, out=row_absmax)
            torch.maximum(row_absmax, torch.amin(rows, 1, keepdim=True).neg_(), out=row_absmax)
            inverse = torch.div(levels, row_absmax).masked_fill_(row_absmax < MIN_ABSMAX, 0.0)
            work = scratch(rows.numel(), rows.device).view(rows.shape)
            row_codes.copy_(torch.mul(rows, inverse, out=work).round_())
        torch.div(absmax, levels, out=scales).clamp_(max=MAX_SCALE).masked_fill_(absmax < MIN_ABSMAX, 0.0)
        # amax and amin carry NaN along, and NaN compares false.
        return bool((absmax <= F32_MAX).all())

    def dequantise(self, payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
        """Fill `out` with the decoded values."""
        scales, codes = planes(payload, out.numel(), block)
        for rows, row_codes, row_scales in _pieces(out, codes, scales, block):
            rows.copy_(row_codes).mul_(row_scales)

    def accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor, block: int) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""
        scales, codes = planes(payload, into.numel(), block)
        for rows, row_codes, row_scales in _pieces(into, codes, scales, block):
            decoded = scratch(rows.numel(), rows.device).view(rows.shape)
            # add_(..., alpha=weight) would fuse the multiplication on CPUs that can.
            rows.add_(decoded.copy_(row_codes).mul_(row_scales).mul_(weight))

    def sound(self, payload: torch.Tensor, count: int, block: int) -> bool:
        """Whether an encoder could have written this."""
        scales, codes = planes(payload, count, block)
        # NaN compares false. -0.0 decodes to the same as 0.0.
        good = (scales == 0.0) | ((scales >= MIN_SCALE) & (scales <= MAX_SCALE))
        return bool(good.all()) and (not count or int(codes.amin()) > -128)


def _pieces(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield views (values [r, block], codes [r, block], scales [r, 1]); last, by itself, a short block."""
    blocks = values.numel() // block
    whole = blocks * block
    if blocks:
        # Splitting makes all the views in one call each; slices in the loop would cost a fifth of the time.
        step = CHUNK_VALUES // block if values.device.type == "cpu" else blocks
        yield from zip(
            torch.split(values[:whole].view(blocks, block), step),
            torch.split(codes[:whole].view(blocks, block), step),
            torch.split(scales[:blocks].view(blocks, 1), step),
            strict=True,
        )
    if whole < values.numel():
        yield values[whole:].view(1, -1), codes[whole:].view(1, -1), scales[blocks:].view(1, 1)
