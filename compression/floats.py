"""The codecs fp32, fp16 and bf16: plain floating-point values, rounded to nearest even."""

from __future__ import annotations

from equipoise.compression.array_math import FORMATS, FloatMath
from equipoise.compression.choice import compiled
from equipoise.compression.chunks import first_non_finite, scratch, spans, within
from equipoise.compression.codec import Codec
from equipoise.compression.errors import NonFiniteError
from equipoise.compression.late_torch import torch


class FloatCodec(Codec):
    """Values in a floating-point format, one after the other.

    A value beyond the format's largest (65504 for fp16, 3.39e38 for bf16) becomes that largest, with its sign, and
    is counted: rounding would have made it an infinity or hidden that it was out of range.
    """

    def __init__(self, name: str) -> None:
        self.spec = name
        self._format = FORMATS[name]
        self._limit = self._format.limit
        self.alignment = self._format.size
        self.math = FloatMath(name, compiled)

    @property
    def kind(self) -> torch.dtype:
        """The dtype; see `Codec.kind`."""
        dtype: torch.dtype = getattr(torch, self._format.name)
        return dtype

    def encoded_size(self, count: int) -> int:
        """Return the exact size in bytes of a payload of `count` values."""
        return count * self._format.size

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> int:
        encoded = out.view(self.kind)
        clamped = 0
        for span in spans(values.numel(), values.device):
            piece = values[span]
            if not within(piece, self._limit):
                if not within(piece) and (index := first_non_finite(values)) is not None:
                    raise NonFiniteError(index, values.numel(), values[index].item())
                clamped += int((piece.abs() > self._limit).sum())
                kept = scratch(piece.numel(), piece.device)
                # No `clamp`: where the processor flushes subnormal numbers, it makes zeros of them.
                ends = torch.full_like(kept, self._limit).copysign_(piece)
                piece = torch.where(piece.abs() > self._limit, ends, piece, out=kept)
            encoded[span].copy_(piece)
        return clamped

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(payload.view(self.kind))
