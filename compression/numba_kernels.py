"""Blockwise int8 compiled by numba, for CPUs. Importing this module imports numba.

Compiled code is kept in numba's cache beside this file (or in the user's cache directory where that is read-only),
so that only a machine's first process compiles; it is trusted like a .pyc.
No fastmath: it would let the compiler fuse and reassociate, and bytes would differ. error_model="numpy" makes division
by zero a value rather than an exception, whose test would keep loops from being vectorised.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba.core import cgutils
from numba.core.cgutils import ir
from numba.extending import intrinsic

from equipoise.compression.blockwise import (
    LEVELS,
    MAX_SCALE,
    MIN_ABSMAX,
    MIN_SCALE,
    OWN_ADDRESS,
    SCALE_BYTES,
    ArrayKernels,
)

_LEVELS = np.float32(LEVELS)
_MAX_SCALE = np.float32(MAX_SCALE)
_MIN_ABSMAX = np.float32(MIN_ABSMAX)
_MIN_SCALE = np.float32(MIN_SCALE)
_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_EXPONENT = np.int32(0x7F80_0000)

_GROUP_VALUES = 32_768
"""Values whose sum is reduced at a time: their 128 KB stay in the second-level cache. (Smaller groups, down to what the
first level holds, read so little of each payload in one go that they wait for memory: 10 % slower.)"""

_PASS_VALUES = 65_536
"""Values quantised at a time: their 256 KB are still in the second-level cache when the second pass reads them."""

_AHEAD_BYTES = 4096
"""How far ahead of the values at work memory is asked for more: processors do so by themselves, but begin anew at each
page and whenever they come back to a payload. (Reducing takes 20 % less, encoding 4 %.)"""

_LINE_BYTES = 64

_READ_INTO_ALL_CACHES_DATA = 0, 3, 1
"""What `llvm.prefetch` is told."""

_F32, _I32, _I8, _U8 = numba.float32[::1], numba.int32[::1], numba.int8[::1], numba.uint8[::1]
_I64, _F64 = numba.int64[::1], numba.float64[::1]
_compiled = {"nogil": True, "cache": True, "error_model": "numpy"}


@intrinsic
def _pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """The pointer that an address, int64, is."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return numba.types.CPointer(numba.uint8)(numba.int64), generate


