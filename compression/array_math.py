"""The arithmetic of the codecs in numpy, for processes without torch: the bytes are those of torch and of kernels.

Arrays here are contiguous: values, out, into: f32 [n]; payload: uint8 [`encoded_size(n)`], with any alignment. Each
operation is one of IEEE-754 single precision; numpy fuses none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from equipoise.compression import nf4, sparse
from equipoise.compression.blockwise import (
    LEVELS,
    MAX_SCALE,
    MIN_ABSMAX,
    MIN_SCALE,
    ArrayKernels,
    Blocks,
    Bytes,
    Values,
    pieces,
)
from equipoise.compression.chunks import F32_MAX
from equipoise.compression.errors import CodecError, NonFiniteError

CHUNK_VALUES = 32 * 1024
"""Values per piece: its intermediate results stay in the second-level cache, in memory that is used again."""

_MAGNITUDE = np.int32(0x7FFF_FFFF)


class BlockMath(ABC):
    """A format of blocks; scales and codes are those of `blockwise.pieces`."""

    least_scale: float
    most_scale: float

    def __init__(self, spec: str, blocks: Blocks) -> None:
        self.spec, self.blocks = spec, blocks

    def encode(self, values: Values, payload: Bytes) -> int:
        """Fill `payload`; return how many values were clamped.

        Raises:
            NonFiniteError: A value is NaN or infinite.
        """
        _require_finite(values)
        for span, scales, codes in self._pieces(payload, values.size):
            self._encode(values[span].reshape(len(scales), -1), scales, codes)
        return 0

    def decode(self, payload: Bytes, out: Values) -> None:
        """Fill `out` from a payload that an encoder wrote."""
        for span, scales, codes in self._pieces(payload, out.size):
            self._decode(scales, codes, out[span].reshape(len(scales), -1))

    def accumulate(self, payload: Bytes, weight: float, into: Values) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""
        for span, scales, codes in self._pieces(payload, into.size):
            rows = into[span].reshape(len(scales), -1)
            decoded = np.empty_like(rows)
            self._decode(scales, codes, decoded)
            _add_weighted(decoded, weight, rows)

    def check(self, payload: Bytes, count: int) -> None:
        """Verify that an encoder could have written `payload`.

        Raises:
            CodecError: It could not.
        """
        block, blocks = self.blocks.block, -(-count // self.blocks.block)
        for span, scales, codes in self._pieces(payload, count):
            values = self._scales(scales)
            # NaN compares false, and so counts as faulty.
            sound = (values >= np.float32(self.least_scale)) & (values <= np.float32(self.most_scale))
            faulty = ~((scales == 0) | sound)
            if faulty.any():
                index = int(faulty.argmax())
                raise CodecError(
                    f"{self.spec}: the scale of block {span.start // block + index} of {blocks}"
                    f" is {float(values[index, 0])};"
                    f" expected 0, or {self.least_scale:.4g} to {self.most_scale:.4g}"
                )
            self._check_codes(scales, codes, span, count)

    def _pieces(self, payload: Bytes, count: int) -> Iterator[tuple[slice, Any, Any]]:
        return pieces(payload, count, self.blocks, CHUNK_VALUES, np)

    @abstractmethod
    def _encode(self, rows: Values, scales: Any, codes: Any) -> None: ...

    @abstractmethod
    def _decode(self, scales: Any, codes: Any, out: Values) -> None: ...

    @abstractmethod
    def _scales(self, scales: Any) -> Values:
        """The scales as f32."""

    @abstractmethod
    def _check_codes(self, scales: Any, codes: Any, span: slice, count: int) -> None:
        """Refuse codes that no encoder writes, of `span` of `count` values; see `check`."""


class Int8Math(BlockMath):
    """int8, as `blockwise` defines it."""

    least_scale, most_scale = MIN_SCALE, MAX_SCALE

    def _encode(self, rows: Values, scales: Any, codes: Any) -> None:
        levels = np.float32(LEVELS)
        absmax = np.abs(rows).max(1, keepdims=True)
        small = absmax < np.float32(MIN_ABSMAX)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(small, np.float32(0), levels / absmax)
        codes[...] = np.rint(rows * inverse)
        scales[...] = np.where(small, np.float32(0), np.minimum(absmax / levels, np.float32(MAX_SCALE)))

    def _decode(self, scales: Any, codes: Any, out: Values) -> None:
        np.multiply(codes, scales, out=out)

    def _scales(self, scales: Values) -> Values:
        return scales  # -0.0 is equal to 0, and decodes to the same.

    def _check_codes(self, scales: Any, codes: Any, span: slice, count: int) -> None:
        if codes.min() == -128:
            index = span.start + int(codes.argmin())
            raise CodecError(f"{self.spec}: code {index} of {count} is -128; expected -127 to 127")


class CoarseMath(BlockMath):
    """nf4 or sparse, as the module `arithmetic` defines it; their scales are bf16."""

    least_scale, most_scale = MIN_ABSMAX, nf4.MAX_SCALE

    def __init__(self, spec: str, blocks: Blocks, arithmetic: ModuleType, levels: Values) -> None:
        super().__init__(spec, blocks)
        self.arithmetic, self.levels = arithmetic, levels

    def _encode(self, rows: Values, scales: Any, codes: Any) -> None:
        self.arithmetic.quantise(rows, scales, codes, self.blocks, np)

    def _decode(self, scales: Any, codes: Any, out: Values) -> None:
        with np.errstate(invalid="ignore"):  # A scale that no encoder writes may be an infinity.
            self.arithmetic.dequantise(scales, codes, out, self.blocks, self.levels, np)

    def _scales(self, scales: NDArray[np.int16]) -> Values:
        return nf4.widened(scales, np)  # type: ignore[no-any-return]

    def _check_codes(self, scales: Any, codes: Any, span: slice, count: int) -> None:
        if fault := self.arithmetic.fault(scales, codes, self.blocks, span, count):
            raise CodecError(f"{self.spec}: {fault}")


def nf4_math() -> CoarseMath:
    """The arithmetic of nf4."""
    return CoarseMath(f"nf4:block={nf4.NF4.block}", nf4.NF4, nf4, nf4.LEVELS)


def sparse_math(group: int) -> CoarseMath:
    """The arithmetic of sparse, for one of `sparse.GROUPS`."""
    return CoarseMath(f"sparse:group={group}", sparse.GROUPS[group], sparse, sparse.LEVELS[group])


class Format(NamedTuple):
    """A floating-point format.

    Attributes:
        name: What torch calls it; numpy has no bfloat16.
        size: Bytes of a value.
        limit: The greatest value.
        exponent: Mask of the exponent's bits, all set in NaN and infinities and in nothing else.
    """

    name: str
    size: int
    limit: float
    exponent: int


FORMATS = {
    "fp32": Format("float32", 4, F32_MAX, 0x7F80_0000),
    "fp16": Format("float16", 2, 65504.0, 0x7C00),
    "bf16": Format("bfloat16", 2, float.fromhex("0x1.fep+127"), 0x7F80),
}


class FloatMath:
    """fp32, fp16 or bf16.

    Args:
        spec: The format's name.
        compiled: Returns kernels that convert so many values of fp16 and bf16 as numpy does, in fewer passes, or None.
    """

    def __init__(
        self, spec: str, compiled: Callable[[int], ArrayKernels | None] = lambda count: None
    ) -> None:
        self._spec = spec
        self._name, self._itemsize, limit, self._exponent = FORMATS[spec]
        self._limit = np.float32(limit)
        self._compiled = compiled

    def encode(self, values: Values, payload: Bytes) -> int:
        """See `BlockMath.encode`."""
        if kernels := self._kernels(payload):
            words, limit = payload.view(np.uint16), self._limit.view(np.uint32)
            if (found := kernels.narrow[self._spec](values.view(np.uint32), words, limit)) >= 0:
                return found
        _require_finite(values)
        clamped = 0
        for start in range(0, values.size, CHUNK_VALUES):
            piece = values[start : start + CHUNK_VALUES]
            if self._spec != "fp32":
                clamped += int(np.count_nonzero(np.abs(piece) > self._limit))
                piece = np.clip(piece, -self._limit, self._limit)
            size = self._itemsize
            self._write(piece, payload[start * size : (start + piece.size) * size])
        return clamped

    def decode(self, payload: Bytes, out: Values) -> None:
        """See `BlockMath.decode`."""
        if kernels := self._kernels(payload):
            kernels.widen[self._spec](payload.view(np.uint16), out.view(np.uint32))
        elif self._spec == "bf16":
            bits = out.view(np.uint32)
            bits[...] = payload.view(np.uint16)
            bits <<= 16
        else:
            out[...] = payload.view(self._name)

    def accumulate(self, payload: Bytes, weight: float, into: Values) -> None:
        """See `BlockMath.accumulate`."""
        size, shared = self._itemsize, np.empty(min(into.size, CHUNK_VALUES), np.float32)
        for start in range(0, into.size, CHUNK_VALUES):
            values = into[start : start + CHUNK_VALUES]
            decoded = shared[: values.size]
            self.decode(payload[start * size : (start + values.size) * size], decoded)
            _add_weighted(decoded, weight, values)

    def check(self, payload: Bytes, count: int) -> None:
        """See `BlockMath.check`."""
        words, signed = payload.view(f"u{self._itemsize}"), payload.view(f"i{self._itemsize}")
        exponent, sign = self._exponent, 1 << (8 * self._itemsize - 1)
        step = 4 * CHUNK_VALUES  # There are no intermediate results, so larger pieces fit the cache.
        for start in range(0, count, step):
            piece = slice(start, start + step)
            # The words of values with equal signs order like their magnitudes: signed, a positive one is the greatest;
            # unsigned, a negative one.
            if signed[piece].max() >= exponent or words[piece].max() >= sign | exponent:
                index = start + int(((words[piece] & exponent) == exponent).argmax())
                value = np.empty(1, np.float32)
                self.decode(payload[index * self._itemsize : (index + 1) * self._itemsize], value)
                raise CodecError(f"{self._spec}: value {index} of {count} is {float(value[0])}, not finite")

    def _kernels(self, payload: Bytes) -> ArrayKernels | None:
        """The kernels, if any serve this format and payload: they take aligned and writable memory only."""
        fits = self._itemsize == 2 and payload.flags.writeable and payload.ctypes.data % 2 == 0
        return self._compiled(payload.size // 2) if fits else None

    def _write(self, values: Values, payload: Bytes) -> None:
        if self._spec == "bf16":
            bits = values.view(np.uint32)
            # Half of the last kept place, less 1 unless that place is odd: rounds to nearest, ties to even.
            payload.view(np.uint16)[...] = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
        else:
            payload.view(self._name)[...] = values


ArrayMath = BlockMath | FloatMath
"""The arithmetic of one codec on arrays."""


def _require_finite(values: Values) -> None:
    for start in range(0, values.size, CHUNK_VALUES):
        # Magnitudes of floats order like their bits; a maximum of floats would warn of NaN.
        magnitudes = values[start : start + CHUNK_VALUES].view(np.int32) & _MAGNITUDE
        if magnitudes.max() >= 0x7F80_0000:
            index = start + int((magnitudes >= 0x7F80_0000).argmax())
            raise NonFiniteError(index, values.size, float(values[index]))


def _add_weighted(decoded: Values, weight: float, into: Values) -> None:
    with np.errstate(over="ignore", invalid="ignore"):  # The encoder refuses a sum that is not finite.
        decoded *= np.float32(weight)
        into += decoded
