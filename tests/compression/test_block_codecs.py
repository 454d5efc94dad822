"""int8: error bounds, edges of the number range, figures, malformed payloads."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from equipoise.compression import Codec, CodecError, NonFiniteError, parse_codec
from equipoise.compression.block_codecs import BlockCodec, Int8Codec, NF4Codec
from equipoise.compression.blockwise import (
    MAX_SCALE,
    MIN_ABSMAX,
    MIN_SCALE,
    ArrayKernels,
    Blocks,
    pieces,
)
from equipoise.compression.chunks import CHUNK_VALUES
from oracles import codecs as oracle

F32_MAX = torch.finfo(torch.float32).max
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def numba_kernels() -> ArrayKernels:
    pytest.importorskip("numba")
    from equipoise.compression.numba_kernels import KERNELS

    return KERNELS


def encode(values: torch.Tensor, block: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales f32 [b] and codes int8 [n]."""
    codec = Int8Codec(block)
    payload = torch.empty(codec.encoded_size(values.numel()), dtype=torch.uint8)
    codec.encode(values, payload)
    rows = pieces(payload, values.numel(), Blocks(block), values.numel(), torch)
    _, scales, codes = zip(*rows, strict=True)
    return torch.cat([one.reshape(-1) for one in scales]), torch.cat([one.reshape(-1) for one in codes])


def roundtrip(values: torch.Tensor, block: int = 256) -> torch.Tensor:
    codec = Int8Codec(block)
    payload = bytearray(codec.encoded_size(values.numel()))
    codec.encode(values, payload)
    out = torch.empty_like(values)
    codec.decode(payload, out)
    return out


def nrmse(values: torch.Tensor, block: int = 256) -> float:
    return float((roundtrip(values, block) - values).double().norm() / values.double().norm())


@given(st_numpy.arrays(np.float32, st.integers(1, 200), elements=finite), st.sampled_from([32, 64, 128]))
def test_error_is_half_a_step_of_the_block(values: np.ndarray, block: int) -> None:
    out = roundtrip(torch.from_numpy(values), block).numpy().astype(np.float64)
    for start in range(0, len(values), block):
        x = values[start : start + block].astype(np.float64)
        absmax = np.abs(x).max()
        bound = absmax / 254 + absmax * 2.0**-21 if absmax >= MIN_ABSMAX else absmax
        assert (np.abs(out[start : start + block] - x) <= bound).all()


@given(st_numpy.arrays(np.float32, st.integers(0, 200), elements=st.floats(width=32)))
def test_kernels_agree_on_anything(values: np.ndarray) -> None:
    for codec in (Int8Codec(32), NF4Codec()):
        compare_kernels(codec, torch.from_numpy(values))


def compare_kernels(codec: BlockCodec, values: torch.Tensor) -> None:
    size, compiled = codec.encoded_size(values.numel()), numba_kernels()
    payload, same = torch.zeros(size, dtype=torch.uint8), np.zeros(size, np.uint8)
    ok = bool(values.isfinite().all())
    assert compiled.encode(values.numpy(), same, *codec.blocks) == ok
    if not ok:
        with pytest.raises(NonFiniteError):
            codec._encode(values, payload)
        return
    codec._encode(values, payload)
    assert payload.numpy().tobytes() == same.tobytes()
    Codec.check(codec, payload, values.numel())
    assert compiled.sound(same, values.numel(), *codec.blocks)
    decoded, alike = torch.empty_like(values), np.empty_like(values.numpy())
    codec._decode(payload, decoded)
    for past_cache in (False, True):
        alike.fill(7.0)
        assert compiled.decode(same, alike, *codec.blocks, past_cache)
        assert decoded.numpy().tobytes() == alike.tobytes()


def test_half_steps_round_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    scales, codes = encode(values)
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_a_block_is_its_scale_and_its_codes_little_endian() -> None:
    codec = parse_codec("int8:block=32")
    values = torch.cat([torch.full((32,), 254.0), torch.tensor([-127.0])])
    payload = bytearray(codec.encoded_size(33))
    codec.encode(values, payload)
    assert payload == struct.pack("<f32bfb", 2.0, *[127] * 32, 1.0, -127)


