"""The places of tensors in the flat vector and of codes in the encoded one, and that the cut changes no byte."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.layout import EXACT, MIN_CODED_VALUES, Layout
from equipoise.averaging.schema import Schema
from equipoise.compression import parse_codec
from oracles import codecs as oracle

INT8 = parse_codec("int8")
CODECS = tuple(
    map(parse_codec, ("fp32", "fp16", "bf16", "int8:block=32", "int8", "int8:block=4096", "nf4", "sparse"))
)


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
        "temperature": (2048, 2049),
        "biases": (2049, 2059),
        "statistics": (2059, 2359),
    }
    assert (layout.coded, layout.size) == (2048, 2359)
    assert layout.encoded_size == INT8.encoded_size(2048) + 4 * 311
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


# ---- what travels ----


def test_a_vector_is_encoded_to_the_same_bytes_whatever_the_cut() -> None:
    named = {"large": torch.randn(10_000, generator=torch.Generator().manual_seed(1)), **mixed()}
    random = Random(7)
    for codec in CODECS:
        layout = Layout(Schema.of(named, buffers={"statistics"}), codec)
        flat = torch.zeros(layout.size)
        for tensor, start, stop in layout.places:
            flat[start:stop] = named[tensor.name]
        expected = oracle.encode(codec.spec, flat[: layout.coded].numpy())
        expected += flat[layout.coded :].numpy().tobytes()
        unit = max(codec.granule, 256)
        for _ in range(50):
            fractions = [random.random() ** 4 for _ in range(random.randint(1, 16))]
            parts = layout.cut(fractions, unit * random.randint(1, 64))
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == layout.size
            stored = bytearray(layout.encoded_size)
            for part in parts:
                place = layout.encoded(part.start, part.stop)
                layout.codec_of(part).encode(flat[part.start : part.stop], memoryview(stored)[place])
            assert stored == expected


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_parts_of_a_mean_cover_it_once(codec) -> None:
    layout = Layout(Schema.of({**mixed(), "odd": torch.zeros(257)}, buffers={"statistics"}), codec)
    size = layout.mean_size(3)
    mean, covered = memoryview(bytearray(size)), Counter[int]()
    for number, part in enumerate(layout.cut([1.0, 2.0], max(codec.granule, 256)), 1):
        payload = memoryview(bytes([number]) * layout.codec_of(part).mean_size(part.size, 3))
        layout.put_mean(part, 3, payload, mean)
        places = layout.mean(part.start, part.stop, 3)
        assert b"".join(mean[place] for place in places) == payload
        covered.update(at for place in places for at in range(place.start, place.stop))
    assert covered == Counter(range(size))
    assert size == layout.encoded_size + (2 * codec.encoded_size(layout.coded) if codec.needs_feedback else 0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_part_is_a_slice_and_begins_where_its_codec_needs(codec) -> None:
    layout = Layout(Schema.of({**mixed(), "odd": torch.zeros(257)}, buffers={"statistics"}), codec)
    end = 0
    for part in layout.cut([1.0, 2.0], max(codec.granule, 256)):
        place, carries = layout.encoded(part.start, part.stop), layout.codec_of(part)
        assert place.start == end
        assert place.start % carries.alignment == 0
        assert place.stop - place.start == carries.encoded_size(part.size)
        end = place.stop
    assert end == layout.encoded_size


def test_the_second_region_is_shared_out_where_it_is_large() -> None:
    many = {str(at): torch.zeros(200) for at in range(400)}
    layout = Layout(Schema.of(many), INT8)
    parts = layout.cut([1.0] * 4, 512 * 1024)
    assert [part.owner for part in parts] == [0, 1, 2, 3]
    assert max(part.size for part in parts) < 2 * min(part.size for part in parts)
    assert len(Layout(Schema.of(mixed()), INT8).cut([0.0, 1.0, 0.0, 0.0], 4096)) == 2
