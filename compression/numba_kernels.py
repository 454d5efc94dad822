"""Blockwise int8, nf4 and sparse, fp16 and bf16, compiled by numba, for CPUs. Importing this module imports numba.

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

from equipoise.compression import blockwise, nf4, sparse
from equipoise.compression.blockwise import ArrayKernels

_LEVELS = np.float32(blockwise.LEVELS)
_MAX_SCALE = np.float32(blockwise.MAX_SCALE)
_MIN_ABSMAX = np.float32(blockwise.MIN_ABSMAX)
_MIN_SCALE = np.float32(blockwise.MIN_SCALE)
_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFF_FFFF)
_EXPONENT = np.int32(0x7F80_0000)
_FLOAT_BYTES = 4
_NF4_LEVELS, _THRESHOLDS, _ZEROS = nf4.LEVELS, nf4.THRESHOLDS, nf4.ZEROS
_SQUARE_STEP = 2.0**-20
_SQUARES = np.rint(np.square(nf4.LEVELS, dtype=np.float64) / _SQUARE_STEP).astype(np.int32)
_NF4_SQUARES = (_SQUARES + _SQUARES[:, None]).ravel()
"""What a byte of two codes adds to a sum of squares, in steps: sums of integers are vectorised."""
_ONE_THRESHOLD = np.float32(sparse.THRESHOLDS[64][0])
_THREE_THRESHOLDS = np.array(sparse.THRESHOLDS[32], np.float32)
_LEVELS_64, _LEVELS_32 = sparse.LEVELS[64], sparse.LEVELS[32]
_MIN_BITS, _MIN_WORD, _MAX_WORD, _INFINITY = nf4.MIN_BITS, nf4.MIN_WORD, nf4.MAX_WORD, nf4.INFINITY
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


SQUARED = 128
"""Codes that are squared at a time."""

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


@intrinsic
def _add_squares(typing_context, codes, factor, sums, lows):  # type: ignore[no-untyped-def]
    """Add `factor` times the squares of SQUARED codes at an address to f64 [8], and take their least into i8 [32].

    Squares of codes are 16 bits, and so are sums of four: no loop that LLVM makes by itself is as fast.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        bits, index = ir.IntType, ir.IntType(32)
        lows8, words, wide = ir.VectorType(bits(8), 32), ir.VectorType(bits(16), 32), ir.VectorType(index, 32)
        floats = ir.VectorType(ir.DoubleType(), 8)
        at, scale, sums_at, lows_at = arguments
        into, low_into = (
            builder.inttoptr(sums_at, floats.as_pointer()),
            builder.inttoptr(lows_at, lows8.as_pointer()),
        )
        low, total = builder.load(low_into, align=1), ir.Constant(words, None)
        for start in range(0, SQUARED, 32):
            place = builder.inttoptr(builder.add(at, ir.Constant(bits(64), start)), lows8.as_pointer())
            some = builder.load(place, align=1)
            low = builder.select(builder.icmp_signed("<", some, low), some, low)
            total = builder.add(total, builder.mul(builder.sext(some, words), builder.sext(some, words)))
        builder.store(low, low_into, align=1)
        folded = builder.zext(total, wide)
        for half in (16, 8):
            ends = (ir.Constant(ir.VectorType(index, half), [*range(at, at + half)]) for at in (0, half))
            nothing = ir.Constant(folded.type, ir.Undefined)
            folded = builder.add(*(builder.shuffle_vector(folded, nothing, end) for end in ends))
        factors = ir.Constant(floats, ir.Undefined)
        for lane in range(8):
            factors = builder.insert_element(factors, scale, ir.Constant(index, lane))
        more = builder.fmul(factors, builder.sitofp(folded, floats))
        builder.store(builder.fadd(builder.load(into, align=8), more), into, align=8)
        return context.get_dummy_value()

    return numba.types.void(numba.int64, numba.float64, numba.int64, numba.int64), generate


_float_pointer, _bits_pointer, _code_pointer, _word_pointer, _byte_pointer = map(
    _pointer_to, (numba.float32, numba.int32, numba.int8, numba.uint16, numba.uint8)
)


