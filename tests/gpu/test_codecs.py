"""Codecs on CUDA tensors: the bytes and values of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from equipoise.compression import (
    Codec,
    CodecError,
    NonFiniteError,
    kernels,
    kernels_for,
    parse_codec,
)
from equipoise.compression.choice import ENVIRONMENT, INTERPRETER
from equipoise.compression.device_reduce import DeviceReducer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAGNITUDES = [0.0, 1e-44, 1e-36, 2.0**-116, 1e-3, 1.0, 1e6, torch.finfo(torch.float32).max]
SPECS = ["fp32", "fp16", "bf16", "int8", "int8:block=32", "int8:block=4096", "nf4"]
ALL_SPECS = [*SPECS, "sparse:group=64", "sparse:group=32"]
"""A mean of sparse contributions is those contributions, which no kernel reduces."""
WEIGHTS = [1 / 3, 0.0, 2.0**-30]
DEVICES = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cuda:0"]


@pytest.fixture(params=["torch", "triton"], autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each choice of kernels in turn; both are on the GPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setenv(ENVIRONMENT, request.param)
    kernels.cache_clear()
    for device in DEVICES:
        line = kernels_for(torch.device(device))
        assert line.startswith(f"{request.param} on {device}"), line
    yield
    kernels.cache_clear()


def run(codec: Codec, values: torch.Tensor) -> tuple[int, list[bytes]]:
    """Everything a codec computes from `values`, on their device and with a buffer on the host."""
    payload = torch.empty(codec.encoded_size(values.numel()), dtype=torch.uint8, device=values.device)
    clamped = codec.encode(values, payload)
    codec.check(payload, values.numel())
    host = bytearray(payload.numel())
    assert codec.encode(values, host) == clamped
    # From +0 on no sum is -0, which `sparse` would leave as it is in arrays alone.
    out, total, total_of_host = torch.empty_like(values), values * 0.25 + 0.0, values * 0.25 + 0.0
    codec.decode(payload, out)
    codec.accumulate(payload, 0.3, total)
    codec.accumulate(host, 0.3, total_of_host)
    results = [tensor.cpu().numpy().tobytes() for tensor in (payload, out, total, total_of_host)]
    return clamped, [bytes(host), *results]


@pytest.mark.parametrize("spec", ALL_SPECS)
@pytest.mark.parametrize("count", [0, 1, 1000, 300_001])
def test_same_as_on_a_cpu(spec: str, count: int) -> None:
    for magnitude in MAGNITUDES:
        generator = torch.Generator().manual_seed(count)
        values = torch.rand(count, generator=generator).mul_(2).sub_(1).mul_(magnitude)
        assert run(parse_codec(spec), values.cuda()) == run(parse_codec(spec), values)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_names_the_first_value_that_is_not_finite(spec: str) -> None:
    values = torch.ones(1000, device="cuda")
    values[[517, 900]] = torch.nan
    with pytest.raises(NonFiniteError, match="value 517 of 1000 is nan"):
        parse_codec(spec).encode(values, bytearray(parse_codec(spec).encoded_size(1000)))


def reduced(codec: Codec, device: str, members: int, count: int) -> tuple[int, bytes]:
    """The mean of payloads on the host."""
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randn(count, generator=generator) * 2.0 ** (index % 5 - 2) for index in range(members)]
    payloads = [memoryview(bytearray(codec.encoded_size(count))) for _ in rows]
    for row, payload in zip(rows, payloads, strict=True):
        codec.encode(row, payload)
    weights = [WEIGHTS[index % len(WEIGHTS)] for index in range(members)]
    mean = memoryview(bytearray(codec.encoded_size(count)))
    clamped = codec.reduce(payloads, weights, mean, torch.empty(count, device=device))
    return clamped, bytes(mean)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [1, 1000, 300_001])
@pytest.mark.parametrize("members", [1, 2, 3, 5, 16])
def test_reduces_to_the_same_as_on_a_cpu(spec: str, count: int, members: int) -> None:
    codec = parse_codec(spec)
    expected = reduced(codec, "cpu", members, count)
    assert [reduced(codec, device, members, count) for device in DEVICES] == [expected] * len(DEVICES)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_device_that_is_not_the_current_one(spec: str) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    expected = run(parse_codec(spec), values)
    for current in DEVICES:
        for device in DEVICES:
            with torch.cuda.device(current), torch.inference_mode():
                assert run(parse_codec(spec), values.to(device)) == expected


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_side_stream_orders_its_kernels_with_its_copies(spec: str) -> None:
    codec, values = parse_codec(spec), torch.randn(4_000_000, generator=torch.Generator().manual_seed(2))
    expected = run(codec, values)
    pinned, stream = values.pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The codec must wait for this copy, and for nothing of other streams.
        there = pinned.to("cuda", non_blocking=True)
        assert run(codec, there) == expected


@pytest.mark.parametrize("spec", SPECS)
def test_a_sum_that_is_not_finite_is_told(spec: str) -> None:
    codec, values = parse_codec(spec), torch.full((1000,), torch.finfo(torch.float32).max, device="cuda")
    payload, mean = (
        torch.empty(codec.encoded_size(1000), dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    codec.encode(values, payload)
    with pytest.raises(CodecError, match="the weighted sum is not finite"):
        codec.reduce([payload] * 2, [1e38, 1e38], mean, values)


@pytest.mark.parametrize("spec", SPECS)
def test_parts_of_a_daemon_are_reduced_on_the_device(spec: str) -> None:
    codec, values = parse_codec(spec), torch.randn(300_001, generator=torch.Generator().manual_seed(3))
    payload = memoryview(bytearray(codec.encoded_size(300_001)))
    codec.encode(values, payload)
    means = []
    for device in ("cpu", *DEVICES):
        reducer = DeviceReducer(torch.device(device))
        means.append(bytearray(len(payload)))
        reducer.reduce(codec, [payload] * 3, [0.2, 0.0, 0.8], np.empty(300_001, np.float32), means[-1])
        assert reducer.trouble == ""
    assert means == [means[0]] * len(means)
