"""Blockwise int8, fp16 and bf16 compiled by numba, for CPUs. Importing this module imports numba.

Compiled code is kept in numba's cache beside this file (or in the user's cache directory where that is read-only),
so that only a machine's first process compiles; it is trusted like a .pyc.
No fastmath: it would let the compiler fuse and reassociate, and bytes would differ. error_model="numpy" makes division
by zero a value rather than an exception, whose test would keep loops from being vectorised.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from equipoise.compression import blockwise
from equipoise.compression.blockwise import SCALE_BYTES, ArrayKernels

_LEVELS = np.float32(blockwise.LEVELS)
_MAX_SCALE = np.float32(blockwise.MAX_SCALE)
_MIN_ABSMAX = np.float32(blockwise.MIN_ABSMAX)
_MIN_SCALE = np.float32(blockwise.MIN_SCALE)
_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_EXPONENT = np.int32(0x7F80_0000)
_FLOAT_BYTES = 4
_SIGN, _LOW_HALF = np.uint32(0x8000), np.uint32(0x7FFF)
_REBIAS, _INFINITE_HALF = np.uint32(112 << 23), np.uint32(0x7C00)
_SMALLEST_HALF, _HALF_STEP, _ONE_HALF = np.uint32(0x3880_0000), np.float32(2.0**-24), np.float32(0.5)

_F32, _F64, _I64 = numba.float32[::1], numba.float64[::1], numba.int64[::1]
_U8, _U16, _U32 = numba.uint8[::1], numba.uint16[::1], numba.uint32[::1]
_compiled = {"nogil": True, "cache": True, "error_model": "numpy"}


def _pointer_to(kind: Any) -> Any:
    """The function, for compiled code, that makes the pointer that an address, int64, is."""

    @intrinsic
    def pointer(typing_context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return numba.types.CPointer(kind)(numba.int64), generate

    return pointer


LANES = 8
"""Codes that are decoded by one instruction where the values pass by the cache: a register of AVX."""


@intrinsic
def _stream(typing_context, codes, scale, out):  # type: ignore[no-untyped-def]
    """Write LANES products of the codes at an address and a scale to `out`, a multiple of 32, past the cache."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        lanes = [ir.VectorType(kind, LANES) for kind in (ir.IntType(8), ir.IntType(32), ir.FloatType())]
        given, wide, floats = lanes
        source, factor, target = arguments
        values = builder.load(builder.inttoptr(source, given.as_pointer()), align=1)
        values = builder.sitofp(builder.sext(values, wide), floats)
        factors = ir.Constant(floats, ir.Undefined)
        for lane in range(LANES):
            factors = builder.insert_element(factors, factor, ir.Constant(ir.IntType(32), lane))
        store = builder.store(
            builder.fmul(values, factors), builder.inttoptr(target, floats.as_pointer()), align=4 * LANES
        )
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return numba.types.void(numba.int64, numba.float32, numba.int64), generate


