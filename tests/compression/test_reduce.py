"""`Codec.reduce` is what accumulating in turn, encoding and decoding come to, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.compression import Codec, CodecError, parse_codec
from equipoise.compression.blockwise import Kernels, payload_size, planes
from equipoise.compression.torch_kernels import TorchKernels

SPECS = ("fp32", "fp16", "bf16", "int8:block=32", "int8", "int8:block=4096")


def stack_of(codec: Codec, rows: list[torch.Tensor | None], count: int) -> torch.Tensor:
    """Encoded rows one stride after the other; where a row is missing, bytes that decode to nothing good."""
    stride = codec.stride(count)
    stack = torch.full((len(rows) * stride,), 0xFF, dtype=torch.uint8)
    for index, row in enumerate(rows):
        if row is not None:
            codec.encode(row, stack[index * stride :][: codec.encoded_size(count)])
    return stack


def in_turn(
    codec: Codec, stack: torch.Tensor, weights: list[float], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    total, mean = torch.zeros(count), torch.empty(codec.encoded_size(count), dtype=torch.uint8)
    for index, weight in enumerate(weights):
        if weight:
            payload = stack[index * codec.stride(count) :][: mean.numel()]
            codec.accumulate(payload, weight, total)
    codec.encode(total, mean)
    out = torch.empty(count)
    codec.decode(mean, out)
    return mean, out


@settings(deadline=None, max_examples=60)
@given(
    spec=st.sampled_from(SPECS),
    count=st.integers(1, 20_000),
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1 / 3, 0.5, 1.0]), min_size=1, max_size=6),
    magnitude=st.sampled_from([1e-38, 1e-3, 1.0, 1e20]),
    seed=st.integers(0, 2**32),
)
def test_it_equals_the_steps_in_turn(
    spec: str, count: int, weights: list[float], magnitude: float, seed: int
) -> None:
    codec, generator = parse_codec(spec), torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, generator=generator) * magnitude if weight else None for weight in weights]
    stack = stack_of(codec, rows, count)
    mean, out = torch.empty(codec.encoded_size(count), dtype=torch.uint8), torch.full((count,), float("nan"))
    codec.reduce(stack, weights, mean, out)
    expected_mean, expected_out = in_turn(codec, stack, weights, count)
    assert torch.equal(mean, expected_mean)
    assert torch.equal(out.view(torch.int32), expected_out.view(torch.int32))


def test_kernels_agree() -> None:
    numba = pytest.importorskip("numba")
    assert numba
    from equipoise.compression.numba_kernels import NumbaKernels

    count, block, stride, weights = 10_000, 128, 10_320, [0.25, 0.0, 0.75]
    payload = stack_of(parse_codec("int8"), [torch.randn(count), None, torch.randn(count)], count)
    assert payload.numel() == 3 * stride

    def run(kernels: Kernels) -> list[torch.Tensor]:
        mean, out = torch.empty(payload_size(count, block), dtype=torch.uint8), torch.empty(count)
        assert kernels.reduce(payload, stride, weights, mean, out, block)
        return [mean, out]

    for compiled, reference in zip(run(NumbaKernels()), run(TorchKernels()), strict=True):
        assert torch.equal(compiled, reference)


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e-40, -1.0])
def test_unsound_scales_and_codes_are_seen(kernels: str, scale: float) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
        from equipoise.compression.numba_kernels import NumbaKernels

        implementation: Kernels = NumbaKernels()
    else:
        implementation = TorchKernels()
    count, block = 3 * 32 + 5, 32
    payload = torch.zeros(payload_size(count, block), dtype=torch.uint8)
    scales, codes = planes(payload, count, block)
    scales.copy_(torch.tensor([0.0, 1.0, 1e-3, -0.0]))
    codes[-3:] = torch.tensor([-127, 0, 127])
    assert implementation.sound(payload, count, block)
    codes[-1] = -128
    assert not implementation.sound(payload, count, block)
    codes[-1], scales[2] = 0, scale
    assert not implementation.sound(payload, count, block)


@pytest.mark.parametrize("spec", SPECS)
def test_a_stack_of_another_size_is_refused(spec: str) -> None:
    codec = parse_codec(spec)
    mean = torch.empty(codec.encoded_size(100), dtype=torch.uint8)
    with pytest.raises(CodecError, match="expected a stack of 2"):
        codec.reduce(
            torch.empty(2 * codec.stride(100) - 16, dtype=torch.uint8), [1.0, 1.0], mean, torch.empty(100)
        )
    with pytest.raises(CodecError, match="finite f32"):
        codec.reduce(
            torch.empty(codec.stride(100), dtype=torch.uint8), [float("inf")], mean, torch.empty(100)
        )
