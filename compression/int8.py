"""The codec int8: symmetric 8-bit codes with one scale per block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equipoise.compression import blockwise
from equipoise.compression.array_math import BlockMath
from equipoise.compression.blockwise import MAX_SCALE, MIN_SCALE, SCALE_BYTES, payload_size, planes
from equipoise.compression.buffers import Buffer, Values, plain, raw
from equipoise.compression.choice import compiled
from equipoise.compression.chunks import first_non_finite, locate
from equipoise.compression.codec import UNCLAMPED, Codec, EncodeReport
from equipoise.compression.device_kernels import Kind
from equipoise.compression.errors import CodecError, NonFiniteError
from equipoise.compression.late_torch import torch

MIN_BLOCK = 32
"""Values of the smallest block: below it the scales exceed an eighth of the codes, and the error hardly falls."""

MAX_BLOCK = 4096
"""Values of the largest block: its scales are a thousandth of the codes, and one outlier coarsens all its values."""

DEFAULT_BLOCK = 128
"""Values of a block, at 8.25 bits each. A mean is quantised twice, so on N(0, 1) it is .0091 off, and .0110 where each
of 8 members has one 1000-sigma outlier in 16M values; blocks of 256 give .0098 and .0132 for 1.5 % fewer bytes."""


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
        self.math = BlockMath(self.spec, block)
        self.block = self.granule = block

    @property
    def kind(self) -> Kind:
        """The block; see `Codec.kind`."""
        return self.block

    def encoded_size(self, count: int) -> int:
        """Return the exact size in bytes of a payload of `count` values."""
        return payload_size(count, self.block)

    def plane_sizes(self, count: int) -> tuple[int, ...]:
        """Return the bytes of the scales and of the codes; see `Codec.plane_sizes`."""
        return -(-count // self.block) * SCALE_BYTES, count

    # Each of these methods takes the short way if it can: one call of a compiled kernel, with nothing around it. The
    # long way takes all other buffers, and names the fault.

    def encode(self, values: Values, out: Buffer) -> EncodeReport:
        """Encode `values` into `out`; see `Codec.encode`."""
        array, payload = plain(values), raw(out)
        if (
            array is not None
            and payload is not None
            and (short := compiled(array.size))
            and short.encode(array, payload, self.block)
        ):
            return UNCLAMPED
        return super().encode(values, out)

    def decode(self, payload: Buffer, out: Values) -> None:
        """Decode `payload` into `out`; see `Codec.decode`."""
        source, array = raw(payload), plain(out)
        if (
            source is not None
            and array is not None
            and (short := compiled(array.size))
            and short.decode(source, array, self.block)
        ):
            return
        super().decode(payload, out)

    def check(self, payload: Buffer, count: int) -> None:
        """Verify that `payload` is `count` encoded values; see `Codec.check`."""
        short, source = compiled(count), raw(payload)
        if short and source is not None and short.sound(source, count, self.block):
            return
        super().check(payload, count)

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], mean: Buffer, scratch: Values
    ) -> EncodeReport:
        """Encode the weighted sum into `mean`; see `Codec.reduce`."""
        target, values = raw(mean), plain(scratch)
        if target is not None and values is not None and (short := compiled(values.size)):
            # The arrays must live as long as their addresses are in use.
            sources = [one for one in map(raw, payloads) if one is not None and one.size == target.size]
            if 0 < len(sources) == len(payloads) == len(weights):
                places = np.array([short.address(source) for source in sources], np.int64)
                if short.reduce(places, np.array(weights, np.float64), target, values, self.block):
                    return UNCLAMPED
        return super().reduce(payloads, weights, mean, scratch)

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> EncodeReport:
        if not blockwise.quantise(values, out, self.block):
            index = first_non_finite(values)
            if index is None:
                raise CodecError(f"{self.spec}: the values changed while they were encoded")
            raise NonFiniteError(index, values.numel(), values[index].item())
        return UNCLAMPED

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        blockwise.dequantise(payload, out, self.block)

    def _accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor) -> None:
        blockwise.accumulate(payload, weight, into, self.block)

    def _check(self, payload: torch.Tensor, count: int) -> None:
        scales, codes = planes(payload, count, self.block)
        # As written by an encoder; NaN compares false, and so counts as faulty. -0.0 decodes to the same as 0.0.
        faulty = ~((scales == 0.0) | ((scales >= MIN_SCALE) & (scales <= MAX_SCALE)))
        if faulty.any():
            index = locate(faulty)
            raise CodecError(
                f"{self.spec}: the scale of block {index} of {scales.numel()} is {scales[index].item()};"
                f" expected 0, or {MIN_SCALE:.4g} to {MAX_SCALE:.4g}"
            )
        if count and int(codes.amin()) == -128:
            raise CodecError(
                f"{self.spec}: code {int(codes.argmin())} of {count} is -128; expected -127 to 127"
            )
