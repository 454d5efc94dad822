"""Tensors of every kind to the encoded vector and back: the bytes are those of one flat vector, encoded at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.averaging.layout import Layout
from equipoise.averaging.schema import Schema, SchemaError
from equipoise.compression import CodecError, parse_codec
from equipoise.peer.client.encoding import LARGE_VALUES, SPAN_VALUES, Encoder
from fakes.vectors import decoded, encoded, norm_of

CODECS = tuple(map(parse_codec, ("fp32", "fp16", "bf16", "int8:block=32", "int8", "int8:block=4096", "nf4")))
SIZES = (0, 1, 3, 255, 256, 1000, LARGE_VALUES - 1, LARGE_VALUES + 5, SPAN_VALUES, SPAN_VALUES + 4097)

codecs = pytest.mark.parametrize("codec", CODECS, ids=repr)


def values_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def flat_of(layout: Layout, named: dict[str, torch.Tensor]) -> torch.Tensor:
    """The reference: one flat vector, zeros between the tensors."""
    flat = torch.zeros(layout.size)
    for tensor, start, stop in layout.places:
        flat[start:stop] = named[tensor.name].detach().reshape(-1).float()
    return flat


def stored_by(layout: Layout, named: dict[str, torch.Tensor], divisor: float = 1.0) -> bytes:
    """Encoded into memory that held something else; the norm is that of what others will decode."""
    out = bytearray(b"\xff" * layout.encoded_size)
    _, norm = Encoder(layout).encode(named, memoryview(out), divisor)
    assert norm == pytest.approx(norm_of(layout, memoryview(out)), rel=1e-3)
    return bytes(out)


@codecs
@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(SIZES), st.booleans()), min_size=1, max_size=5))
def test_the_bytes_are_those_of_the_flat_vector_and_come_back(codec, sizes: list[tuple[int, bool]]) -> None:
    named = {str(at): values_of(size, at) for at, (size, _) in enumerate(sizes)}
    layout = Layout(Schema.of(named, {str(at) for at, (_, buffer) in enumerate(sizes) if buffer}), codec)
    flat = encoded(layout, flat_of(layout, named))
    stored = stored_by(layout, named)
    assert stored == flat
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in named.items()}
    Encoder(layout).decode(flat, back)
    assert torch.equal(flat_of(layout, back), decoded(layout, flat))


KINDS = {
    "strided": lambda: values_of(300_000).reshape(300, 1000).t(),
    "channels last": lambda: (
        values_of(200_000).reshape(2, 100, 10, 100).to(memory_format=torch.channels_last)
    ),
    "half": lambda: values_of(700_000).half(),
    "bfloat16": lambda: values_of(700).bfloat16(),
    "double": lambda: values_of(100_000).double(),
    "parameter": lambda: torch.nn.Parameter(values_of(100_000)),
    "part of another": lambda: values_of(200_001)[1:],
    "negated": lambda: torch._neg_view(values_of(100_000)),
    "scalar": lambda: torch.tensor(3.0),
}


@codecs
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_are_read_and_written_in_place(codec, kind: str) -> None:
    named = {"one": KINDS[kind](), "two": values_of(300)}
    layout = Layout(Schema.of(named), codec)
    flat = encoded(layout, flat_of(layout, named))
    assert stored_by(layout, named) == flat
    back = {name: KINDS[kind]() if name == "one" else torch.empty(300) for name in named}
    with torch.no_grad():
        back["one"].zero_()
    where = back["one"].data_ptr()
    Encoder(layout).decode(flat, back)
    assert back["one"].data_ptr() == where
    start, stop = next((start, stop) for tensor, start, stop in layout.places if tensor.name == "one")
    expected = decoded(layout, flat)[start:stop].to(back["one"].dtype).reshape(back["one"].shape)
    assert torch.equal(back["one"].detach(), expected)


@codecs
def test_sums_are_divided_on_the_way(codec) -> None:
    named = {"sum": values_of(100_000), "small": values_of(300), "buffer": values_of(300)}
    layout = Layout(Schema.of(named, {"buffer"}), codec)
    mean = {name: tensor if name == "buffer" else tensor / 3.7 for name, tensor in named.items()}
    expected = encoded(layout, flat_of(layout, mean))
    assert stored_by(layout, named, divisor=3.7) == expected
    assert torch.equal(named["sum"], values_of(100_000))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
@pytest.mark.parametrize("at", [0, 77_000, SPAN_VALUES + 3])
@codecs
def test_a_tensor_that_fp32_cannot_hold_is_refused_by_name(codec, at: int, value: float) -> None:
    named = {"good": values_of(300), "bad": values_of(SPAN_VALUES + 10).double()}
    named["bad"][at] = value
    layout = Layout(Schema.of(named), codec)
    with pytest.raises(SchemaError, match=rf"tensor 'bad' holds .* at flat index {at}: "):
        stored_by(layout, named)


def test_values_beyond_the_codec_are_counted() -> None:
    named = {"large": torch.full((100_000,), 1e5), "small": torch.full((300,), -1e5), "fits": values_of(300)}
    layout = Layout(Schema.of(named), parse_codec("fp16"))
    encoded = Encoder(layout).encode(named, memoryview(bytearray(layout.encoded_size)))
    assert encoded.clamped == 100_300


@codecs
def test_bytes_that_no_encoder_writes_are_not_decoded(codec) -> None:
    named = {"w": values_of(1000)}
    layout = Layout(Schema.of(named), codec)
    with pytest.raises(CodecError):
        Encoder(layout).decode(memoryview(b"\xff" * layout.encoded_size), named)


def test_autograd_sees_that_a_tensor_was_overwritten() -> None:
    weight = torch.nn.Parameter(values_of(100_000))
    layout = Layout(Schema.of({"w": weight}), parse_codec("int8"))
    loss = (weight * weight).sum()
    Encoder(layout).decode(encoded(layout, values_of(100_000, 1)), {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_are_encoded_and_decoded_in_inference_mode_and_beyond() -> None:
    named = {"w": values_of(100_000), "b": values_of(10)}
    layout = Layout(Schema.of(named), parse_codec("int8"))
    with torch.inference_mode():
        stored = bytearray(layout.encoded_size)
        Encoder(layout).encode(named, memoryview(stored))
        Encoder(layout).decode(memoryview(stored), named)
    named["w"].requires_grad_().sum().backward()
