"""Codecs in Triton, for tensors on a GPU. Importing this module imports triton.

With TRITON_INTERPRET=1 in the environment before that import, the same kernels run on CPU tensors, slowly.

The bytes are those of `blockwise` and `floats`. Five things would change them, and are avoided here:

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

from equipoise.compression import blockwise
from equipoise.compression.blockwise import Kind, TensorKernels

OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}
"""Options of every launch."""

TILE = 1024
"""Values of one program, at least a block: 8 for each of its 128 threads."""

_SCALE_BYTES = tl.constexpr(blockwise.SCALE_BYTES)
_LEVELS = tl.constexpr(blockwise.LEVELS)
_MIN_ABSMAX = tl.constexpr(blockwise.MIN_ABSMAX)
_MAX_SCALE = tl.constexpr(blockwise.MAX_SCALE)
_HALF_EVEN = tl.constexpr(1.5 * 2.0**23)
_MAGNITUDE = tl.constexpr(0x7FFF_FFFF)
_EXPONENT = tl.constexpr(0x7F80_0000)

_WIRE = {torch.bfloat16: torch.int16}
"""How kernels see the values of formats that they convert themselves: Triton's interpreter does not round to bf16."""


@triton.jit
def _quantise(x):
    """Return scales f32 [r], codes int8 [r, block] and whether a row has a value that is not finite, of x f32."""
    top = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 1)
    absmax = top.to(tl.float32, bitcast=True)
    levels = tl.full(absmax.shape, _LEVELS, tl.float32)
    scale = tl.minimum(tl.math.div_rn(absmax, levels), _MAX_SCALE)
    inverse = tl.where(absmax < _MIN_ABSMAX, 0.0, tl.math.div_rn(levels, absmax))
    rounded = (x * inverse[:, None] + _HALF_EVEN) - _HALF_EVEN
    return tl.where(absmax < _MIN_ABSMAX, 0.0, scale), rounded.to(tl.int8), top >= _EXPONENT


@triton.jit
def _encode_int8(values, count, scales, codes, notes, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    left = count - tile * (ROWS * BLOCK)
    row = tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + tile * (ROWS * BLOCK) + at, mask=at < left, other=0.0)
    scale, code, faulty = _quantise(x)
    _store(scales, codes, scale, code, left, BLOCK, ROWS)
    tl.store(notes + tile, -tl.max(faulty.to(tl.int32), 0))


@triton.jit
def _decode_int8(out, count, scales, codes, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    left = count - tile * (ROWS * BLOCK)
    at = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    decoded = _load(scales, codes, left, BLOCK, ROWS)
    tl.store(out + tile * (ROWS * BLOCK) + at, decoded, mask=at < left)


@triton.jit(do_not_specialize=["members"])
def _reduce_int8(
    notes, count, addresses, weights, members, scales, codes, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    left = count - tile * (ROWS * BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for member in range(members):
        address = tl.multiple_of(tl.load(addresses + member), _SCALE_BYTES)
        theirs = address.to(tl.pointer_type(tl.float32)), address.to(tl.pointer_type(tl.int8))
        total += tl.load(weights + member) * _load(theirs[0], theirs[1], left, BLOCK, ROWS)
    scale, code, faulty = _quantise(total)
    _store(scales, codes, scale, code, left, BLOCK, ROWS)
    tl.store(notes + tile, -tl.max(faulty.to(tl.int32), 0))


@triton.jit
def _load(scales, codes, left, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's values of a payload, f32 [r, block], of which `left` are in it or in those behind it.

    `scales` and `codes` are two views of the payload: each block begins with its scale.
    """
    tile = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    scales += tile * (BLOCK // _SCALE_BYTES + 1) + row * (BLOCK // _SCALE_BYTES + 1)
    codes += tile * (BLOCK + _SCALE_BYTES) + _SCALE_BYTES
    scale = tl.load(scales, mask=row * BLOCK < left, other=0.0)
    inside = row[:, None] * BLOCK + column < left
    code = tl.load(codes + row[:, None] * (BLOCK + _SCALE_BYTES) + column, mask=inside, other=0)
    return code.to(tl.float32) * scale[:, None]


@triton.jit
def _store(scales, codes, scale, code, left, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Write this program's scales, f32 [r], and codes, int8 [r, block], to such a payload."""
    tile = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)[None, :]
    scales += tile * (BLOCK // _SCALE_BYTES + 1) + row * (BLOCK // _SCALE_BYTES + 1)
    codes += tile * (BLOCK + _SCALE_BYTES) + _SCALE_BYTES
    tl.store(scales, scale, mask=row * BLOCK < left)
    inside = row[:, None] * BLOCK + column < left
    tl.store(codes + row[:, None] * (BLOCK + _SCALE_BYTES) + column, code, mask=inside)


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
    if isinstance(kind, int):
        _launch(tile, _encode_int8, values, count, *_views(payload), notes, kind, tile // kind)
    else:
        encoded = payload.view(_WIRE.get(kind, kind))
        _launch(tile, _encode_float, values, count, encoded, notes, torch.finfo(kind).max, tile)
    return notes


def decode(payload: torch.Tensor, out: torch.Tensor, kind: Kind) -> None:
    """Start to decode into `out`; see `TensorKernels`."""
    tile = _tile(kind)
    if isinstance(kind, int):
        _launch(tile, _decode_int8, out, out.numel(), *_views(payload), kind, tile // kind)
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
    if isinstance(kind, int):
        _launch(tile, _reduce_int8, *given, *_views(mean), kind, tile // kind)
    else:
        encoded, limit = mean.view(_WIRE.get(kind, kind)), torch.finfo(kind).max
        _launch(tile, _reduce_float, *given, encoded, limit, _alignment(addresses), tile)
    return notes


def _tile(kind: Kind) -> int:
    return max(TILE, kind) if isinstance(kind, int) else TILE


def _views(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 payload as scales, f32, and as codes."""
    words = payload.numel() // blockwise.SCALE_BYTES * blockwise.SCALE_BYTES
    return payload[:words].view(torch.float32), payload.view(torch.int8)


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