@intrinsic
def _prefetch_line(typing_context, address):  # type: ignore[no-untyped-def]
    """Ask for what is at an address, int64, which may be none of ours: it is a hint, and never a fault."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        place = builder.inttoptr(arguments[0], cgutils.voidptr_t)
        builder.call(prefetch, [place, *(number(option) for option in _READ_INTO_ALL_CACHES_DATA)])
        return context.get_dummy_value()

    return numba.void(numba.int64), generate


@numba.njit(numba.void(numba.int64, numba.int64), **_compiled)
def _prefetch(start, size):  # type: ignore[no-untyped-def]
    for line in range(start, start + size, _LINE_BYTES):
        _prefetch_line(line)


@numba.njit(numba.int64(_U8), **_compiled)
def _address(payload):  # type: ignore[no-untyped-def]
    return payload.ctypes.data


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64), **_compiled)
def _fits(payload, count, block):  # type: ignore[no-untyped-def]
    size = -(-count // block) * SCALE_BYTES + count
    return payload.size == size and payload.ctypes.data % SCALE_BYTES == 0


@numba.njit(numba.boolean(_I32, _F32, _I32, _F32, numba.int64), **_compiled)
def _measure(values_bits, scales, scales_bits, inverses, block):  # type: ignore[no-untyped-def]
    """Fill scales and inverses; False if a value is not finite."""
    greatest = np.int32(0)
    ahead = values_bits.ctypes.data + _AHEAD_BYTES
    for b in range(scales.size):
        _prefetch(ahead + b * block * values_bits.itemsize, block * values_bits.itemsize)
        # Loops from zero over slices are vectorised; over values[start + i] they are not, and take ten times as long.
        bits = values_bits[b * block : (b + 1) * block]
        # Magnitudes of floats order like their bits, and integers have a vectorised maximum; NaN is the greatest.
        top = np.int32(0)
        for i in range(bits.size):
            # Without the cast numba widens them to 64 bits.
            top = max(top, np.int32(bits[i] & _MAGNITUDE))
        scales_bits[b] = top
        greatest = max(greatest, top)
    if greatest >= _EXPONENT:
        return False
    for b in range(scales.size):
        absmax = scales[b]
        tiny = absmax < _MIN_ABSMAX
        inverses[b] = _ZERO if tiny else _LEVELS / absmax
        scales[b] = _ZERO if tiny else min(absmax / _LEVELS, _MAX_SCALE)
    return True


@numba.njit(numba.boolean(_F32, _I32, _F32, _I32, _F32, _I8, numba.int64), **_compiled)
def _quantise_some(values, values_bits, scales, scales_bits, inverses, codes, block):  # type: ignore[no-untyped-def]
    # Three short passes: LLVM vectorises each, but none of them where one loop over the blocks does all three.
    if not _measure(values_bits, scales, scales_bits, inverses, block):
        return False
    for b in range(scales.size):
        inverse = inverses[b]
        row = values[b * block : (b + 1) * block]
        row_codes = codes[b * block : (b + 1) * block]
        for i in range(row.size):
            row_codes[i] = np.int8(np.rint(row[i] * inverse))
    return True


@numba.njit(numba.boolean(_F32, _U8, numba.int64), **_compiled)
def _encode(values, payload, block):  # type: ignore[no-untyped-def]
    if not _fits(payload, values.size, block):
        return False
    split = -(-values.size // block) * SCALE_BYTES
    scales, codes = payload[:split].view(np.float32), payload[split:].view(np.int8)
    values_bits, scales_bits = values.view(np.int32), scales.view(np.int32)
    some = max(_PASS_VALUES // block, 1) * block
    inverses = np.empty(some // block, np.float32)
    for start in range(0, values.size, some):
        stop = min(start + some, values.size)
        first, last = start // block, -(-stop // block)
        if not _quantise_some(
            values[start:stop],
            values_bits[start:stop],
            scales[first:last],
            scales_bits[first:last],
            inverses,
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


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64), **_compiled)
def _sound(payload, count, block):  # type: ignore[no-untyped-def]
    if not _fits(payload, count, block):
        return False
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


@numba.njit(numba.boolean(_U8, _F32, numba.int64), **_compiled)
def _decode(payload, out, block):  # type: ignore[no-untyped-def]
    # Two passes, of which the second finds in the second-level cache what the first has read.
    if not _sound(payload, out.size, block):
        return False
    _dequantise(payload, out, block)
    return True


@numba.njit(numba.void(_F32, _I8, numba.float32, _F32, numba.int64), **_compiled)
def _accumulate_some(scales, codes, weight, into, block):  # type: ignore[no-untyped-def]
    ahead = codes.ctypes.data + _AHEAD_BYTES
    for b in range(scales.size):
        _prefetch(ahead + b * block, block)
        scale = scales[b]
        row_codes = codes[b * block : (b + 1) * block]
        row = into[b * block : (b + 1) * block]
        for i in range(row.size):
            row[i] += weight * (np.float32(row_codes[i]) * scale)


@numba.njit(numba.void(_U8, numba.float32, _F32, numba.int64), **_compiled)
def _accumulate(payload, weight, into, block):  # type: ignore[no-untyped-def]
    split = -(-into.size // block) * SCALE_BYTES
    _accumulate_some(payload[:split].view(np.float32), payload[split:].view(np.int8), weight, into, block)


@numba.njit(numba.boolean(_F32, _I32, _F32, _I32, _F32, numba.float32, _F32, numba.int64), **_compiled)
def _accumulate_own(values, values_bits, scales, scales_bits, inverses, weight, into, block):  # type: ignore[no-untyped-def]
    """Add the weighted values as they would be decoded from their encoding; False if one is not finite."""
    if not _measure(values_bits, scales, scales_bits, inverses, block):
        return False
    for b in range(scales.size):
        scale, inverse = scales[b], inverses[b]
        of_block = values[b * block : (b + 1) * block]
        row = into[b * block : (b + 1) * block]
        for i in range(row.size):
            row[i] += weight * (np.rint(of_block[i] * inverse) * scale)
    return True


@numba.njit(numba.boolean(_I64, _F64, _F32, _U8, _F32, numba.int64), **_compiled)
def _reduce(addresses, weights, own, payload, out, block):  # type: ignore[no-untyped-def]
    if not _fits(payload, out.size, block):
        return False
    shares = weights.astype(np.float32)
    for m in range(shares.size):
        if not np.isfinite(shares[m]) or addresses[m] % SCALE_BYTES:
            return False
        if shares[m] != _ZERO and addresses[m] == OWN_ADDRESS and own.size != out.size:
            return False
    # A group of blocks at a time, whose sum stays in a cache from the first payload to the decoded mean.
    split = -(-out.size // block) * SCALE_BYTES
    scales, codes = payload[:split].view(np.float32), payload[split:].view(np.int8)
    scales_bits, out_bits, own_bits = scales.view(np.int32), out.view(np.int32), own.view(np.int32)
    group = max(_GROUP_VALUES // block, 1) * block
    inverses = np.empty(group // block, np.float32)
    for start in range(0, out.size, group):
        stop = min(start + group, out.size)
        first, last = start // block, -(-stop // block)
        total = out[start:stop]
        total[:] = _ZERO
        for m in range(shares.size):
            if shares[m] == _ZERO:
                continue
            if addresses[m] == OWN_ADDRESS:
                if not _accumulate_own(
                    own[start:stop],
                    own_bits[start:stop],
                    scales[first:last],
                    scales_bits[first:last],
                    inverses,
                    shares[m],
                    total,
                    block,
                ):
                    return False
                continue
            row = numba.carray(_pointer(addresses[m]), (payload.size,))
            of_blocks = row[first * SCALE_BYTES : last * SCALE_BYTES].view(np.float32)
            of_values = row[split + start : split + stop].view(np.int8)
            _accumulate_some(of_blocks, of_values, shares[m], total, block)
        if not _quantise_some(
            total,
            out_bits[start:stop],
            scales[first:last],
            scales_bits[first:last],
            inverses,
            codes[start:stop],
            block,
        ):
            return False
        _dequantise_some(scales[first:last], codes[start:stop], total, block)
    return True


class NumbaKernels:
    """See `blockwise.Kernels`; for tensors on a CPU."""

    name = "numba"
    arrays = ArrayKernels(encode=_encode, decode=_decode, sound=_sound, reduce=_reduce, address=_address)

    def quantise(self, values: torch.Tensor, payload: torch.Tensor, block: int) -> bool:
        """Fill `payload`; False, with its content undefined, if a value is not finite."""
        return bool(_encode(values.numpy(), payload.numpy(), block))

    def dequantise(self, payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
        """Fill `out` with the decoded values."""
        _dequantise(payload.numpy(), out.numpy(), block)

    def accumulate(self, payload: torch.Tensor, weight: float, into: torch.Tensor, block: int) -> None:
        """Add f32(f32(weight) * decoded) to `into`."""
        _accumulate(payload.numpy(), np.float32(weight), into.numpy(), block)

    def sound(self, payload: torch.Tensor, count: int, block: int) -> bool:
        """Whether an encoder could have written this."""
        return bool(_sound(payload.numpy(), count, block))
