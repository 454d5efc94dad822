"""The codec int8: symmetric 8-bit codes with one scale per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equipoise.compression.blockwise import MAX_SCALE, MIN_SCALE, payload_size, planes
from equipoise.compression.choice import kernels_for
from equipoise.compression.codec import Codec, EncodeReport
from equipoise.compression.errors import CodecError, NonFiniteError
from equipoise.compression.finite import first_non_finite, locate

MIN_BLOCK = 32
"""In smaller blocks the scales would be more than an eighth of the codes, for an error that hardly falls."""

MAX_BLOCK = 4096
"""In larger blocks one outlier coarsens too many values, and the scales are a thousandth of the codes already."""

DEFAULT_BLOCK = 128
"""8.25 bits per value. A mean is quantised twice, so on N(0, 1) it is .0091 off, and .0110 where each of 8 members
has one 1000-sigma outlier in 16M values; blocks of 256 give .0098 and .0132 for 1.5 % fewer bytes."""


class Int8Codec(Codec):
    """Planar `[f32 scale per block][int8 code per value]`; the arithmetic is defined in `blockwise`."""

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        """Make the codec; `block` is a power of two from MIN_BLOCK to MAX_BLOCK.

        Raises:
            CodecError: It is not.
        """
        if not MIN_BLOCK <= block <= MAX_BLOCK or block & (block - 1):
            raise CodecError(f"int8: block is a power of two from {MIN_BLOCK} to {MAX_BLOCK}, not {block}")
        self.spec = f"int8:block={block}"
        self.block = block

    def encoded_size(self, count: int) -> int:
        """Return the exact size in bytes of a payload of `count` values."""
        return payload_size(count, self.block)

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> EncodeReport:
        if not kernels_for(values.device).quantise(values, out, self.block):
            index = first_non_finite(values)
            if index is None:
                raise CodecError(f"{self.spec}: the values changed while they were encoded")
            raise NonFiniteError(index, values.numel(), values[index].item())
        return EncodeReport()

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        kernels_for(out.device).dequantise(payload, out, self.block)

    def _accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor) -> None:
        kernels_for(into.device).accumulate(payload, weight, into, self.block)

    def _reduce(
        self,
        stack: torch.Tensor,
        stride: int,
        weights: Sequence[float],
        mean: torch.Tensor,
        out: torch.Tensor,
    ) -> EncodeReport:
        if not kernels_for(out.device).reduce(stack, stride, weights, mean, out, self.block):
            raise CodecError(f"{self.spec}: the weighted sum is not finite")
        return EncodeReport()

    def _check(self, payload: torch.Tensor, count: int) -> None:
        if kernels_for(payload.device).sound(payload, count, self.block):
            return
        scales, codes = planes(payload, count, self.block)
        # As written by an encoder; NaN compares false, and so counts as faulty. -0.0 decodes to the same as 0.0.
        faulty = ~((scales == 0.0) | ((scales >= MIN_SCALE) & (scales <= MAX_SCALE)))
        if faulty.any():
            index = locate(faulty)
            raise CodecError(
                f"{self.spec}: the scale of block {index} of {scales.numel()} is {scales[index].item()};"
                f" expected 0, or {MIN_SCALE:.4g} to {MAX_SCALE:.4g}"
            )
        raise CodecError(f"{self.spec}: code {int(codes.argmin())} of {count} is -128; expected -127 to 127")