# Arrays of the values at an address, not slices: numba counts references to slices, and reducing takes 20 % longer.


@numba.njit(inline="always", **_compiled)
def _address(array):  # type: ignore[no-untyped-def]
    # Signed: numba adds an unsigned integer and a signed one as f64, and each block then waits for conversions.
    return np.int64(array.ctypes.data)


@numba.njit(**_compiled)
def _floats(base, start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_float_pointer(base + start * _FLOAT_BYTES), (count,))


@numba.njit(**_compiled)
def _bits(base, start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_bits_pointer(base + start * _FLOAT_BYTES), (count,))


@numba.njit(**_compiled)
def _codes(base, start, count):  # type: ignore[no-untyped-def]
    return numba.carray(_code_pointer(base + start), (count,))


@numba.njit(**_compiled)
def _word(base):  # type: ignore[no-untyped-def]
    return numba.carray(_word_pointer(base), (1,))


@numba.njit(**_compiled)
def _bytes(base, count):  # type: ignore[no-untyped-def]
    return numba.carray(_byte_pointer(base), (count,))


@numba.njit(**_compiled)
def _scale_bytes(per_byte):  # type: ignore[no-untyped-def]
    return 4 if per_byte == 1 else 2


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64, numba.int64), **_compiled)
def _fits(payload, count, block, per_byte):  # type: ignore[no-untyped-def]
    size = -(-count // block) * _scale_bytes(per_byte) + -(-count // per_byte)
    return payload.size == size and payload.ctypes.data % _scale_bytes(per_byte) == 0


@numba.njit(**_compiled)
def _stride(block, per_byte):  # type: ignore[no-untyped-def]
    return _scale_bytes(per_byte) + block // per_byte


@numba.njit(**_compiled)
def _scale(at, per_byte):  # type: ignore[no-untyped-def]
    if per_byte > 1:
        return np.uint32(np.uint32(_word(at)[0]) << 16).view(np.float32)
    return _floats(at, 0, 1)[0]


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


@numba.njit(**_compiled)
def _write_scale(top, at):  # type: ignore[no-untyped-def]
    """Write the scale, bf16, of a block of that absmax; return the bound of its codes."""
    word = min((top + 0x7FFF + ((top >> 16) & 1)) >> 16, _MAX_WORD) if top >= _MIN_BITS else 0
    _word(at)[0] = word
    return np.int32((word if word else _INFINITY) << 16).view(np.float32)


@numba.njit(**_compiled)
def _write_nf4(values, top, at, codes):  # type: ignore[no-untyped-def]
    bound = _write_scale(top, at)
    for i in range(values.size):
        code = np.int32(0)
        for k in range(_THRESHOLDS.size):
            code += np.int32(values[i] > _THRESHOLDS[k] * bound)
        codes[i] = code
    codes[values.size] = 7  # The nibble without a value, if there is one.
    half = (values.size + 1) // 2
    nibbles = _bytes(at + 2, half)
    for i in range(half):
        nibbles[i] = np.uint8(codes[i] | (codes[half + i] << 4))


@numba.njit(**_compiled)
def _add_nf4(at, weight, into, count, first, table):  # type: ignore[no-untyped-def]
    scale = _scale(at, 2)
    for k in range(table.size):
        table[k] = weight * (_NF4_LEVELS[k] * scale)
    half = (count + 1) // 2
    nibbles, low, high = _bytes(at + 2, half), _floats(into, 0, half), _floats(into, half, count - half)
    if first:
        for i in range(half):
            low[i] = _ZERO
        for i in range(high.size):
            high[i] = _ZERO
    for i in range(high.size):
        low[i] += table[nibbles[i] & 15]
        high[i] += table[nibbles[i] >> 4]
    if high.size < half:
        low[half - 1] += table[nibbles[half - 1] & 15]


@numba.njit(inline="always", **_compiled)
def _first_of(values, top):  # type: ignore[no-untyped-def]
    first = np.int32(values.size)
    for i in range(values.size):
        is_top = np.int32(values[i] & _MAGNITUDE) == top
        first = min(first, np.int32(i) if is_top else np.int32(values.size))
    return first


@numba.njit(inline="always", **_compiled)
def _write_sparse(values, count, at, group, tops):  # type: ignore[no-untyped-def]
    """Encode the block at an address; say whether all values are finite. All groups but the last are of one size."""
    groups, top = -(-count // group), np.int32(0)
    for g in range(count // group):
        tops[g] = _absmax_bits(_bits(values, g * group, group))
        top = max(top, tops[g])
    if count % group:
        tops[groups - 1] = _absmax_bits(_bits(values, count - count % group, count % group))
        top = max(top, tops[groups - 1])
    if top >= _EXPONENT:
        return False
    bound, codes = _write_scale(top, at), _bytes(at + 2, groups)
    for g in range(groups):
        found = np.int32(0)
        for k in range(1 if group == 64 else 3):
            threshold = _ONE_THRESHOLD if group == 64 else _THREE_THRESHOLDS[k]
            found += np.int32(np.int32(tops[g]).view(np.float32) > threshold * bound)
        code = np.int32(0)
        if found:
            if (g + 1) * group <= count:
                index = _first_of(_bits(values, g * group, group), tops[g])
            else:
                index = _first_of(_bits(values, g * group, count - g * group), tops[g])
            below = np.int32(_bits(values, g * group + index, 1)[0] < 0)
            code = index + group * (below + 2 * found)
        codes[g] = np.uint8(code)
    return True


@numba.njit(**_compiled)
def _write_64(values, count, at, tops):  # type: ignore[no-untyped-def]
    return _write_sparse(values, count, at, 64, tops)


@numba.njit(**_compiled)
def _write_32(values, count, at, tops):  # type: ignore[no-untyped-def]
    return _write_sparse(values, count, at, 32, tops)


@numba.njit(**_compiled)
def _add_sparse(at, weight, into, count, group, first):  # type: ignore[no-untyped-def]
    scale, groups = _scale(at, group), -(-count // group)
    codes, values = _bytes(at + 2, groups), _floats(into, 0, count)
    if first:
        for i in range(count):
            values[i] = _ZERO
    for g in range(groups):
        level = _LEVELS_64[codes[g] // 64] if group == 64 else _LEVELS_32[codes[g] // 32]
        place = g * group + codes[g] % group
        if level != _ZERO and place < count:
            values[place] += weight * (level * scale)


@numba.njit(**_compiled)
def _sound_sparse(at, count, group):  # type: ignore[no-untyped-def]
    word, groups = _word(at)[0], -(-count // group)
    codes, any_code = _bytes(at + 2, groups), np.uint8(0)
    if word == 0:
        for g in range(groups):
            any_code |= codes[g]
        return any_code == 0
    return (
        word >= _MIN_WORD and word <= _MAX_WORD and (groups - 1) * group + codes[groups - 1] % group < count
    )


@numba.njit(**_compiled)
def _sound_nf4(at, count):  # type: ignore[no-untyped-def]
    word, nibbles = _word(at)[0], _bytes(at + 2, (count + 1) // 2)
    if word == 0:
        wrong = np.uint8(0)
        for i in range(nibbles.size):
            wrong |= nibbles[i] ^ _ZEROS
        return wrong == 0
    spare = count % 2 == 0 or nibbles[nibbles.size - 1] >> 4 == 7
    return word >= _MIN_WORD and word <= _MAX_WORD and spare


@numba.njit(**_compiled)
def _known(scale):  # type: ignore[no-untyped-def]
    # NaN compares false, and so counts as bad.
    return scale == _ZERO or (scale >= _MIN_SCALE and scale <= _MAX_SCALE)


@numba.njit(**_compiled)
def _sound_int8(at, count):  # type: ignore[no-untyped-def]
    return _known(_scale(at, 1)) and _lowest(_codes(at + _FLOAT_BYTES, 0, count)) > -128


@numba.njit(inline="always", **_compiled)
def _write(values, count, at, per_byte, codes):  # type: ignore[no-untyped-def]
    """Encode the block of values at an address; say whether all are finite."""
    if per_byte == 64:
        return _write_64(values, count, at, codes)
    if per_byte == 32:
        return _write_32(values, count, at, codes)
    top = _absmax_bits(_bits(values, 0, count))
    if top >= _EXPONENT:
        return False
    if per_byte == 2:
        _write_nf4(_floats(values, 0, count), top, at, codes)
    else:
        _floats(at, 0, 1)[0], inverse = _scale_and_inverse(top)
        _round(_floats(values, 0, count), _codes(at + _FLOAT_BYTES, 0, count), inverse)
    return True


@numba.njit(inline="always", **_compiled)
def _add(at, per_byte, weight, into, count, first, table):  # type: ignore[no-untyped-def]
    """Add a weighted block to the values at an address; the `first` is written there."""
    # Not added to zeros: what differs is the sign of zeros, which no code has.
    if per_byte == 2:
        _add_nf4(at, weight, into, count, first, table)
    elif per_byte > 2:
        _add_sparse(at, weight, into, count, per_byte, first)
    elif first:
        _set_codes(_codes(at + _FLOAT_BYTES, 0, count), _scale(at, per_byte), weight, _floats(into, 0, count))
    else:
        _add_codes(_codes(at + _FLOAT_BYTES, 0, count), _scale(at, per_byte), weight, _floats(into, 0, count))


@numba.njit(**_compiled)
def _scratch():  # type: ignore[no-untyped-def]
    """The codes of a block of nf4 and one more, or the absmax of groups, and the weighted levels of a block of nf4."""
    return np.empty(65, np.int32), np.empty(16, np.float32)


# Operations on a part: block after block, each while it lies in the first-level cache.


@numba.njit(inline="always", **_compiled)
def _write_all(values, at, block, per_byte):  # type: ignore[no-untyped-def]
    from_values, stride, (codes, _) = _address(values), _stride(block, per_byte), _scratch()
    for start in range(0, values.size, block):
        if not _write(
            from_values + _FLOAT_BYTES * start, min(block, values.size - start), at, per_byte, codes
        ):
            return False
        at += stride
    return True


@numba.njit(numba.boolean(_F32, _U8, numba.int64, numba.int64), **_compiled)
def _encode(values, payload, block, per_byte):  # type: ignore[no-untyped-def]
    if not _fits(payload, values.size, block, per_byte):
        return False
    if per_byte == 1:  # In one loop for all, int8 takes 12 % longer.
        return _write_all(values, _address(payload), block, 1)
    if per_byte == 2:
        return _write_all(values, _address(payload), block, 2)
    if per_byte == 64:
        return _write_all(values, _address(payload), block, 64)
    return _write_all(values, _address(payload), block, 32)


@numba.njit(numba.boolean(_U8, numba.int64, numba.int64, numba.int64), **_compiled)
def _sound(payload, count, block, per_byte):  # type: ignore[no-untyped-def]
    if not _fits(payload, count, block, per_byte):
        return False
    at, stride, bad = _address(payload), _stride(block, per_byte), False
    for start in range(0, count, block):
        here = min(block, count - start)
        if per_byte == 1:
            bad |= not _sound_int8(at, here)
        else:
            bad |= not (_sound_nf4(at, here) if per_byte == 2 else _sound_sparse(at, here, per_byte))
        at += stride
    return not bad


@numba.njit(**_compiled)
def _squares_nf4(payload, count):  # type: ignore[no-untyped-def]
    at, total = _address(payload), np.float64(0)
    for start in range(0, count, 64):
        scale, codes, steps = (
            np.float64(_scale(at, 2)),
            _bytes(at + 2, (min(64, count - start) + 1) // 2),
            np.int32(0),
        )
        for i in range(codes.size):
            steps = np.int32(steps + _NF4_SQUARES[codes[i]])
        total += scale * scale * steps * _SQUARE_STEP
        at += _stride(64, 2)
    return total


@numba.njit(numba.float64(_U8, numba.int64, numba.int64, numba.int64), **_compiled)
def _squares(payload, count, block, per_byte):  # type: ignore[no-untyped-def]
    if per_byte > 2 or not _fits(payload, count, block, per_byte):
        return np.nan
    if per_byte == 2:
        found = _squares_nf4(payload, count)
        return found if _sound(payload, count, block, per_byte) else -found - 1
    if block % SQUARED or count % block:
        return np.nan
    at, sums, lows, bad = _address(payload), np.zeros(8, np.float64), np.zeros(32, np.int8), False
    for _ in range(count // block):
        scale = _scale(at, 1)
        bad |= not _known(scale)
        at += _FLOAT_BYTES
        for _ in range(0, block, SQUARED):
            _add_squares(at, np.float64(scale) * np.float64(scale), _address(sums), _address(lows))
            at += SQUARED
    return -sums.sum() - 1 if bad or lows.min() == -128 else sums.sum()


@numba.njit(numba.boolean(_U8, _F32, numba.int64, numba.int64, numba.boolean), **_compiled)
def _decode(payload, out, block, per_byte, past_cache):  # type: ignore[no-untyped-def]
    # Two passes, of which the second finds in the second-level cache what the first has read.
    if not _sound(payload, out.size, block, per_byte):
        return False
    from_out, at, (_, table) = _address(out), _address(payload), _scratch()
    stride = _stride(block, per_byte)
    past_cache &= per_byte == 1 and from_out % (_FLOAT_BYTES * LANES) == 0
    for start in range(0, out.size, block):
        count = min(block, out.size - start)
        if past_cache and count == block:
            scale = _scale(at, per_byte)
            for i in range(0, block, LANES):
                _stream(at + _FLOAT_BYTES + i, scale, from_out + _FLOAT_BYTES * (start + i))
        else:
            _add(at, per_byte, np.float32(1), from_out + _FLOAT_BYTES * start, count, True, table)
        at += stride
    if past_cache:
        _streamed()
    return True


@numba.njit(numba.boolean(_U8, numba.float64, _F32, numba.int64, numba.int64), **_compiled)
def _accumulate(payload, weight, into, block, per_byte):  # type: ignore[no-untyped-def]
    share = np.float32(weight)
    if not _fits(payload, into.size, block, per_byte) or not np.isfinite(share):
        return False
    from_into, at, (_, table) = _address(into), _address(payload), _scratch()
    stride = _stride(block, per_byte)
    for start in range(0, into.size, block):
        count = min(block, into.size - start)
        _add(at, per_byte, share, from_into + _FLOAT_BYTES * start, count, False, table)
        at += stride
    return True


@numba.njit(numba.boolean(_I64, _F64, _U8, _F32, numba.int64, numba.int64), **_compiled)
def _reduce(addresses, weights, payload, scratch, block, per_byte):  # type: ignore[no-untyped-def]
    if not _fits(payload, scratch.size, block, per_byte):
        return False
    shares, (codes, table) = weights.astype(np.float32), _scratch()
    for m in range(shares.size):
        if not np.isfinite(shares[m]) or addresses[m] % _scale_bytes(per_byte):
            return False
    from_scratch, from_payload, at, stride = (
        _address(scratch),
        _address(payload),
        0,
        _stride(block, per_byte),
    )
    for start in range(0, scratch.size, block):
        count = min(block, scratch.size - start)
        for m in range(shares.size):
            _add(addresses[m] + at, per_byte, shares[m], from_scratch, count, m == 0, table)
        if not _write(from_scratch, count, from_payload + at, per_byte, codes):
            return False
        at += stride
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
    squares=_squares,
    accumulate=_accumulate,
    reduce=_reduce,
    widen={"fp16": _widen_fp16, "bf16": _widen_bf16},
    narrow={
        "fp16": lambda bits, words, limit: _narrow(bits, words, limit, True),
        "bf16": lambda bits, words, limit: _narrow(bits, words, limit, False),
    },
)