def test_blocks_of_zeros_have_scale_zero() -> None:
    values = torch.zeros(600)
    values[256:512] = -0.0
    values[-1] = 1.0
    scales, codes = encode(values)
    assert scales[:2].view(torch.int32).tolist() == [0, 0]
    assert codes.tolist() == [0] * 599 + [127]


@pytest.mark.parametrize(
    "absmax", [1e-45, 1e-38, 1e-36, np.nextafter(np.float32(MIN_ABSMAX), np.float32(0)).item()]
)
def test_blocks_too_small_to_scale_are_zeros(absmax: float) -> None:
    scales, codes = encode(torch.tensor([absmax, -absmax, 0.0]))
    assert scales.view(torch.int32).tolist() == [0]
    assert codes.tolist() == [0, 0, 0]


def test_smallest_block_that_is_scaled() -> None:
    scales, codes = encode(torch.tensor([MIN_ABSMAX, -MIN_ABSMAX / 2]))
    assert scales.item() >= MIN_SCALE >= 2 * torch.finfo(torch.float32).tiny
    assert codes.tolist() == [127, -64]


def test_largest_values_stay_finite() -> None:
    values = torch.tensor([F32_MAX, -F32_MAX, F32_MAX / 2])
    scales, codes = encode(values)
    assert scales.item() == MAX_SCALE == oracle.largest_scale()
    assert codes.tolist() == [127, -127, 64]
    torch.testing.assert_close(roundtrip(values)[:2], values[:2], rtol=1e-6, atol=0)


def test_size() -> None:
    assert [parse_codec("int8").encoded_size(count) for count in (0, 1, 128, 129)] == [0, 5, 132, 137]


@pytest.mark.parametrize(
    ("block", "low", "high"), [(128, 0.006, 0.007), (256, 0.0065, 0.0075), (4096, 0.008, 0.010)]
)
def test_error_on_a_normal_distribution(block: int, low: float, high: float) -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    assert low <= nrmse(values, block) <= high


def test_an_outlier_costs_its_own_block_only() -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    values[12_345] = 1000.0
    out = roundtrip(values)
    error = (out - values).norm() / values.norm()
    assert error <= 0.013
    start = 12_345 // 256 * 256
    others = torch.ones_like(values, dtype=torch.bool)
    others[start : start + 256] = False
    assert (out - values)[others].norm() / values[others].norm() <= 0.0075


@pytest.mark.parametrize(
    "scale",
    [-1.0, torch.nan, torch.inf, -torch.inf, 1e-45, MIN_SCALE / 2, MAX_SCALE * 1.0001, F32_MAX, -1e-45],
)
@pytest.mark.parametrize("index", [0, 3])
def test_check_names_the_faulty_scale(scale: float, index: int) -> None:
    values = torch.ones(1000)
    codec = parse_codec("int8:block=256")
    payload = bytearray(codec.encoded_size(1000))
    codec.encode(values, payload)
    struct.pack_into("<f", payload, codec.encoded_size(256 * index), scale)
    with pytest.raises(CodecError, match=f"the scale of block {index} of 4 is .*; expected 0, or"):
        codec.check(payload, 1000)


@pytest.mark.parametrize("index", [0, 999, CHUNK_VALUES + 5])
def test_check_names_the_code_that_is_none(index: int) -> None:
    codec, count = parse_codec("int8:block=256"), CHUNK_VALUES + 6
    payload = bytearray(codec.encoded_size(count))
    codec.check(payload, count)
    payload[codec.encoded_size(index + 1) - 1] = 0x80
    with pytest.raises(CodecError, match=f"code {index} of {count} is -128; expected -127 to 127"):
        codec.check(payload, count)


def test_extreme_payloads_that_pass_the_check_decode_to_finite_values() -> None:
    codec = parse_codec("int8:block=256")
    payload = struct.pack("<f", MAX_SCALE) + bytes([127, 0x81, 0])
    codec.check(payload, 3)
    out = torch.empty(3)
    codec.decode(payload, out)
    assert out.isfinite().all()
