"""Codecs in Triton, for tensors on a GPU. Importing this module imports triton.

With TRITON_INTERPRET=1 in the environment before that import, the same kernels run on CPU tensors, slowly.

The bytes are those of `blockwise`, `nf4`, `sparse` and `floats`. Five things would change them, and are avoided here:

- `enable_fp_fusion`, which Triton sets by default, contracts a product and a sum: OPTIONS turns it off.
- `/` is an approximate division, and by a constant a multiplication: `tl.math.div_rn` divides.
- Only adding and taking off _HALF_EVEN rounds half to even in PTX and in the interpreter alike.
- A maximum of floats drops NaN: magnitudes are compared as integers, among which NaN is the greatest.
- Contributions are added in their order by one program for each tile: no atomics, and no tree.

`scripts/check_kernels.py` looks for the first two in the PTX, which the interpreter cannot show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from equipoise.compression import blockwise, nf4, sparse
from equipoise.compression.blockwise import Blocks, Kind, TensorKernels

OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
"""Options of every launch."""

TILE = 1024
"""Values of one program, at least a block: 8 for each of its 128 threads."""

_LEVELS = tl.constexpr(blockwise.LEVELS)
_MIN_ABSMAX = tl.constexpr(blockwise.MIN_ABSMAX)
_MAX_SCALE = tl.constexpr(blockwise.MAX_SCALE)
_HALF_EVEN = tl.constexpr(1.5 * 2.0**23)
_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)
_EXPONENT = tl.constexpr(0x7F80_0000)
_MIN_BITS = tl.constexpr(nf4.MIN_BITS)
_MAX_WORD = tl.constexpr(nf4.MAX_WORD)
_INFINITY = tl.constexpr(nf4.INFINITY)
_THRESHOLDS = tl.constexpr(tuple(nf4.THRESHOLDS.tolist()))
_ZEROS_NF4 = tl.constexpr(0x77)
_LEVELS_NF4 = tl.constexpr(tuple(nf4.LEVELS.tolist()))

_THRESHOLDS_64 = tl.constexpr(sparse.THRESHOLDS[64])
_THRESHOLDS_32 = tl.constexpr(sparse.THRESHOLDS[32])
_LEVELS_64 = tl.constexpr(tuple(sparse.LEVELS[64].tolist()))
_LEVELS_32 = tl.constexpr(tuple(sparse.LEVELS[32].tolist()))

_WIRE = {torch.bfloat16: torch.int16}
"""How kernels see the values of formats that they convert themselves: Triton's interpreter does not round to bf16."""


@triton.jit
def _quantise_int8(x):
    """Return scales f32 [r], codes int8 [r, block] and whether a row has a value that is not finite, of x f32."""
    top = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 1)
    absmax = top.to(tl.float32, bitcast=True)
    levels = tl.full(absmax.shape, _LEVELS, tl.float32)
    scale = tl.minimum(tl.math.div_rn(absmax, levels), _MAX_SCALE)
    inverse = tl.where(absmax < _MIN_ABSMAX, 0.0, tl.math.div_rn(levels, absmax))
    rounded = (x * inverse[:, None] + _HALF_EVEN) - _HALF_EVEN
    return tl.where(absmax < _MIN_ABSMAX, 0.0, scale), rounded.to(tl.int8), top >= _EXPONENT


