"""The codecs int8 and nf4: codes of 8 or 4 bits, with one scale per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.compression import array_math
from equipoise.compression.array_math import ArrayMath, Int8Math, NF4Math
from equipoise.compression.blockwise import (
    LEVELS,
    MAX_SCALE,
    MIN_ABSMAX,
    Blocks,
    Kind,
    pieces,
)
from equipoise.compression.buffers import Buffer, Values, plain, raw
from equipoise.compression.choice import compiled
from equipoise.compression.chunks import CHUNK_VALUES, F32_MAX, first_non_finite, scratch
from equipoise.compression.codec import Codec
from equipoise.compression.errors import CodecError, NonFiniteError
from equipoise.compression.late_torch import torch
from equipoise.compression.nf4 import LEVELS as NF4_LEVELS
from equipoise.compression.nf4 import NF4, dequantise, quantise

MIN_BLOCK = 32
"""Values of the smallest block: below it the scales exceed an eighth of the codes, and the error hardly falls."""

MAX_BLOCK = 4096
"""Values of the largest block: its scales are a thousandth of the codes, and one outlier coarsens all its values."""

DEFAULT_BLOCK = 128
"""Values of a block, at 8.25 bits each. A mean is quantised twice, so on N(0, 1) it is .0091 off, and .0110 where each
of 8 members has one 1000-sigma outlier in 16M values; blocks of 256 give .0098 and .0132 for 1.5 % fewer bytes."""

STREAMED_VALUES = 256 * 1024
"""Fewest values that are decoded past the cache: more than a core's second-level cache holds."""


class BlockCodec(Codec):
    """Blocks of a scale and codes, one after another.

    Attributes:
        blocks: The format.
        chunk: Values of a piece for torch on a CPU.
    """

    chunk = CHUNK_VALUES

    def __init__(self, spec: str, blocks: Blocks, math: ArrayMath) -> None:
        self.spec, self.math, self.blocks = spec, math, blocks
        self.granule, self.alignment = blocks.block, blocks.scale_bytes

    @property
    def kind(self) -> Kind:
        """The blocks; see `Codec.kind`."""
        return self.blocks

    def encoded_size(self, count: int) -> int:
        """Return the exact size in bytes of a payload of `count` values."""
        return self.blocks.size(count)

    # Each of these methods takes the short way if it can: one call of a compiled kernel, with nothing around it. The
    # long way takes all other buffers, and names the fault.

    def encode(self, values: Values, out: Buffer) -> int:
        """Encode `values` into `out`; see `Codec.encode`."""
        array, payload = plain(values), raw(out)
        if (
            array is not None
            and payload is not None
            and (short := compiled(array.size))
            and short.encode(array, payload, *self.blocks)
        ):
            return 0
        return super().encode(values, out)

    def decode(self, payload: Buffer, out: Values) -> None:
        """Decode `payload` into `out`; see `Codec.decode`."""
        source, array = raw(payload), plain(out)
        if (
            source is not None
            and array is not None
            and (short := compiled(array.size))
            and short.decode(source, array, *self.blocks, array.size >= STREAMED_VALUES)
        ):
            return
        super().decode(payload, out)

    def check(self, payload: Buffer, count: int) -> None:
        """Verify that `payload` is `count` encoded values; see `Codec.check`."""
        short, source = compiled(count), raw(payload)
        if short and source is not None and short.sound(source, count, *self.blocks):
            return
        super().check(payload, count)

    def accumulate(self, payload: Buffer, weight: float, into: Values) -> None:
        """Add `weight` times the decoded `payload` to `into`; see `Codec.accumulate`."""
        source, array = raw(payload), plain(into)
        if (
            source is not None
            and array is not None
            and (short := compiled(array.size))
            and short.accumulate(source, weight, array, *self.blocks)
        ):
            return
        super().accumulate(payload, weight, into)

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], mean: Buffer, scratch: Values
    ) -> int:
        """Encode the weighted sum into `mean`; see `Codec.reduce`."""
        target, values = raw(mean), plain(scratch)
        if target is not None and values is not None and (short := compiled(values.size)):
            # The arrays must live as long as their addresses are in use.
            sources = [one for one in map(raw, payloads) if one is not None and one.size == target.size]
            if 0 < len(sources) == len(payloads) == len(weights):
                places = np.array([source.ctypes.data for source in sources], np.int64)
                if short.reduce(places, np.array(weights, np.float64), target, values, *self.blocks):
                    return 0
        return super().reduce(payloads, weights, mean, scratch)

    def _non_finite(self, values: torch.Tensor) -> CodecError:
        index = first_non_finite(values)
        if index is None:
            return CodecError(f"{self.spec}: the values changed while they were encoded")
        return NonFiniteError(index, values.numel(), values[index].item())

    def _pieces(
        self, payload: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """See `pieces`; an accelerator works on all blocks at once."""
        step = self.chunk if values.device.type == "cpu" else max(values.numel(), 1)
        return pieces(payload, values.numel(), self.blocks, step, torch)


class Int8Codec(BlockCodec):
    """Symmetric 8-bit codes; the format and the arithmetic are defined in `blockwise`."""

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        """Make the codec; `block` is a power of two from MIN_BLOCK to MAX_BLOCK.

        Raises:
            CodecError: It is not.
        """
        if not MIN_BLOCK <= block <= MAX_BLOCK or block & (block - 1):
            raise CodecError(f"int8: block is a power of two from {MIN_BLOCK} to {MAX_BLOCK}, not {block}")
        spec, blocks = f"int8:block={block}", Blocks(block)
        super().__init__(spec, blocks, Int8Math(spec, blocks))

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> int:
        # Divided by and into tensors of the device: CUDA turns division by a scalar into multiplication by its
        # reciprocal, and so does torch everywhere with scalar / tensor.
        levels = torch.full((), LEVELS, device=values.device)
        for span, scales, codes in self._pieces(out, values):
            rows = values[span].view(codes.shape)
            absmax = torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())
            # amax and amin carry NaN along, and NaN compares false.
            if not (absmax <= F32_MAX).all():
                raise self._non_finite(values)
            small = absmax < MIN_ABSMAX
            work = scratch(rows.numel(), rows.device).view(rows.shape)
            inverse = torch.div(levels, absmax).masked_fill_(small, 0.0)
            codes.copy_(torch.mul(rows, inverse, out=work).round_())
            scales.copy_(torch.div(absmax, levels).clamp_(max=MAX_SCALE).masked_fill_(small, 0.0))
        return 0

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        for span, scales, codes in self._pieces(payload, out):
            out[span].view(codes.shape).copy_(codes).mul_(scales)


class NF4Codec(BlockCodec):
    """4-bit codes of the quantiles of a normal distribution; the format and the arithmetic are defined in `nf4`."""

    chunk = array_math.CHUNK_VALUES  # Pieces of many results between, as numpy's.

    def __init__(self, block: int = NF4.block) -> None:
        """Make the codec; there is one `block`.

        Raises:
            CodecError: It is another one.
        """
        if block != NF4.block:
            raise CodecError(f"nf4: block is {NF4.block}, not {block}")
        spec = f"nf4:block={block}"
        super().__init__(spec, NF4, NF4Math(spec, NF4))

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> int:
        if first_non_finite(values) is not None:
            raise self._non_finite(values)
        for span, scales, codes in self._pieces(out, values):
            quantise(values[span].view(len(scales), -1), scales, codes, torch)
        return 0

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        levels = torch.tensor(NF4_LEVELS, device=out.device)
        for span, scales, codes in self._pieces(payload, out):
            dequantise(scales, codes, out[span].view(len(scales), -1), levels, torch)
