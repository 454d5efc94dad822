"""Where tensors lie in the flat vector, what carries them, and that the cut changes no byte."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.layout import EXACT, MIN_CODED_VALUES, Layout
from equipoise.averaging.partition import Part
from equipoise.averaging.schema import Schema, SchemaError
from equipoise.compression import parse_codec
from oracles.codecs import int8_encode

INT8 = parse_codec("int8")
CODECS = tuple(map(parse_codec, ("fp32", "fp16", "bf16", "int8:block=32", "int8", "int8:block=4096")))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "bias": torch.tensor([7.0, 8.0], dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
    }


def mixed() -> dict[str, torch.Tensor]:
    """Large weights, and between them small tensors of much smaller values."""
    generator = torch.Generator().manual_seed(0)
    return {
        "first": torch.randn(1000, generator=generator),
        "temperature": torch.tensor(1e-3),
        "biases": torch.full((10,), 1e-3),
        "second": torch.randn(1000, generator=generator),
        "statistics": torch.rand(300, generator=generator) * 1e-3,
    }


def places(layout: Layout) -> dict[str, tuple[int, int]]:
    return {spec.name: (start, stop) for spec, start, stop in layout.places}


# ---- places ----


def test_large_tensors_begin_at_granules_and_small_ones_and_buffers_lie_behind_them() -> None:
    layout = Layout(Schema.of(mixed(), buffers={"statistics"}), INT8)
    assert places(layout) == {
        "first": (0, 1000),
        "second": (1024, 2024),
        "temperature": (2024, 2025),
        "biases": (2025, 2035),
        "statistics": (2035, 2335),
    }
    assert (layout.coded, layout.size) == (2024, 2335)
    assert layout.encoded_size == INT8.encoded_size(2024) + 4 * 311
    assert layout.compression_ratio == 4 * 2311 / layout.encoded_size, "padding is no value of anybody's"


def test_in_fp32_tensors_lie_one_after_another() -> None:
    schema = Schema.of(mixed(), buffers={"statistics"})
    layout = Layout(schema, EXACT)
    assert list(places(layout)) == list(mixed())
    assert layout.coded == layout.size == schema.size


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(st.lists(st.tuples(st.integers(0, 3 * MIN_CODED_VALUES), st.booleans()), min_size=1, max_size=8))
def test_places_cover_every_tensor_once_and_no_block_holds_two(codec, sizes: list[tuple[int, bool]]) -> None:
    named = {str(at): torch.zeros(size) for at, (size, _) in enumerate(sizes)}
    buffers = {str(at) for at, (_, buffer) in enumerate(sizes) if buffer}
    layout = Layout(Schema.of(named, buffers), codec)
    found = places(layout)
    assert {name: stop - start for name, (start, stop) in found.items()} == {
        name: tensor.numel() for name, tensor in named.items()
    }
    ends = [0, *(stop for _, stop in found.values())]
    assert all(end <= start for end, (start, _) in zip(ends, found.values(), strict=False))
    assert ends[-1] == layout.size
    for name, (start, stop) in found.items():
        exact = codec != EXACT and (named[name].numel() < MIN_CODED_VALUES or name in buffers)
        assert start >= layout.coded if exact else stop <= layout.coded
        assert exact or start % codec.granule == 0


# ---- copies ----


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_unflatten_gives_back_what_flatten_took(codec) -> None:
    named = {**tensors(), **mixed()}
    layout = Layout(Schema.of(named), codec)
    flat = torch.full((layout.size,), float("nan"))
    layout.flatten(named, flat)
    padding = torch.ones(layout.size, dtype=torch.bool)
    for start, stop in places(layout).values():
        padding[start:stop] = False
    assert not flat[padding].any(), "padding is zero, whatever was there"
    targets = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    layout.unflatten(flat, targets)
    for name, tensor in named.items():
        assert torch.equal(targets[name], tensor)


def test_the_flat_vector_holds_the_values_in_their_order() -> None:
    layout = Layout(Schema.of(tensors()), EXACT)
    flat = torch.empty(layout.size)
    layout.flatten(tensors(), flat)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 0.5]


def test_flatten_of_some_leaves_the_places_of_the_others() -> None:
    layout = Layout(Schema.of(mixed()), INT8)
    flat = torch.full((layout.size,), float("nan"))
    layout.flatten({"biases": mixed()["biases"]}, flat)
    start, stop = places(layout)["biases"]
    assert torch.equal(flat[start:stop], mixed()["biases"])
    assert flat[:1000].isnan().all()
    assert not flat[1000:1024].any()


def test_flatten_reads_strided_tensors_and_unflatten_writes_them_in_place() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    layout = Layout(Schema.of({"columns": base.t()}), EXACT)
    flat = torch.empty(12)
    layout.flatten({"columns": base.t()}, flat)
    assert torch.equal(flat, base.t().reshape(-1))
    layout.unflatten(torch.zeros(12), {"columns": base.t()})
    assert not base.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_what_fp32_cannot_hold_is_refused_by_name(value: float) -> None:
    poisoned = tensors()
    poisoned["bias"][1] = value
    for codec in (EXACT, INT8):
        layout = Layout(Schema.of(tensors()), codec)
        with pytest.raises(SchemaError, match=r"tensor 'bias' holds .* at flat index 1: "):
            layout.flatten(poisoned, torch.empty(layout.size))


# ---- what travels ----


def encoded(layout: Layout, parts: tuple[Part, ...], flat: torch.Tensor) -> tuple[bytes, bytes, bytes]:
    """The scales, the codes, and the bytes of the second region, of all parts one after another."""
    scales, codes, exact = bytearray(), bytearray(), bytearray()
    for part in parts:
        codec = layout.codec_of(part)
        payload = bytearray(codec.encoded_size(part.size))
        codec.encode(flat[part.start : part.stop], payload)
        if codec is EXACT:
            exact += payload
        else:
            split = len(payload) - part.size
            scales += payload[:split]
            codes += payload[split:]
    return bytes(scales), bytes(codes), bytes(exact)


def test_a_vector_is_encoded_to_the_same_bytes_whatever_the_cut() -> None:
    named = {"large": torch.randn(10_000, generator=torch.Generator().manual_seed(1)), **mixed()}
    random = Random(7)
    for spec in ("int8:block=32", "int8", "int8:block=4096"):
        codec = parse_codec(spec)
        layout = Layout(Schema.of(named, buffers={"statistics"}), codec)
        flat = torch.empty(layout.size)
        layout.flatten(named, flat)
        coded = int8_encode(flat[: layout.coded].numpy(), codec.granule)
        expected = coded[: -layout.coded], coded[-layout.coded :], flat[layout.coded :].numpy().tobytes()
        unit = max(codec.granule, 256)
        for _ in range(1000 if spec == "int8" else 50):
            fractions = [random.random() ** 4 for _ in range(random.randint(1, 16))]
            parts = layout.cut(fractions, unit * random.randint(1, 64))
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == layout.size
            assert encoded(layout, parts, flat) == expected
            assert sum(layout.codec_of(part).encoded_size(part.size) for part in parts) == layout.encoded_size


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_small_tensors_and_buffers_are_exact_beside_large_values(codec) -> None:
    named = mixed()
    layout = Layout(Schema.of(named, buffers={"statistics"}), codec)
    flat, mean = torch.empty(layout.size), torch.empty(layout.size)
    layout.flatten(named, flat)
    for part in layout.cut([1.0, 2.0], 4096):
        carries, values = layout.codec_of(part), flat[part.start : part.stop]
        payload = memoryview(bytearray(carries.encoded_size(part.size)))
        carries.reduce([None], [1.0], values, payload, mean[part.start : part.stop])
    back = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    layout.unflatten(mean, back)
    for name in ("temperature", "biases", "statistics"):
        assert torch.equal(back[name], named[name])
    assert float((back["first"] - named["first"]).abs().max()) <= float(named["first"].abs().max()) / 100


def test_the_second_region_is_shared_out_where_it_is_large() -> None:
    many = {str(at): torch.zeros(200) for at in range(400)}
    layout = Layout(Schema.of(many), INT8)
    parts = layout.cut([1.0] * 4, 512 * 1024)
    assert [part.owner for part in parts] == [0, 1, 2, 3]
    assert max(part.size for part in parts) < 2 * min(part.size for part in parts)
    assert len(Layout(Schema.of(mixed()), INT8).cut([0.0, 1.0, 0.0, 0.0], 4096)) == 2
