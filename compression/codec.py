"""The codec seam: values to bytes and back.

A payload is a function of the values and the codec's spec alone. It says nothing of its own length or format: both
sides know the codec from the run, and the number of values from the group's manifest. Payloads are little-endian.

Every definition here is in IEEE-754 single precision, each operation rounded to nearest even on its own (no fused
multiply-add), so that CPUs, kernels and accelerators agree bit for bit.
"""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.array_math import FORMATS, ArrayMath, FloatMath
from equipoise.compression.blockwise import UNKNOWN, Kind, TensorKernels, clamped
from equipoise.compression.buffers import Buffer, Values, contiguous, plain, shared
from equipoise.compression.choice import INTERPRETER, compiled, kernels
from equipoise.compression.chunks import F32_MAX, first_non_finite, scratch, spans, within
from equipoise.compression.errors import CodecError, NonFiniteError
from equipoise.compression.late_torch import is_tensor, torch

if sys.byteorder != "little":
    raise ImportError("equipoise.compression: payloads are little-endian and this machine is not")


SQUARED_VALUES = 64 * 1024
"""Values that are squared together, a multiple of each granule: few enough to stay in the cache."""


class Codec(ABC):
    """One way for values to travel; immutable, equal to others of the same spec, usable from several threads.

    Subclasses fill in the underscored methods and may rely on what the public ones have checked: dtypes,
    contiguity, exact sizes, alignment, one device. With `math` they need no torch where all they get are arrays.

    Attributes:
        spec: The canonical spec string, all options spelled out: `parse_codec(codec.spec) == codec`.
        alignment: Bytes to which `_encode`, `_decode`, ... need their payload's first byte aligned.
        granule: Values that are encoded together: a payload is the encoded granules, one after another. So, cut at
            multiples of it, a vector is encoded to the same bytes whatever the cut.
        math: The arithmetic on arrays; None if the underscored methods are for arrays, too.
        needs_feedback: Whether payloads leave most values out, so that contributions need error feedback.
        most_members: Members of the largest group that it serves; None if it serves any.
    """

    spec: str
    alignment: int = 4
    granule: int = 1
    math: ArrayMath | None = None
    needs_feedback: bool = False
    most_members: int | None = None

    @property
    def kind(self) -> Kind:
        """The format by which `TensorKernels` know it."""
        return UNKNOWN

    @abstractmethod
    def encoded_size(self, count: int) -> int:
        """Return the exact size in bytes of a payload of `count` values."""

    def encode(self, values: Values, out: Buffer) -> int:
        """Encode `values` into `out`.

        Args:
            values: f32 [n], contiguous, on any device.
            out: Writable, `encoded_size(n)` bytes. On an error its content is undefined.

        Returns:
            How many values were clamped: they lay outside of the format's range, and became its nearest end.

        Raises:
            NonFiniteError: A value is NaN or infinite; names the first.
            CodecError: `values` or `out` has another dtype, shape or size.
        """
        if self.math is not None and isinstance(values, np.ndarray) and not is_tensor(out):
            array = _array(values)
            return self.math.encode(array, self._bytes(out, array.size, written=True))
        values = _vector(values)
        with self._staged(out, values) as target:
            if fused := self._fused(values):
                count = clamped(fused.encode(values, target, self.kind))
                if count is not None:
                    return count
            # The torch operations also say which value is not finite.
            return self._encode(values, target)

    def decode(self, payload: Buffer, out: Values) -> None:
        """Decode `payload` into `out`, f32 [n], contiguous, on any device.

        Raises:
            CodecError: No encoder writes such a payload, or the payload or `out` has another dtype, shape or size. Then
                `out` is undefined.
        """
        if self.math is not None and isinstance(out, np.ndarray) and not is_tensor(payload):
            array = _array(out)
            given = self._bytes(payload, array.size)
            self.math.check(given, array.size)
            self.math.decode(given, array)
            return
        out = _vector(out)
        self.check(payload, out.numel())
        source = self._source(payload, out)
        if fused := self._fused(out):
            fused.decode(source, out, self.kind)
        else:
            self._decode(source, out)

    def begin_encode(self, values: torch.Tensor, payload: torch.Tensor) -> torch.Tensor | int:
        """Start to encode `values`, f32 [n >= 1], into `payload`, uint8 [`encoded_size(n)`], aligned, on their device.

        It is queued on the current stream. Returns the kernel's notes, see `TensorKernels`; where there is no such
        kernel, how many values were clamped.

        Raises:
            NonFiniteError: A value is NaN or infinite, and there is no such kernel.
        """
        values, payload = _vector(values), self._sized(payload, values.numel())
        fused = self._fused(values)
        return fused.encode(values, payload, self.kind) if fused else self._encode(values, payload)

    def begin_decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Start to decode such a payload, which was checked before, into `out`, f32 [n >= 1]."""
        out, payload = _vector(out), self._sized(payload, out.numel())
        fused = self._fused(out)
        fused.decode(payload, out, self.kind) if fused else self._decode(payload, out)

    # A mean is one payload, unless a codec says otherwise.

    def mean_size(self, count: int, contributors: int) -> int:
        """Return the exact size in bytes of the mean that `reduce` makes of so many payloads of `count` values."""
        return self.encoded_size(count)

    def check_mean(self, mean: Buffer, count: int, contributors: int) -> None:
        """Verify that `mean` is the mean of so many payloads of `count` values, all of which decode to finite ones.

        Raises:
            CodecError: See `check`; or it is the mean of another number of contributors.
        """
        self.check(mean, count)

    def decode_mean(self, mean: Buffer, weights: Sequence[float], out: Values) -> None:
        """Decode what `reduce` has made of payloads with these weights into `out`, f32 [n], contiguous, on any device.

        Raises:
            CodecError: See `decode` and `check_mean`.
        """
        self.decode(mean, out)

    def begin_decode_mean(self, mean: torch.Tensor, weights: Sequence[float], out: torch.Tensor) -> None:
        """Start to decode such a mean, which was checked before, on its device; see `begin_decode`."""
        self.begin_decode(mean, out)

    def accumulate(self, payload: Buffer, weight: float, into: Values) -> None:
        """Add `weight` times the decoded `payload` to `into`, f32 [n], contiguous, on any device.

        Exactly `into = f32(into + f32(f32(weight) * decoded))` for every value, whatever the codec. Any bytes of the
        right size decode to something; `check` says whether they are what a codec writes.

        Raises:
            CodecError: `weight` is no finite f32, or `payload` or `into` has another dtype, shape or size.
        """
        check_weight(weight)
        if self.math is not None and isinstance(into, np.ndarray) and not is_tensor(payload):
            array = _array(into)
            self.math.accumulate(self._bytes(payload, array.size), weight, array)
            return
        into = _vector(into)
        self._accumulate(self._source(payload, into), weight, into)

    def reduce(
        self, payloads: Sequence[Buffer], weights: Sequence[float], mean: Buffer, scratch: Values
    ) -> int:
        """Encode the weighted sum of payloads into `mean`; return how many values were clamped.

        The bytes equal those of `accumulate` of each payload in turn into zeros, then `encode`. Some codecs do all in
        one pass; of one that joins the payloads, `decode_mean` adds them up.

        Args:
            payloads: `encoded_size(n)` bytes each.
            weights: One per payload.
            mean: Writable, `mean_size(n, payloads)` bytes, apart from the payloads in memory.
            scratch: f32 [n], contiguous, on the device that computes; its content is undefined afterwards.

        Raises:
            CodecError: A weight is no finite f32, a size or dtype differs, or the sum is not finite.
        """
        if len(weights) != len(payloads):
            raise CodecError(f"{self.spec}: expected {len(payloads)} weights, got {len(weights)}")
        if isinstance(scratch, np.ndarray):
            _array(scratch).fill(0)
        else:
            scratch = _vector(scratch)
            count = self._reduce_at_once(payloads, weights, mean, scratch)
            if count is not None:
                return count
            scratch.zero_()
        for payload, weight in zip(payloads, weights, strict=True):
            self.accumulate(payload, weight, scratch)
        try:
            return self.encode(scratch, mean)
        except NonFiniteError as error:
            raise CodecError(f"{self.spec}: the weighted sum is not finite: {error}") from None

    def check(self, payload: Buffer, count: int) -> None:
        """Verify that `payload` is `count` encoded values, all of which decode to finite ones.

        Raises:
            CodecError: The size differs, or a value is not finite, or a code is one that no encoder writes.
        """
        if self.math is not None and not is_tensor(payload):
            self.math.check(self._bytes(payload, count), count)
        else:
            self._check(self._aligned(self._sized(shared(payload), count)), count)

    def squares(self, payload: Buffer, count: int) -> float:
        """Return the sum of the squares of the `count` values of a payload, to a thousandth.

        It is below 0 if the payload is not sound: the sum of what its codes would be, negated.

        Raises:
            CodecError: The payload is not sound, and has no such sum. See `check`.
        """
        values, total = np.empty(min(count, SQUARED_VALUES), np.float32), 0.0
        given = self._bytes(payload, count)
        for start in range(0, count, SQUARED_VALUES):
            some = values[: count - start]
            at = self.encoded_size(start)
            self.decode(given[at : at + self.encoded_size(some.size)].data, some)
            with np.errstate(over="ignore"):
                square = float(some.dot(some))
            # Beyond the range of f32, whose squares may be infinite.
            total += square if square < math.inf else float(np.square(some, dtype=np.float64).sum())
        return total

    @abstractmethod
    def _encode(self, values: torch.Tensor, out: torch.Tensor) -> int: ...

    @abstractmethod
    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None: ...

    def _accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor) -> None:
        decoded = torch.empty_like(into)
        self._decode(payload, decoded)
        # add_(..., alpha=weight) would fuse the multiplication on CPUs that can.
        into.add_(decoded.mul_(weight))

    def _reduce_at_once(
        self, payloads: Sequence[Buffer], weights: Sequence[float], mean: Buffer, scratch: torch.Tensor
    ) -> int | None:
        """Reduce in one pass; None if no kernel here does, or the sum is not finite."""
        if not (fused := self._fused(scratch)):
            return None
        for weight in weights:
            check_weight(weight)
        sources = [self._source(payload, scratch) for payload in payloads]
        with self._staged(mean, scratch) as target:
            return clamped(fused.reduce(sources, weights, target, scratch.numel(), self.kind))

    def _fused(self, values: torch.Tensor) -> TensorKernels | None:
        if self.kind == UNKNOWN or not values.numel():
            return None
        if values.is_cpu:
            # Only Triton's interpreter has such kernels there, and the choice of others loads numba.
            return kernels().tensors if os.environ.get(INTERPRETER) == "1" else None
        return kernels(str(values.device)).tensors

    def _check(self, payload: torch.Tensor, count: int) -> None:
        if self.math is None:
            raise TypeError(f"{self.spec}: a codec without `math` needs a `_check` of its own")
        self.math.check(payload.cpu().numpy(), count)

    def __eq__(self, other: object) -> bool:
        return self.spec == other.spec if isinstance(other, Codec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return f"<codec {self.spec}>"

    def _bytes(self, buffer: Buffer, count: int, *, written: bool = False) -> NDArray[np.uint8]:
        array, expected = contiguous(buffer, written=written), self.encoded_size(count)
        if array.size != expected:
            raise CodecError(f"{self.spec}: {count} values are {expected} bytes, not {array.size}")
        return array

    def _sized(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        expected = self.encoded_size(count)
        if payload.numel() != expected:
            raise CodecError(f"{self.spec}: {count} values are {expected} bytes, not {payload.numel()}")
        return payload

    def _source(self, payload: Buffer, values: torch.Tensor) -> torch.Tensor:
        return self._aligned(self._sized(shared(payload), values.numel()).to(values.device))

    def _aligned(self, payload: torch.Tensor) -> torch.Tensor:
        return payload if payload.data_ptr() % self.alignment == 0 else payload.clone()

    @contextmanager
    def _staged(self, buffer: Buffer, values: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend the buffer to write to, or aligned memory on the device of `values` that is copied to it at the end."""
        target = self._sized(shared(buffer, written=True), values.numel())
        if target.device == values.device and target.data_ptr() % self.alignment == 0:
            yield target
            return
        staged = torch.empty(target.numel(), dtype=torch.uint8, device=values.device)
        yield staged
        target.copy_(staged)


def check_weight(weight: float) -> None:
    """Raise CodecError unless the weight is a finite f32."""
    if not math.isfinite(weight) or abs(weight) > F32_MAX:
        raise CodecError(f"a weight is a finite f32, not {weight}")


def _array(values: NDArray[np.float32]) -> NDArray[np.float32]:
    if plain(values) is None:
        raise CodecError(
            f"expected a contiguous, writable float32 array of one dimension, got {values.dtype} "
            f"{list(values.shape)}{'' if values.flags.writeable else ', read-only'}"
            f"{'' if values.flags.c_contiguous else ', strided'}"
        )
    return values


def _vector(values: Values) -> torch.Tensor:
    if isinstance(values, np.ndarray):
        return torch.from_numpy(_array(values))
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise CodecError(
            f"expected a contiguous float32 tensor of one dimension, got {values.dtype} {list(values.shape)}"
            f"{'' if values.is_contiguous() else ', strided'}"
        )
    return values.detach()


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
