"""The codecs int8, nf4 and sparse: codes of 8 or 4 bits, or one byte for many values, with one scale per block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from equipoise.compression import array_math, nf4, sparse
from equipoise.compression.array_math import ArrayMath, CoarseMath, Int8Math, nf4_math, sparse_math
from equipoise.compression.blockwise import (
    LEVELS,
    MAX_SCALE,
    MIN_ABSMAX,
    Blocks,
    Kind,
    pieces,
)
from equipoise.compression.buffers import Buffer, Values, contiguous, plain, raw
from equipoise.compression.choice import compiled
from equipoise.compression.chunks import CHUNK_VALUES, F32_MAX, first_non_finite, scratch
from equipoise.compression.codec import Codec, check_weight
from equipoise.compression.errors import CodecError, NonFiniteError
from equipoise.compression.late_torch import is_tensor, torch

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

    def squares(self, payload: Buffer, count: int) -> float:
        """See `Codec.squares`."""
        short, source = compiled(count), raw(payload)
        found = short.squares(source, count, *self.blocks) if short and source is not None else math.nan
        return super().squares(payload, count) if math.isnan(found) else found

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


class CoarseCodec(BlockCodec):
    """A codec of few bits and bf16 scales; its format and arithmetic are defined in a module, `nf4` or `sparse`."""

    chunk = array_math.CHUNK_VALUES  # Pieces of many results between, as numpy's.
    math: CoarseMath

    def __init__(self, math: CoarseMath) -> None:
        super().__init__(math.spec, math.blocks, math)

    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> int:
        if first_non_finite(values) is not None:
            raise self._non_finite(values)
        for span, scales, codes in self._pieces(out, values):
            rows = values[span].view(len(scales), -1)
            self.math.arithmetic.quantise(rows, scales, codes, self.blocks, torch)
        return 0

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        levels = torch.tensor(self.math.levels, device=out.device)
        for span, scales, codes in self._pieces(payload, out):
            rows = out[span].view(len(scales), -1)
            self.math.arithmetic.dequantise(scales, codes, rows, self.blocks, levels, torch)


class NF4Codec(CoarseCodec):
    """4-bit codes of the quantiles of a normal distribution; the format and the arithmetic are defined in `nf4`."""

    def __init__(self, block: int = nf4.NF4.block) -> None:
        """Make the codec; there is one `block`.

        Raises:
            CodecError: It is another one.
        """
        if block != nf4.NF4.block:
            raise CodecError(f"nf4: block is {nf4.NF4.block}, not {block}")
        super().__init__(nf4_math())


class SparseCodec(CoarseCodec):
    """One value of each group, in one byte; the format and the arithmetic are defined in `sparse`.

    The mean of contributions is the contributions themselves, one payload behind the other: encoded again, it would
    lose most of them. `accumulate` leaves alone what a payload does not hold, so a value of -0 stays -0.
    """

    needs_feedback = True

    def __init__(self, group: int = 64) -> None:
        """Make the codec; `group` is 64 or 32.

        Raises:
            CodecError: It is neither.
        """
        if group not in sparse.GROUPS:
            raise CodecError(f"sparse: group is {' or '.join(map(str, sparse.GROUPS))}, not {group}")
        super().__init__(sparse_math(group))
        self.most_members = sparse.MOST_MEMBERS[group]

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], mean: Buffer, scratch: Values
    ) -> int:
        """Join the payloads in `mean`; see `Codec.reduce`."""
        parts, target = [contiguous(payload) for payload in payloads], contiguous(mean, written=True)
        sizes = [part.size for part in parts]
        if len(weights) != len(parts) or target.size != sum(sizes):
            told = f"{len(parts)} weights and room for {sizes} bytes"
            raise CodecError(f"{self.spec}: expected {told}, got {len(weights)} and {target.size}")
        np.concatenate(parts, out=target)
        return 0

    def mean_size(self, count: int, contributors: int) -> int:
        """Return the bytes of so many contributions; see `Codec.mean_size`."""
        return contributors * self.encoded_size(count)

    def check_mean(self, mean: Buffer, count: int, contributors: int) -> None:
        """Verify each contribution; see `Codec.check_mean`."""
        for payload in self._contributions(mean, count, contributors):
            self.check(payload, count)

    def decode_mean(self, mean: Buffer, weights: Sequence[float], out: Values) -> None:
        """Add up the contributions in turn, each times its weight in f32; see `Codec.decode_mean`."""
        payloads = self._contributions(mean, len(out), len(weights))
        for payload, weight in zip(payloads, weights, strict=True):
            check_weight(weight)
            self.check(payload, len(out))
        out[:] = 0
        for payload, weight in zip(payloads, weights, strict=True):
            self.accumulate(payload, weight, out)

    def begin_decode_mean(self, mean: torch.Tensor, weights: Sequence[float], out: torch.Tensor) -> None:
        """Start to add them up; see `Codec.begin_decode_mean`."""
        payloads, decoded = self._contributions(mean, len(out), len(weights)), torch.empty_like(out)
        out.zero_()
        for payload, weight in zip(payloads, weights, strict=True):
            self.begin_decode(self._aligned(payload), decoded)
            out.add_(decoded.mul_(weight))

    def _contributions(self, mean: Buffer, count: int, contributors: int) -> list[Any]:
        """The contributions of which a mean consists.

        Raises:
            CodecError: It is a mean of another number of them.
        """
        content, size = mean if is_tensor(mean) else contiguous(mean), self.encoded_size(count)
        if len(content) != contributors * size:
            told = (
                f"the mean of {contributors} contributions of {count} values is {contributors * size} bytes"
            )
            raise CodecError(f"{self.spec}: {told}, not {len(content)}")
        return [content[size * at : size * (at + 1)] for at in range(contributors)]