@intrinsic
def _streamed(typing_context):  # type: ignore[no-untyped-def]
    """Make other processors see what was streamed before what is written next."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.types.void(), generate


_float_pointer, _bits_pointer, _code_pointer = map(_pointer_to, (numba.float32, numba.int32, numba.int8))


# Arrays of the values at an address, not slices: numba counts references to slices, and reducing takes 20 % longer.


@numba.njit(**_compiled)
def _floats(base, start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_float_pointer(base + start * _FLOAT_BYTES), (count,))


@numba.njit(**_compiled)
def _bits(base, start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_bits_pointer(base + start * _FLOAT_BYTES), (count,))


@numba.njit(**_compiled)
def _codes(base, start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_code_pointer(base + start), (count,))


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64), **_compiled)
def _fits(payload, count, block):  # type: ignore[no-untyped-def]
    size = -(-count // block) * SCALE_BYTES + count
    return payload.size == size and payload.ctypes.data % SCALE_BYTES == 0


# Operations on one block. LLVM vectorises each of these loops, and few loops that do more at a time.


@numba.njit(**_compiled)
def _absmax_bits(values_bits):  # type: ignore[no-untyped-def]
    # Magnitudes of floats order like their bits, and integers have a vectorised maximum; NaN is the greatest.
    top = np.int32(0)
    for i in range(values_bits.size):
        # Without the cast numba widens them to 64 bits.
        top = max(top, np.int32(values_bits[i] & _MAGNITUDE))
    return top


@numba.njit(**_compiled)
def _scale_and_inverse(absmax_bits):  # type: ignore[no-untyped-def]
    absmax = np.int32(absmax_bits).view(np.float32)
    if absmax < _MIN_ABSMAX:
        return _ZERO, _ZERO
    return min(absmax / _LEVELS, _MAX_SCALE), _LEVELS / absmax


@numba.njit(**_compiled)
def _round(values, codes, inverse):  # type: ignore[no-untyped-def]
    for i in range(codes.size):
        codes[i] = np.int8(np.rint(values[i] * inverse))


@numba.njit(**_compiled)
def _spread(codes, out, scale):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = np.float32(codes[i]) * scale


@numba.njit(**_compiled)
def _set_codes(codes, scale, weight, into):  # type: ignore[no-untyped-def]
    for i in range(into.size):
        into[i] = weight * (np.float32(codes[i]) * scale)


@numba.njit(**_compiled)
def _add_codes(codes, scale, weight, into):  # type: ignore[no-untyped-def]
    for i in range(into.size):
        into[i] += weight * (np.float32(codes[i]) * scale)


@numba.njit(**_compiled)
def _lowest(codes):  # type: ignore[no-untyped-def]
    low = np.int8(0)
    for i in range(codes.size):
        low = min(low, codes[i])
    return low


# Operations on a part: block after block, each while it lies in the first-level cache.


@numba.njit(numba.boolean(_F32, _U8, numba.int64), **_compiled)
def _encode(values, payload, block):  # type: ignore[no-untyped-def]
    if not _fits(payload, values.size, block):
        return False
    from_values, at = values.ctypes.data, payload.ctypes.data
    for start in range(0, values.size, block):
        count = min(block, values.size - start)
        top = _absmax_bits(_bits(from_values, start, count))
        if top >= _EXPONENT:
            return False
        _floats(at, 0, 1)[0], inverse = _scale_and_inverse(top)
        _round(_floats(from_values, start, count), _codes(at + SCALE_BYTES, 0, count), inverse)
        at += SCALE_BYTES + block
    return True


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64), **_compiled)
def _sound(payload, count, block):  # type: ignore[no-untyped-def]
    if not _fits(payload, count, block):
        return False
    at, bad = payload.ctypes.data, False
    for start in range(0, count, block):
        scale = _floats(at, 0, 1)[0]
        # NaN compares false, and so counts as bad.
        bad |= not (scale == _ZERO or (scale >= _MIN_SCALE and scale <= _MAX_SCALE))
        bad |= _lowest(_codes(at + SCALE_BYTES, 0, min(block, count - start))) == -128
        at += SCALE_BYTES + block
    return not bad


@numba.njit(numba.boolean(_U8, _F32, numba.int64, numba.boolean), **_compiled)
def _decode(payload, out, block, past_cache):  # type: ignore[no-untyped-def]
    # Two passes, of which the second finds in the second-level cache what the first has read.
    if not _sound(payload, out.size, block):
        return False
    from_out, at = out.ctypes.data, payload.ctypes.data
    for start in range(0, out.size, block):
        scale = _floats(at, 0, 1)[0]
        count = min(block, out.size - start)
        if past_cache and count == block and from_out % (_FLOAT_BYTES * LANES) == 0:
            for i in range(0, block, LANES):
                _stream(at + SCALE_BYTES + i, scale, from_out + _FLOAT_BYTES * (start + i))
        else:
            _spread(_codes(at + SCALE_BYTES, 0, count), _floats(from_out, start, count), scale)
        at += SCALE_BYTES + block
    if past_cache:
        _streamed()
    return True


@numba.njit(numba.boolean(_I64, _F64, _U8, _F32, numba.int64), **_compiled)
def _reduce(addresses, weights, payload, scratch, block):  # type: ignore[no-untyped-def]
    if not _fits(payload, scratch.size, block):
        return False
    shares = weights.astype(np.float32)
    for m in range(shares.size):
        if not np.isfinite(shares[m]) or addresses[m] % SCALE_BYTES:
            return False
    from_scratch, from_payload, at = scratch.ctypes.data, payload.ctypes.data, 0
    for start in range(0, scratch.size, block):
        count = min(block, scratch.size - start)
        total = _floats(from_scratch, 0, count)
        for m in range(shares.size):
            scale = _floats(addresses[m] + at, 0, 1)[0]
            codes = _codes(addresses[m] + at + SCALE_BYTES, 0, count)
            # The first is written, not added to zeros: what differs is the sign of zeros, which no code has.
            if m:
                _add_codes(codes, scale, shares[m], total)
            else:
                _set_codes(codes, scale, shares[m], total)
        top = _absmax_bits(_bits(from_scratch, 0, count))
        if top >= _EXPONENT:
            return False
        _floats(from_payload + at, 0, 1)[0], inverse = _scale_and_inverse(top)
        _round(total, _codes(from_payload + at + SCALE_BYTES, 0, count), inverse)
        at += SCALE_BYTES + block
    return True


# fp16 and bf16, by integers: no product of subnormal numbers, which some processors flush to zero.


@numba.njit(numba.void(_U16, _U32), **_compiled)
def _widen_fp16(words, bits):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        magnitude = np.uint32(words[i]) & _LOW_HALF
        wide = np.uint32((magnitude << 13) + _REBIAS)
        wide += _REBIAS * np.uint32(magnitude >= _INFINITE_HALF)
        tiny = np.float32(np.float32(np.int32(magnitude)) * _HALF_STEP).view(np.uint32)
        chosen = tiny if magnitude < np.uint32(0x400) else wide
        bits[i] = chosen | ((np.uint32(words[i]) & _SIGN) << 16)


@numba.njit(numba.void(_U16, _U32), **_compiled)
def _widen_bf16(words, bits):  # type: ignore[no-untyped-def]
    for i in range(bits.size):
        bits[i] = np.uint32(words[i]) << 16


@numba.njit(numba.int64(_U32, _U16, numba.uint32, numba.boolean), **_compiled)
def _narrow(bits, words, limit, is_fp16):  # type: ignore[no-untyped-def]
    top, clamped = np.uint32(0), np.int64(0)
    for i in range(bits.size):
        magnitude = np.uint32(bits[i] & np.uint32(_MAGNITUDE))
        top = max(top, np.uint32(magnitude))
        clamped += np.int64(magnitude > limit)
        kept = np.uint32(min(magnitude, limit))
        # Half of the last kept place, less 1 unless that place is odd: rounds to nearest, ties to even.
        if is_fp16:  # LLVM makes two loops of this one.
            wide = np.uint32(kept - _REBIAS + np.uint32(0x0FFF) + ((kept >> 13) & np.uint32(1))) >> 13
            # Below the normal numbers the places are those of 0.5, which the processor rounds to.
            tiny = np.float32(kept.view(np.float32) + _ONE_HALF).view(np.uint32) & np.uint32(0xFFFF)
            chosen = tiny if kept < _SMALLEST_HALF else wide
        else:
            chosen = np.uint32(kept + _LOW_HALF + ((kept >> 16) & np.uint32(1))) >> 16
        words[i] = np.uint16(chosen | ((bits[i] >> 16) & _SIGN))
    return -1 if top >= np.uint32(_EXPONENT) else clamped


KERNELS = ArrayKernels(
    encode=_encode,
    decode=_decode,
    sound=_sound,
    reduce=_reduce,
    widen={"fp16": _widen_fp16, "bf16": _widen_bf16},
    narrow={
        "fp16": lambda bits, words, limit: _narrow(bits, words, limit, True),
        "bf16": lambda bits, words, limit: _narrow(bits, words, limit, False),
    },
)
