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

from equipoise.compression.blockwise import LEVELS, MAX_SCALE, MIN_ABSMAX, MIN_SCALE

_LEVELS = np.float32(LEVELS)
_MAX_SCALE = np.float32(MAX_SCALE)
_MIN_ABSMAX = np.float32(MIN_ABSMAX)
_MIN_SCALE = np.float32(MIN_SCALE)
_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_EXPONENT = np.int32(0x7F80_0000)

_GROUP_VALUES = 8192
"""Values whose sum is reduced at a time: 32 KB of fp32."""

_F32, _I32, _I8 = numba.float32[::1], numba.int32[::1], numba.int8[::1]
_compiled = {"nogil": True, "cache": True, "error_model": "numpy"}


@numba.njit(numba.boolean(_F32, _I32, _F32, _I32, _I8, numba.int64), **_compiled)
def _quantise(values, values_bits, scales, scales_bits, codes, block):  # type: ignore[no-untyped-def]
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


@numba.njit(numba.void(_F32, _I8, _F32, numba.int64), **_compiled)
def _dequantise(scales, codes, out, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        scale = scales[b]
        row_codes = codes[b * block : (b + 1) * block]
        row = out[b * block : (b + 1) * block]
        for i in range(row.size):
            row[i] = np.float32(row_codes[i]) * scale


@numba.njit(numba.void(_F32, _I8, numba.float32, _F32, numba.int64), **_compiled)
def _accumulate(scales, codes, weight, into, block):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        scale = scales[b]
        row_codes = codes[b * block : (b + 1) * block]
        row = into[b * block : (b + 1) * block]
        for i in range(row.size):
            row[i] += weight * (np.float32(row_codes[i]) * scale)


@numba.njit(
    numba.boolean(_F32, _I8, numba.int64, _F32, _F32, _I32, _I8, _F32, _I32, numba.int64), **_compiled
)
def _reduce(stack_scales, stack_codes, stride, weights, scales, scales_bits, codes, out, out_bits, block):  # type: ignore[no-untyped-def]
    # A group of blocks at a time, whose sum stays in the first-level cache from the first payload to the decoded mean.
    group = max(_GROUP_VALUES // block, 1) * block
    for start in range(0, codes.size, group):
        stop = min(start + group, codes.size)
        first = start // block
        total = out[start:stop]
        total[:] = _ZERO
        for m in range(weights.size):
            if weights[m] != _ZERO:
                at = m * stride
                of_block = stack_scales[at // 4 + first :]
                from_codes = at + scales.size * 4
                _accumulate(
                    of_block[: -(-total.size // block)],
                    stack_codes[from_codes + start : from_codes + stop],
                    weights[m],
                    total,
                    block,
                )
        last = -(-stop // block)
        if not _quantise(
            total, out_bits[start:stop], scales[first:last], scales_bits[first:last], codes[start:stop], block
        ):
            return False
        _dequantise(scales[first:last], codes[start:stop], total, block)
    return True


@numba.njit(numba.boolean(_F32, _I8), **_compiled)
def _sound(scales, codes):  # type: ignore[no-untyped-def]
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

    def quantise(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, block: int) -> bool:
        """Fill `scales` and `codes`; False, with their content undefined, if a value is not finite."""
        x, s = values.numpy(), scales.numpy()
        return bool(_quantise(x, x.view(np.int32), s, s.view(np.int32), codes.numpy(), block))

    def dequantise(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, block: int) -> None:
        """Fill `out` with the decoded values."""
        _dequantise(scales.numpy(), codes.numpy(), out.numpy(), block)

    def accumulate(
        self, scales: torch.Tensor, codes: torch.Tensor, weight: float, into: torch.Tensor, block: int
    ) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""
        _accumulate(scales.numpy(), codes.numpy(), np.float32(weight), into.numpy(), block)

    def reduce(
        self,
        stack: torch.Tensor,
        stride: int,
        weights: Sequence[float],
        scales: torch.Tensor,
        codes: torch.Tensor,
        out: torch.Tensor,
        block: int,
    ) -> bool:
        """Accumulate the weighted payloads of `stack`, quantise the sum, dequantise that into `out`."""
        payloads, s, total = stack.numpy(), scales.numpy(), out.numpy()
        of_payloads = payloads[: payloads.size // 4 * 4].view(np.float32)
        parts = of_payloads, payloads.view(np.int8), stride, np.array(weights, np.float32)
        return bool(_reduce(*parts, s, s.view(np.int32), codes.numpy(), total, total.view(np.int32), block))

    def sound(self, scales: torch.Tensor, codes: torch.Tensor) -> bool:
        """Whether an encoder could have written these."""
        return bool(_sound(scales.numpy(), codes.numpy()))
