"""fp32, fp16, bf16: rounding, saturation, what the check finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.compression import CodecError, parse_codec
from equipoise.compression.chunks import CHUNK_VALUES

F32_MAX = torch.finfo(torch.float32).max
LARGEST = {"fp16": torch.finfo(torch.float16).max, "bf16": torch.finfo(torch.bfloat16).max}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def roundtrip(spec: str, values: torch.Tensor) -> tuple[torch.Tensor, int]:
    codec = parse_codec(spec)
    payload = bytearray(codec.encoded_size(values.numel()))
    clamped = codec.encode(values, payload)
    codec.check(payload, values.numel())
    out = torch.empty_like(values)
    codec.decode(payload, out)
    return out, clamped


@given(st.lists(finite, max_size=50))
def test_fp32_is_exact(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    out, clamped = roundtrip("fp32", source)
    assert torch.equal(out.view(torch.int32), source.view(torch.int32))
    assert clamped == 0


@pytest.mark.parametrize(("spec", "relative", "absolute"), [("fp16", 2**-11, 2**-25), ("bf16", 2**-8, 0.0)])
@given(value=finite)
def test_error_is_half_a_step(spec: str, relative: float, absolute: float, value: float) -> None:
    if abs(value) > LARGEST[spec] or (spec == "bf16" and abs(value) < 2**-126):
        return
    out, clamped = roundtrip(spec, torch.tensor([value]))
    assert abs(out.item() - value) <= max(abs(value) * relative, absolute)
    assert clamped == 0


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_saturation_is_clamped_and_counted(spec: str) -> None:
    limit = LARGEST[spec]
    beyond = np.nextafter(np.float32(limit), np.float32(np.inf)).item()
    values = torch.tensor([limit, -limit, beyond, -beyond, F32_MAX, -F32_MAX, 1.0, -0.0])
    out, clamped = roundtrip(spec, values)
    assert out.tolist() == [limit, -limit, limit, -limit, limit, -limit, 1.0, 0.0]
    assert clamped == 4


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_clamped_values_are_counted_over_all_pieces(spec: str) -> None:
    values = torch.zeros(2 * CHUNK_VALUES + 10)
    values[[0, CHUNK_VALUES - 1, CHUNK_VALUES, -1]] = F32_MAX
    assert roundtrip(spec, values)[1] == 4


def test_fp32_has_nothing_to_clamp() -> None:
    values = torch.tensor([F32_MAX, -F32_MAX])
    out, clamped = roundtrip("fp32", values)
    assert torch.equal(out, values)
    assert clamped == 0


@pytest.mark.parametrize("spec", list(DTYPES))
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [0, CHUNK_VALUES, CHUNK_VALUES + 8])
def test_check_names_the_first_value_that_is_not_finite(spec: str, wrong: float, index: int) -> None:
    values = torch.full((CHUNK_VALUES + 9,), torch.finfo(DTYPES[spec]).max).to(DTYPES[spec])
    codec, payload = parse_codec(spec), values.view(torch.uint8)
    codec.check(payload, values.numel())
    values[index] = wrong
    with pytest.raises(CodecError, match=f"{spec}: value {index} of {values.numel()} is {wrong}, not finite"):
        codec.check(payload, values.numel())


@pytest.mark.parametrize(("spec", "count"), [("fp16", 1 << 16), ("bf16", 1 << 16)])
def test_every_pattern_of_bits(spec: str, count: int) -> None:
    codec, dtype = parse_codec(spec), DTYPES[spec]
    patterns = torch.arange(count, dtype=torch.int32).to(torch.int16)
    usable = patterns[patterns.view(dtype).isfinite()].contiguous()
    codec.check(usable.view(torch.uint8), usable.numel())
    values = torch.empty(usable.numel())
    codec.decode(usable.view(torch.uint8), values)
    again = torch.empty_like(usable)
    assert codec.encode(values, again.view(torch.uint8)) == 0
    assert torch.equal(again, usable)
    for pattern in patterns[~patterns.view(dtype).isfinite()]:
        with pytest.raises(CodecError, match="not finite"):
            codec.check(pattern.view(1).view(torch.uint8), 1)