@triton.jit
def _coarse_scale(top):
    """Return scales, the bits of bf16, and the bounds of codes, f32, of blocks of that absmax."""
    word = tl.minimum((top + 0x7FFF + ((top >> 16) & 1)) >> 16, _MAX_WORD)
    word = tl.where(top < _MIN_BITS, 0, word)
    return word, (tl.where(word == 0, _INFINITY, word) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _quantise_sparse(x, PER_BYTE: tl.constexpr):
    """Return such scales int16 [r], codes int8 [r, groups], and whether, of x f32 [r, groups, group]."""
    magnitude, at = x.to(tl.int32, bitcast=True) & _MAGNITUDE, tl.arange(0, PER_BYTE)[None, None, :]
    tops = tl.max(magnitude, 2)
    top = tl.max(tops, 1)
    word, bound = _coarse_scale(top)
    index = tl.min(tl.where(magnitude == tops[:, :, None], at, PER_BYTE), 2)
    below = tl.max(((at == index[:, :, None]) & (x < 0.0)).to(tl.int32), 2)
    found = tl.zeros(tops.shape, tl.int32)
    for k in tl.static_range(1 if PER_BYTE == 64 else 3):
        threshold = _THRESHOLDS_64[k] if PER_BYTE == 64 else _THRESHOLDS_32[k]
        found += (tops.to(tl.float32, bitcast=True) > threshold * bound[:, None]).to(tl.int32)
    code = tl.where(found == 0, 0, index + PER_BYTE * (below + 2 * found))
    return word.to(tl.int16), code.to(tl.int8), top >= _EXPONENT


@triton.jit
def _quantise_nf4(x):
    """Return such scales int16 [r], codes int8 [r, block / 2], and whether, of x f32 [r, 2, block / 2]."""
    top = tl.max(tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 2), 1)
    word, bound = _coarse_scale(top)
    code = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(15):
        code += (x > _THRESHOLDS[k] * bound[:, None, None]).to(tl.int32)
    nibbles = tl.sum(code << (4 * tl.arange(0, 2)[None, :, None]), 1)
    return word.to(tl.int16), nibbles.to(tl.int8), top >= _EXPONENT


