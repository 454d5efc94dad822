"""Parts are reduced on a device, and on the CPU where that fails, to the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.compression import Codec, CodecError, parse_codec
from equipoise.compression.device_reduce import DeviceReducer

COUNT = 1000
WEIGHTS = [0.3, 0.0, 0.7]

FAILING = "meta"
"""A device of torch's on which tensors have no values, so that what needs one raises torch's own error."""


def contributions(codec: Codec) -> list[memoryview]:
    generator = torch.Generator().manual_seed(7)
    payloads = [memoryview(bytearray(codec.encoded_size(COUNT))) for _ in WEIGHTS]
    for payload in payloads:
        codec.encode(torch.randn(COUNT, generator=generator), payload)
    return payloads


def scratch() -> np.ndarray:
    return np.empty(COUNT, np.float32)


def room(codec: Codec) -> memoryview:
    return memoryview(bytearray(codec.encoded_size(COUNT)))


@pytest.mark.parametrize("spec", ["fp32", "fp16", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("device", ["cpu", FAILING])
def test_the_bytes_do_not_depend_on_the_device(spec: str, device: str) -> None:
    codec, reducer = parse_codec(spec), DeviceReducer(torch.device(device))
    payloads, mean, expected = contributions(codec), room(codec), room(codec)
    codec.reduce(payloads, WEIGHTS, expected, torch.empty(COUNT))
    for _ in range(2):
        mean[:] = bytes(len(mean))
        reducer.reduce(codec, payloads, WEIGHTS, scratch(), mean)
        assert mean == expected
    assert reducer.trouble.startswith("meta failed, so the CPU reduced the part: ") == (device == FAILING)
    assert "\n" not in reducer.trouble


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
        AttributeError("CUDA out of memory."),  # As compilers of kernels raise anything.
    ],
)
def test_the_first_failure_is_the_one_that_is_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, reducer = parse_codec("int8"), DeviceReducer(torch.device(FAILING))
    reducer.reduce(codec, contributions(codec), WEIGHTS, scratch(), room(codec))
    first = reducer.trouble

    def full(*args: object, **kwargs: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "empty", full)
    later = DeviceReducer(torch.device(FAILING))
    for one in (reducer, later):
        one.reduce(codec, contributions(codec), WEIGHTS, scratch(), room(codec))
    assert reducer.trouble == first
    assert later.trouble == "meta failed, so the CPU reduced the part: CUDA out of memory."


@pytest.mark.parametrize("device", ["cpu", FAILING])
def test_values_that_cannot_be_reduced_are_no_fault_of_the_device(device: str) -> None:
    codec, reducer = parse_codec("fp32"), DeviceReducer(torch.device(device))
    payload = memoryview(bytearray(codec.encoded_size(COUNT)))
    codec.encode(torch.full((COUNT,), torch.finfo(torch.float32).max), payload)
    with pytest.raises(CodecError, match="the weighted sum is not finite"):
        reducer.reduce(codec, [payload] * 2, [1e38, 1e38], scratch(), room(codec))
