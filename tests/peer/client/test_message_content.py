"""What a message between scripts holds, and what no message holds."""

from __future__ import annotations

import json

import pytest
import torch

from equipoise.averaging.messaging.messages import MAX_WAITING_BYTES
from equipoise.compression import CodecError
from equipoise.peer.client.message_content import MAX_ABOUT_BYTES, decode, encode
from equipoise.peer.client.safetensors_io import ImageError, pack


def room(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_a_codec_is_for_floating_point_values_and_keeps_dtypes_and_shapes() -> None:
    tensors = {
        "half": torch.linspace(-1, 1, 24).to(torch.float16).view(2, 3, 4),
        "double": torch.linspace(-1, 1, 24, dtype=torch.float64),
        "counts": torch.arange(10),
        "flags": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
        "learnt": torch.ones(5, requires_grad=True),
    }
    got, fields = decode(encode(tensors, {"a": float("inf")}, "int8", room))
    assert fields == {"a": float("inf")}
    assert {name: (one.dtype, one.shape) for name, one in got.items()} == {
        name: (one.dtype, one.shape) for name, one in tensors.items()
    }
    assert torch.equal(got["counts"], tensors["counts"])
    assert torch.equal(got["flags"], tensors["flags"])
    assert torch.allclose(got["double"], tensors["double"], atol=0.01)


@pytest.mark.parametrize("codec", ["raw", "fp32", "int8"])
def test_a_negated_view_is_sent_as_its_values(codec: str) -> None:
    values = torch.linspace(-1, 1, 24)
    got, _ = decode(encode({"x": torch._neg_view(values)}, {}, codec, room))
    assert torch.allclose(got["x"], -values, atol=0.01)


def test_values_that_are_not_finite_travel_raw_alone() -> None:
    tensors = {"x": torch.tensor([1.0, float("nan"), float("inf")])}
    got, _ = decode(encode(tensors, {}, "raw", room))
    assert str(got["x"].tolist()) == "[1.0, nan, inf]"
    with pytest.raises(CodecError, match="nan"):
        encode(tensors, {}, "int8", room)


def test_fields_are_what_json_holds_and_are_short() -> None:
    circle: list[object] = []
    circle.append(circle)
    for fields in ({"a": {1, 2}}, {"a": b""}, {"a": circle}):
        with pytest.raises(ValueError, match="expected fields of text"):
            encode({}, fields, "raw", room)
    with pytest.raises(ValueError, match="send tensors"):
        encode({}, {"a": "x" * MAX_ABOUT_BYTES}, "raw", room)


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, "expected the fields"),
        ({"fields": "[]"}, "by name, got list"),
        ({"fields": "[" * 100_000}, "expected the fields"),
        ({"fields": "{}", "codec": "int8", "coded": '{"y":["F32",[2]]}'}, "'y'"),
        ({"fields": "{}", "codec": "int9", "coded": '{"x":["F32",[2]]}'}, "int9"),
        ({"fields": "{}", "codec": "int8", "coded": '{"x":["I64",[2]]}'}, "floating-point"),
        ({"fields": "{}", "codec": "sparse", "coded": '{"x":["F32",[64]]}'}, "sparse"),
        ({"fields": "{}", "codec": "int8", "coded": '{"x":["F32",[1000000,1000000]]}'}, "bytes of"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_message_is_refused_before_memory_is_taken(about: dict[str, str], expected: str) -> None:
    content = pack({"x": torch.zeros(132, dtype=torch.uint8)}, about)
    with pytest.raises(ImageError, match=expected):
        decode(content)


def test_the_bound_of_a_message_is_more_than_that_of_what_describes_it() -> None:
    assert MAX_ABOUT_BYTES < MAX_WAITING_BYTES
    assert len(json.dumps({"a": "é" * 10})) < MAX_ABOUT_BYTES
