"""Codecs on CUDA tensors: the bytes and values of a CPU."""

from __future__ import annotations

import pytest
import torch

from equipoise.compression import Codec, EncodeReport, NonFiniteError, parse_codec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAGNITUDES = [0.0, 1e-44, 1e-36, 1.0, 1e6, torch.finfo(torch.float32).max]
SPECS = ["fp32", "fp16", "bf16", "int8", "int8:block=32"]


def run(codec: Codec, values: torch.Tensor) -> tuple[EncodeReport, list[bytes]]:
    """Everything a codec computes from `values`, on their device and with a buffer on the host."""
    payload = torch.empty(codec.encoded_size(values.numel()), dtype=torch.uint8, device=values.device)
    report = codec.encode(values, payload)
    codec.check(payload, values.numel())
    host = bytearray(payload.numel())
    assert codec.encode(values, host) == report
    out, total, total_of_host = torch.empty_like(values), values * 0.25, values * 0.25
    codec.decode(payload, out)
    codec.accumulate(payload, 0.3, total)
    codec.accumulate(host, 0.3, total_of_host)
    results = [tensor.cpu().numpy().tobytes() for tensor in (payload, out, total, total_of_host)]
    return report, [bytes(host), *results]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [0, 1, 1000, 300_001])
def test_same_as_on_a_cpu(spec: str, count: int) -> None:
    for magnitude in MAGNITUDES:
        generator = torch.Generator().manual_seed(count)
        values = torch.rand(count, generator=generator).mul_(2).sub_(1).mul_(magnitude)
        assert run(parse_codec(spec), values.cuda()) == run(parse_codec(spec), values)


@pytest.mark.parametrize("spec", SPECS)
def test_names_the_first_value_that_is_not_finite(spec: str) -> None:
    values = torch.ones(1000, device="cuda")
    values[[517, 900]] = torch.nan
    with pytest.raises(NonFiniteError, match="value 517 of 1000 is nan"):
        parse_codec(spec).encode(values, bytearray(parse_codec(spec).encoded_size(1000)))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [1, 1000, 300_001])
def test_reduces_to_the_same_as_on_a_cpu(spec: str, count: int) -> None:
    codec = parse_codec(spec)
    generator = torch.Generator().manual_seed(count)
    own, other = (torch.randn(count, generator=generator) for _ in range(2))
    payload = memoryview(bytearray(codec.encoded_size(count)))
    codec.encode(other, payload)
    results = []
    for values in (own, own.cuda()):
        mean, out = memoryview(bytearray(len(payload))), torch.empty_like(values)
        codec.reduce([payload, None], [0.3, 0.7], values, mean, out)
        results.append((bytes(mean), out.cpu().numpy().tobytes()))
    assert results[0] == results[1]
