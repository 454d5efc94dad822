"""Blockwise int8 compiled by numba, for CPUs. Importing this module imports numba.

Compiled code is kept in numba's cache beside this file (or in the user's cache directory where that is read-only),
so that only a machine's first process compiles; it is trusted like a .pyc.
No fastmath: it would let the compiler fuse and reassociate, and bytes would differ. error_model="numpy" makes division
by zero a value rather than an exception, whose test would keep loops from being vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch

from equipoise.compression.blockwise import LEVELS, MAX_SCALE, MIN_ABSMAX, MIN_SCALE, SCALE_BYTES

_LEVELS = np.float32(LEVELS)
_MAX_SCALE = np.float32(MAX_SCALE)
_MIN_ABSMAX = np.float32(MIN_ABSMAX)
_MIN_SCALE = np.float32(MIN_SCALE)
_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_EXPONENT = np.int32(0x7F80_0000)

_GROUP_VALUES = 8192
"""Values whose sum is reduced at a time: 32 KB of fp32."""

_PASS_VALUES = 65_536
"""Values quantised at a time: their 256 KB are still in the second-level cache when the second pass reads them."""

_F32, _I32, _I8, _U8 = numba.float32[::1], numba.int32[::1], numba.int8[::1], numba.uint8[::1]
_compiled = {"nogil": True, "cache": True, "error_model": "numpy"}


@numba.njit(numba.boolean(_F32, _I32, _F32, _I32, _I8, numba.int64), **_compiled)
def _quantise_some(values, values_bits, scales, scales_bits, codes, block):  # type: ignore[no-untyped-def]
    # Three short passes: LLVM vectorises each, but none of them where one loop over the blocks does all three.
    greatest = np.int32(0)
    for b in range(scales.size):
        # Loops from zero over slices are vectorised; over values[start + i] they are not, and take ten times as long.
        bits = values_bits[b * block : (b + 1) * block]
        # Magnitudes of floats order like their bits, and integers have a vectorised maximum; NaN is the greatest.
        top = np.int32(0)
        for i in range(bits.size):
            top = max(top, bits[i] & _MAGNITUDE)
        scales_bits[b] = top
        greatest = max(greatest, top)
    if greatest >= _EXPONENT:
        return False
    inverses = np.empty(scales.size, np.float32)
    for b in range(scales.size):
        absmax = scales[b]
        tiny = absmax < _MIN_ABSMAX
        inverses[b] = _ZERO if tiny else _LEVELS / absmax
        scales[b] = _ZERO if tiny else min(absmax / _LEVELS, _MAX_SCALE)
    for b in range(scales.size):
        inverse = inverses[b]
        row = values[b * block : (b + 1) * block]
        row_codes = codes[b * block : (b + 1) * block]
        for i in range(row.size):
            row_codes[i] = np.int8(np.rint(row[i] * inverse))
    return True


@numba.njit(numba.boolean(_F32, _U8, numba.int64), **_compiled)
def _quantise(values, payload, block):  # type: ignore[no-untyped-def]
    split = -(-values.size // block) * SCALE_BYTES
    scales, codes = payload[:split].view(np.float32), payload[split:].view(np.int8)
    values_bits, scales_bits = values.view(np.int32), scales.view(np.int32)
    some = max(_PASS_VALUES // block, 1) * block
    for start in range(0, values.size, some):
        stop = min(start + some, values.size)
        first, last = start // block, -(-stop // block)
        if not _quantise_some(
            values[start:stop],
            values_bits[start:stop],
            scales[first:last],
            scales_bits[first:last],
            codes[start:stop],
            block,
        ):
            return False
    return True


@numba.njit(numba.void(_F32, _I8, _F32, numba.int64), **_compiled)
def _dequantise_some(scales, codes, out, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        scale = scales[b]
        row_codes = codes[b * block : (b + 1) * block]
        row = out[b * block : (b + 1) * block]
        for i in range(row.size):
            row[i] = np.float32(row_codes[i]) * scale


@numba.njit(numba.void(_U8, _F32, numba.int64), **_compiled)
def _dequantise(payload, out, block):  # type: ignore[no-untyped-def]
    split = -(-out.size // block) * SCALE_BYTES
    _dequantise_some(payload[:split].view(np.float32), payload[split:].view(np.int8), out, block)


@numba.njit(numba.void(_F32, _I8, numba.float32, _F32, numba.int64), **_compiled)
def _accumulate_some(scales, codes, weight, into, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        scale = scales[b]
        row_codes = codes[b * block : (b + 1) * block]
        row = into[b * block : (b + 1) * block]
        for i in range(row.size):
            row[i] += weight * (np.float32(row_codes[i]) * scale)


@numba.njit(numba.void(_U8, numba.float32, _F32, numba.int64), **_compiled)
def _accumulate(payload, weight, into, block):  # type: ignore[no-untyped-def]
    split = -(-into.size // block) * SCALE_BYTES
    _accumulate_some(payload[:split].view(np.float32), payload[split:].view(np.int8), weight, into, block)


@numba.njit(numba.boolean(_U8, numba.int64, _F32, _U8, _F32, numba.int64), **_compiled)
def _reduce(stack, stride, weights, payload, out, block):  # type: ignore[no-untyped-def]
    # A group of blocks at a time, whose sum stays in the first-level cache from the first payload to the decoded mean.
    split = -(-out.size // block) * SCALE_BYTES
    scales, codes = payload[:split].view(np.float32), payload[split:].view(np.int8)
    scales_bits, out_bits = scales.view(np.int32), out.view(np.int32)
    group = max(_GROUP_VALUES // block, 1) * block
    for start in range(0, out.size, group):
        stop = min(start + group, out.size)
        first, last = start // block, -(-stop // block)
        total = out[start:stop]
        total[:] = _ZERO
        for m in range(weights.size):
            if weights[m] != _ZERO:
                row = stack[m * stride : m * stride + payload.size]
                of_blocks = row[first * SCALE_BYTES : last * SCALE_BYTES].view(np.float32)
                of_values = row[split + start : split + stop].view(np.int8)
                _accumulate_some(of_blocks, of_values, weights[m], total, block)
        if not _quantise_some(
            total, out_bits[start:stop], scales[first:last], scales_bits[first:last], codes[start:stop], block
        ):
            return False
        _dequantise_some(scales[first:last], codes[start:stop], total, block)
    return True


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64), **_compiled)
def _sound(payload, count, block):  # type: ignore[no-untyped-def]
    split = -(-count // block) * SCALE_BYTES
    scales, codes = payload[:split].view(np.float32), payload[split:].view(np.int8)
    bad = 0
    for b in range(scales.size):
        # NaN compares false, and so counts as bad.
        bad += not (scales[b] == _ZERO or (scales[b] >= _MIN_SCALE and scales[b] <= _MAX_SCALE))
    low = np.int8(0)
    for i in range(codes.size):
        low = min(low, codes[i])
    return bad == 0 and low > -128


class NumbaKernels:
    """See `blockwise.Kernels`; for tensors on a CPU."""

    name = "numba"

    def quantise(self, values: torch.Tensor, payload: torch.Tensor, block: int) -> bool:
        """Fill `payload`; False, with its content undefined, if a value is not finite."""
        return bool(_quantise(values.numpy(), payload.numpy(), block))

    def dequantise(self, payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
        """Fill `out` with the decoded values."""
        _dequantise(payload.numpy(), out.numpy(), block)

    def accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor, block: int) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""
        _accumulate(payload.numpy(), np.float32(weight), into.numpy(), block)

    def reduce(
        self,
        stack: torch.Tensor,
        stride: int,
        weights: Sequence[float],
        payload: torch.Tensor,
        out: torch.Tensor,
        block: int,
    ) -> bool:
        """Accumulate the weighted payloads of `stack`, quantise the sum, dequantise that into `out`."""
        shares = np.array(weights, np.float32)
        return bool(_reduce(stack.numpy(), stride, shares, payload.numpy(), out.numpy(), block))

    def sound(self, payload: torch.Tensor, count: int, block: int) -> bool:
        """Whether an encoder could have written this."""
        return bool(_sound(payload.numpy(), count, block))