@triton.jit
def _places(left, BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr):
    """Return where this tile's values lie, and whether they are in the vector.

    [r, block] of int8, [r, 2, block / 2] of nf4, [r, groups, group] of sparse.
    """
    if PER_BYTE > 2:
        row, groups = (
            tl.arange(0, ROWS)[:, None, None] * BLOCK,
            tl.arange(0, BLOCK // PER_BYTE)[None, :, None],
        )
        at = row + groups * PER_BYTE + tl.arange(0, PER_BYTE)[None, None, :]
        return at, at < left
    elif PER_BYTE == 1:
        at = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        return at, at < left
    else:
        row, column = tl.arange(0, ROWS)[:, None, None] * BLOCK, tl.arange(0, BLOCK // 2)[None, None, :]
        count = tl.minimum(tl.maximum(left - row, 0), BLOCK)
        half = (count + 1) // 2
        at = column + half * tl.arange(0, 2)[None, :, None]
        return row + at, (column < half) & (at < count)


@triton.jit
def _encode_blocks(
    values, count, scales, codes, notes, BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    left = count - tile * (ROWS * BLOCK)
    at, inside = _places(left, BLOCK, PER_BYTE, ROWS)
    x = tl.load(values + tile * (ROWS * BLOCK) + at, mask=inside, other=0.0)
    _store(x, scales, codes, notes, left, BLOCK, PER_BYTE, ROWS)


@triton.jit
def _decode_blocks(
    out, count, scales, codes, BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    left = count - tile * (ROWS * BLOCK)
    at, inside = _places(left, BLOCK, PER_BYTE, ROWS)
    tl.store(out + tile * (ROWS * BLOCK) + at, _load(scales, codes, left, BLOCK, PER_BYTE, ROWS), mask=inside)


@triton.jit(do_not_specialize=["members"])
def _reduce_blocks(
    notes,
    count,
    addresses,
    weights,
    members,
    scales,
    codes,
    BLOCK: tl.constexpr,
    PER_BYTE: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    left = count - tile * (ROWS * BLOCK)
    if PER_BYTE == 1:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
    elif PER_BYTE == 2:
        total = tl.zeros([ROWS, 2, BLOCK // 2], tl.float32)
    else:
        total = tl.zeros([ROWS, BLOCK // PER_BYTE, PER_BYTE], tl.float32)
    for member in range(members):
        address = tl.multiple_of(tl.load(addresses + member), 4 if PER_BYTE == 1 else 2)
        theirs = address.to(tl.pointer_type(scales.dtype.element_ty)), address.to(tl.pointer_type(tl.int8))
        total += tl.load(weights + member) * _load(theirs[0], theirs[1], left, BLOCK, PER_BYTE, ROWS)
    _store(total, scales, codes, notes, left, BLOCK, PER_BYTE, ROWS)


@triton.jit
def _bytes(left, BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr):
    """Return where this tile's scales lie in a payload, [r], and whether they do; and its codes, [r, bytes]."""
    scale: tl.constexpr = 4 if PER_BYTE == 1 else 2
    size: tl.constexpr = scale + BLOCK // PER_BYTE
    tile = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // PER_BYTE)[None, :]
    scales = tile * (size // scale) + row * (size // scale)
    codes = tile * size + scale + row[:, None] * size + column
    return scales, row * BLOCK < left, codes, row[:, None] * BLOCK + column * PER_BYTE < left


@triton.jit
def _load(scales, codes, left, BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's values of a payload, f32, in `_places`; `left` are in it or in those behind it.

    `scales` and `codes` are two views of the payload: each block begins with its scale.
    """
    of_scales, scaled, of_codes, inside = _bytes(left, BLOCK, PER_BYTE, ROWS)
    # The codes behind a short block decode to 0: they must not count in the scale of a mean.
    scale, code = (
        tl.load(scales + of_scales, mask=scaled, other=0),
        tl.load(codes + of_codes, mask=inside, other=_ZEROS_NF4 if PER_BYTE == 2 else 0),
    )
    if PER_BYTE == 1:
        return code.to(tl.float32) * scale[:, None]
    elif PER_BYTE > 2:
        code = code.to(tl.int32) & 255
        level = tl.zeros(code.shape, tl.float32)
        for k in tl.static_range(2, 256 // PER_BYTE):
            level = tl.where(code // PER_BYTE == k, (_LEVELS_64 if PER_BYTE == 64 else _LEVELS_32)[k], level)
        value = level * (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
        chosen = tl.arange(0, PER_BYTE)[None, None, :] == (code % PER_BYTE)[:, :, None]
        return tl.where(chosen, value[:, :, None], 0.0)
    else:
        code = (code.to(tl.int32)[:, None, :] >> (4 * tl.arange(0, 2)[None, :, None])) & 15
        level = tl.full(code.shape, _LEVELS_NF4[0], tl.float32)
        for k in tl.static_range(1, 16):
            level = tl.where(code >= k, _LEVELS_NF4[k], level)
        return level * (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None, None]


@triton.jit
def _store(x, scales, codes, notes, left, BLOCK: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr):
    """Encode values, f32, in `_places`, to such a payload, and note whether all are finite."""
    if PER_BYTE == 1:
        scale, code, faulty = _quantise_int8(x)
    elif PER_BYTE > 2:
        scale, code, faulty = _quantise_sparse(x, PER_BYTE)
    else:
        scale, code, faulty = _quantise_nf4(x)
    of_scales, scaled, of_codes, inside = _bytes(left, BLOCK, PER_BYTE, ROWS)
    tl.store(scales + of_scales, scale, mask=scaled)
    tl.store(codes + of_codes, code, mask=inside)
    tl.store(notes + tl.program_id(0), -tl.max(faulty.to(tl.int32), 0))


@triton.jit
def _widen(encoded):
    """Return encoded values as f32; int16 stands for the bits of bf16."""
    if encoded.dtype == tl.int16:
        return (encoded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return encoded.to(tl.float32)


@triton.jit
def _narrow(x, limit, FORMAT: tl.constexpr):
    """Return x, f32 [n], as FORMAT, and the number that was clamped to the limit, or -1 if one is not finite."""
    magnitude = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    beyond = magnitude.to(tl.float32, bitcast=True) > limit
    noted = tl.where(tl.max(magnitude, 0) >= _EXPONENT, -1, tl.sum(beyond.to(tl.int32), 0))
    clamped = tl.where(beyond, tl.where(x < 0.0, -limit, limit), x)
    if FORMAT == tl.int16:
        # Round to nearest even by integers.
        bits = clamped.to(tl.int32, bitcast=True)
        encoded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        encoded = clamped.to(FORMAT)
    return encoded, noted


@triton.jit
def _encode_float(values, count, encoded, notes, limit, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < count - tile * TILE
    x = tl.load(values + tile * TILE + at, mask=inside, other=0.0)
    narrow, noted = _narrow(x, limit, encoded.dtype.element_ty)
    tl.store(encoded + tile * TILE + at, narrow, mask=inside)
    tl.store(notes + tile, noted)


@triton.jit
def _decode_float(out, count, encoded, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < count - tile * TILE
    values = _widen(tl.load(encoded + tile * TILE + at, mask=inside, other=0))
    tl.store(out + tile * TILE + at, values, mask=inside)


@triton.jit(do_not_specialize=["members"])
def _reduce_float(
    notes,
    count,
    addresses,
    weights,
    members,
    encoded,
    limit,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < count - tile * TILE
    total = tl.zeros([TILE], tl.float32)
    for member in range(members):
        address = tl.load(addresses + member).to(tl.pointer_type(encoded.dtype.element_ty))
        theirs = tl.load(tl.multiple_of(address, ALIGNED) + tile * TILE + at, mask=inside, other=0)
        total += tl.load(weights + member) * _widen(theirs)
    narrow, noted = _narrow(total, limit, encoded.dtype.element_ty)
    tl.store(encoded + tile * TILE + at, narrow, mask=inside)
    tl.store(notes + tile, noted)


def encode(values: torch.Tensor, payload: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Start to encode `values`; see `TensorKernels`."""
    count, tile = values.numel(), _tile(kind)
    notes = _notes(count, values.device, tile)
    if isinstance(kind, Blocks):
        views = _views(payload, kind)
        _launch(tile, _encode_blocks, values, count, *views, notes, *kind, tile // kind.block)
    else:
        encoded = payload.view(_WIRE.get(kind, kind))
        _launch(tile, _encode_float, values, count, encoded, notes, torch.finfo(kind).max, tile)
    return notes


def decode(payload: torch.Tensor, out: torch.Tensor, kind: Kind) -> None:
    """Start to decode into `out`; see `TensorKernels`."""
    tile = _tile(kind)
    if isinstance(kind, Blocks):
        _launch(tile, _decode_blocks, out, out.numel(), *_views(payload, kind), *kind, tile // kind.block)
    else:
        _launch(tile, _decode_float, out, out.numel(), payload.view(_WIRE.get(kind, kind)), tile)


def reduce(
    payloads: Sequence[torch.Tensor], weights: Sequence[float], mean: torch.Tensor, count: int, kind: Kind
) -> torch.Tensor:
    """Start to reduce `payloads`; see `TensorKernels`."""
    tile = _tile(kind)
    addresses, notes = [payload.data_ptr() for payload in payloads], _notes(count, mean.device, tile)
    places = _there(torch.tensor(addresses, dtype=torch.int64, device="cpu"), mean.device)
    shares = _there(torch.tensor(weights, dtype=torch.float32, device="cpu"), mean.device)
    given = (notes, count, places, shares, len(addresses))
    if isinstance(kind, Blocks):
        _launch(tile, _reduce_blocks, *given, *_views(mean, kind), *kind, tile // kind.block)
    else:
        encoded, limit = mean.view(_WIRE.get(kind, kind)), torch.finfo(kind).max
        _launch(tile, _reduce_float, *given, encoded, limit, _alignment(addresses), tile)
    return notes


def _tile(kind: Kind) -> int:
    return max(TILE, kind.block) if isinstance(kind, Blocks) else TILE


def _views(payload: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """A payload of blocks as scales and as codes."""
    words = payload.numel() // blocks.scale_bytes * blocks.scale_bytes
    return payload[:words].view(torch.float32 if blocks.per_byte == 1 else torch.int16), payload.view(
        torch.int8
    )


def _there(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device; from memory that is not pinned, that would wait for all that is queued there."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _notes(count: int, device: torch.device, tile: int) -> torch.Tensor:
    return torch.empty(triton.cdiv(count, tile), dtype=torch.int32, device=device)


def _alignment(addresses: Iterable[int]) -> int:
    """The greatest power of two up to 16 that divides all addresses: as many bytes may be loaded at once."""
    return min([16, *(address & -address for address in addresses)])


def _launch(tile: int, kernel: Any, tensor: torch.Tensor, count: int, *args: object) -> None:
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(tensor):
        kernel[(triton.cdiv(count, tile),)](tensor, count, *args, **OPTIONS)


KERNELS = TensorKernels(encode, decode, reduce)
