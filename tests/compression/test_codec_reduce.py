"""`Codec.reduce` is what accumulating in turn and encoding come to, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipoise.compression import Codec, CodecError, NonFiniteError, kernels, parse_codec
from equipoise.compression.blockwise import Blocks, pieces

SPECS = ("fp32", "fp16", "bf16", "int8:block=32", "int8", "int8:block=4096", "nf4")


def room(codec: Codec, count: int) -> memoryview:
    return memoryview(bytearray(codec.encoded_size(count)))


def encoded(codec: Codec, values: torch.Tensor) -> memoryview:
    payload = room(codec, values.numel())
    codec.encode(values, payload)
    return payload


def in_turn(codec: Codec, payloads: Sequence[memoryview], weights: list[float], count: int) -> bytes:
    """The mean, one step after the other."""
    total = torch.zeros(count)
    for payload, weight in zip(payloads, weights, strict=True):
        codec.accumulate(payload, weight, total)
    return bytes(encoded(codec, total))


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
    arrays=st.booleans(),
    magnitude=st.sampled_from([1e-38, 1e-3, 1.0, 1e20]),
    seed=st.integers(0, 2**32),
)
def test_a_reduction_equals_the_steps_in_turn(
    spec: str, count: int, weights: list[float], arrays: bool, magnitude: float, seed: int
) -> None:
    codec, generator = parse_codec(spec), torch.Generator().manual_seed(seed)
    payloads = [encoded(codec, torch.randn(count, generator=generator) * magnitude) for _ in weights]
    before = [bytes(payload) for payload in payloads]
    mean, scratch = room(codec, count), torch.full((count,), float("nan"))
    codec.reduce(payloads, weights, mean, scratch.numpy() if arrays else scratch)
    assert bytes(mean) == in_turn(codec, payloads, weights, count)
    assert payloads == before


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.usefixtures("chosen")
def test_members_of_weight_0_may_be_left_out(spec: str, arrays: bool) -> None:
    codec, generator = parse_codec(spec), torch.Generator().manual_seed(3)
    rows = [torch.randn(4500, generator=generator).mul_(10.0 ** (index % 5 - 2)) for index in range(16)]
    for row in rows:
        row[::7] = -0.0
    payloads = [encoded(codec, row) for row in rows]
    for members in range(1, 17):
        weights = [(1 / 3, 0.0, 2.0**-30)[index % 3] for index in range(members)]
        scratch = torch.empty(4500)
        means = [room(codec, 4500) for _ in range(2)]
        for mean, kept in zip(
            means, (range(members), [at for at in range(members) if weights[at]]), strict=True
        ):
            given_to = scratch.numpy() if arrays else scratch
            codec.reduce([payloads[at] for at in kept], [weights[at] for at in kept], mean, given_to)
        assert bytes(means[0]) == bytes(means[1]) == in_turn(codec, payloads[:members], weights, 4500)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_no_payloads_come_to_zeros(spec: str) -> None:
    codec = parse_codec(spec)
    mean = memoryview(bytearray(b"\xff" * codec.encoded_size(100)))
    codec.reduce([], [], mean, np.ones(100, np.float32))
    assert mean == encoded(codec, torch.zeros(100))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_payloads_that_are_not_aligned_or_not_writable_are_reduced_like_others(spec: str) -> None:
    codec, values = parse_codec(spec), torch.randn(1000, generator=torch.Generator().manual_seed(5))
    first, second = encoded(codec, values.flip(0)), encoded(codec, values)
    expected = in_turn(codec, [first, second], [0.25, 0.75], 1000)
    memory = bytearray(len(first) + 4)
    for shift in range(4):
        shifted = memoryview(memory)[shift : shift + len(first)]
        shifted[:] = first
        for each in (shifted, bytes(first)):
            mean = memoryview(bytearray(len(memory)))[shift : shift + len(first)]
            codec.reduce([each, second], [0.25, 0.75], mean, np.empty(1000, np.float32))
            assert bytes(mean) == expected


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_a_sum_that_is_not_finite_is_no_fault_of_our_values(spec: str) -> None:
    codec = parse_codec(spec)
    payload = encoded(codec, torch.full((100,), torch.finfo(torch.float32).max))
    for scratch in (torch.empty(100), np.empty(100, np.float32)):
        with pytest.raises(CodecError, match="the weighted sum is not finite") as caught:
            codec.reduce([payload] * 2, [1e38, 1e38], room(codec, 100), scratch)
        assert not isinstance(caught.value, NonFiniteError)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.usefixtures("chosen")
def test_payloads_and_weights_that_do_not_fit_are_refused(spec: str) -> None:
    codec, scratch = parse_codec(spec), np.empty(100, np.float32)
    payload, mean = encoded(codec, torch.ones(100)), room(codec, 100)
    for weight in (float("inf"), float("nan"), 1e39):
        with pytest.raises(CodecError, match="finite f32"):
            codec.reduce([payload], [weight], mean, scratch)
    with pytest.raises(CodecError, match="expected 1 weights, got 2"):
        codec.reduce([payload], [0.5, 0.5], mean, scratch)
    for short in (payload[:-1], memoryview(bytearray(len(payload) + 4))):
        with pytest.raises(CodecError, match="100 values are"):
            codec.reduce([short], [1.0], mean, scratch)
        with pytest.raises(CodecError, match="100 values are"):
            codec.reduce([payload], [1.0], short, scratch)
    for values in (np.ones(100), np.ones(200, np.float32)[::2], np.ones((10, 10), np.float32)):
        with pytest.raises(
            CodecError, match="expected a contiguous, writable float32 array of one dimension"
        ):
            codec.reduce([payload], [1.0], mean, values)


def test_payloads_take_the_short_way_to_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values on a CPU and the memory of a pool go to compiled kernels as they are."""
    pytest.importorskip("numba")
    kernels()
    for name in ("encode", "decode", "check", "reduce"):
        monkeypatch.setattr(Codec, name, None)
    codec, values, scratch = parse_codec("int8"), np.ones(1000, np.float32), np.empty(1000, np.float32)
    payload, mean = (room(codec, 1000) for _ in range(2))
    codec.encode(values, payload)
    codec.check(payload, 1000)
    codec.reduce([payload, payload], [0.5, 0.5], mean, scratch)
    codec.decode(mean, scratch)
    assert (scratch == 1).all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e-40, -1.0])
def test_compiled_kernels_see_unsound_scales_and_codes(scale: float) -> None:
    pytest.importorskip("numba")
    from equipoise.compression.numba_kernels import KERNELS

    def sound() -> bool:
        return KERNELS.sound(payload.numpy(), count, *blocks)

    count, blocks = 3 * 32 + 5, Blocks(32)
    payload = torch.zeros(blocks.size(count), dtype=torch.uint8)
    (_, scales, _), (_, last, codes) = pieces(payload, count, blocks, count, torch)
    scales.copy_(torch.tensor([[0.0], [1.0], [1e-3]]))
    last[0, 0], codes[0, -3:] = -0.0, torch.tensor([-127, 0, 127])
    assert sound()
    codes[0, -1] = -128
    assert not sound()
    codes[0, -1], scales[2] = 0, scale
    assert not sound()
