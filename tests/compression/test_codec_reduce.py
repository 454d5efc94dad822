"""`Codec.reduce` is what accumulating in turn, encoding and decoding come to, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.compression import (
    Codec,
    CodecError,
    NonFiniteError,
    kernels,
    parse_codec,
    unwrapped,
)
from equipoise.compression.blockwise import payload_size, planes
from equipoise.compression.int8 import Int8Codec

SPECS = ("fp32", "fp16", "bf16", "int8:block=32", "int8", "int8:block=4096")


def encoded(codec: Codec, values: torch.Tensor) -> memoryview:
    payload = memoryview(bytearray(codec.encoded_size(values.numel())))
    codec.encode(values, payload)
    return payload


def in_turn(
    codec: Codec, payloads: Sequence[memoryview | None], weights: list[float], own: torch.Tensor
) -> tuple[bytes, torch.Tensor]:
    """The mean, encoded and decoded, one step after the other."""
    total, out = torch.zeros(own.numel()), torch.empty(own.numel())
    for payload, weight in zip(payloads, weights, strict=True):
        if weight:
            codec.accumulate(encoded(codec, own) if payload is None else payload, weight, total)
    mean = encoded(codec, total)
    codec.decode(mean, out)
    return bytes(mean), out


@pytest.fixture(params=["torch", "numba"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each choice of kernels in turn."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("EQUIPOISE_KERNELS", request.param)
    kernels.cache_clear()
    yield request.param
    kernels.cache_clear()


@pytest.mark.usefixtures("chosen")
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec=st.sampled_from(SPECS),
    count=st.integers(1, 20_000),
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1 / 3, 0.5, 1.0]), min_size=1, max_size=6),
    ours=st.none() | st.integers(0, 5),
    arrays=st.booleans(),
    magnitude=st.sampled_from([1e-38, 1e-3, 1.0, 1e20]),
    seed=st.integers(0, 2**32),
)
def test_it_equals_the_steps_in_turn(
    spec: str, count: int, weights: list[float], ours: int | None, arrays: bool, magnitude: float, seed: int
) -> None:
    codec, generator = parse_codec(spec), torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, generator=generator) * magnitude for _ in range(len(weights) + 1)]
    own = rows.pop()
    payloads = [
        None if index == ours or not weight else encoded(codec, row)
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True))
    ]
    expected_mean, expected_out = in_turn(codec, payloads, weights, own)
    mean, out = memoryview(bytearray(codec.encoded_size(count))), torch.full((count,), float("nan"))
    before = own.clone()
    as_given = unwrapped if arrays else torch.Tensor.detach
    codec.reduce(payloads, weights, as_given(own), mean, as_given(out))
    assert bytes(mean) == expected_mean
    assert torch.equal(out.view(torch.int32), expected_out.view(torch.int32))
    assert torch.equal(own, before)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_payloads_that_are_not_aligned_or_not_writable_are_reduced_like_others(spec: str) -> None:
    codec, own = parse_codec(spec), torch.randn(1000, generator=torch.Generator().manual_seed(5))
    payload = encoded(codec, own.flip(0))
    room = bytearray(len(payload) + 4)
    expected = in_turn(codec, [payload, None], [0.25, 0.75], own)
    for shift in range(4):
        shifted = memoryview(room)[shift : shift + len(payload)]
        shifted[:] = payload
        for each in (shifted, bytes(payload)):
            mean, out = (
                memoryview(bytearray(len(room)))[shift : shift + len(payload)],
                np.empty(1000, np.float32),
            )
            codec.reduce([each, None], [0.25, 0.75], unwrapped(own), mean, out)
            assert bytes(mean) == expected[0]
            assert torch.equal(torch.from_numpy(out), expected[1])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("index", "wrong"), [(0, torch.nan), (999, torch.inf), (500, -torch.inf)])
@pytest.mark.usefixtures("chosen")
def test_own_values_that_are_not_finite_are_named(spec: str, index: int, wrong: float) -> None:
    codec, own = parse_codec(spec), torch.ones(1000)
    payload = encoded(codec, own)
    own[index] = wrong
    mean, out = memoryview(bytearray(len(payload))), torch.empty(1000)
    for values, target in ((own, out), (unwrapped(own), unwrapped(out))):
        with pytest.raises(NonFiniteError, match=f"value {index} of 1000 is {wrong}") as caught:
            codec.reduce([payload, None], [0.5, 0.5], values, mean, target)
        assert caught.value.index == index
        codec.reduce([payload, None], [1.0, 0.0], values, mean, target)
        assert torch.equal(out, torch.ones(1000))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_a_sum_that_is_not_finite_is_no_fault_of_our_values(spec: str) -> None:
    codec, own = parse_codec(spec), torch.full((100,), torch.finfo(torch.float32).max)
    mean = memoryview(bytearray(codec.encoded_size(100)))
    weights = [1e38, 1e38]
    with pytest.raises(CodecError, match="the weighted sum is not finite") as caught:
        codec.reduce([encoded(codec, own), None], weights, unwrapped(own), mean, np.empty(100, np.float32))
    assert not isinstance(caught.value, NonFiniteError)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_what_does_not_fit_is_refused(spec: str) -> None:
    codec, own = parse_codec(spec), np.ones(100, np.float32)
    size = codec.encoded_size(100)
    payload, mean, out = memoryview(bytearray(size)), memoryview(bytearray(size)), np.empty(100, np.float32)
    for weight in (float("inf"), float("nan"), 1e39):
        with pytest.raises(CodecError, match="finite f32"):
            codec.reduce([payload], [weight], own, mean, out)
    with pytest.raises(CodecError, match="expected 100 own values on cpu, got 99"):
        codec.reduce([None], [1.0], own[:99], mean, out)
    with pytest.raises(CodecError, match="expected 1 weights, got 2"):
        codec.reduce([payload], [0.5, 0.5], own, mean, out)
    for short in (payload[:-1], memoryview(bytearray(size + 4))):
        with pytest.raises(CodecError, match="100 values are"):
            codec.reduce([short], [1.0], own, mean, out)
        with pytest.raises(CodecError, match="100 values are"):
            codec.reduce([payload], [1.0], own, short, out)
    for values in (np.ones(100), np.ones(200, np.float32)[::2], np.ones((10, 10), np.float32)):
        with pytest.raises(
            CodecError, match="expected a contiguous, writable float32 array of one dimension"
        ):
            codec.reduce([payload], [1.0], own, mean, values)


def test_what_travels_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on a CPU and the memory of a pool go to compiled kernels as they are."""
    pytest.importorskip("numba")
    for name in ("encode", "decode", "check", "reduce"):
        monkeypatch.setattr(Codec, name, None)
    codec, own, out = parse_codec("int8"), np.ones(1000, np.float32), np.empty(1000, np.float32)
    payload, mean = (memoryview(bytearray(codec.encoded_size(1000))) for _ in range(2))
    codec.encode(own, payload)
    codec.check(payload, 1000)
    codec.reduce([payload, None, None], [0.5, 0.5, 0.0], own, mean, out)
    codec.decode(mean, out)
    assert (out == 1).all()


@pytest.mark.parametrize("name", ["torch", "numba"])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e-40, -1.0])
def test_unsound_scales_and_codes_are_seen(name: str, scale: float) -> None:
    def sound(payload: torch.Tensor, count: int, block: int) -> bool:
        if name == "torch":
            try:
                Codec.check(Int8Codec(block), payload, count)
            except CodecError:
                return False
            return True
        pytest.importorskip("numba")
        from equipoise.compression.numba_kernels import KERNELS

        return KERNELS.sound(payload.numpy(), count, block)

    count, block = 3 * 32 + 5, 32
    payload = torch.zeros(payload_size(count, block), dtype=torch.uint8)
    scales, codes = planes(payload, count, block)
    scales.copy_(torch.tensor([0.0, 1.0, 1e-3, -0.0]))
    codes[-3:] = torch.tensor([-127, 0, 127])
    assert sound(payload, count, block)
    codes[-1] = -128
    assert not sound(payload, count, block)
    codes[-1], scales[2] = 0, scale
    assert not sound(payload, count, block)
