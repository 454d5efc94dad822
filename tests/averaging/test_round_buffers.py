"""What a store keeps, reduces and refuses; the arithmetic itself is tested with the codecs."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.aio.round_buffers import RoundBuffers
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.layout import Layout
from equipoise.averaging.rules import Mean
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.compression import Codec, CodecError, NonFiniteError, parse_codec

SIZE, MEMBERS, ME, EVERYBODY = 5000, 3, 1, 0b111
WEIGHTS = (1.0, 2.0, 5.0)

codecs = pytest.mark.parametrize("codec", [parse_codec(spec) for spec in ("fp32", "fp16", "int8")], ids=repr)


def group() -> Group:
    parts = layout(parse_codec("fp32")).cut([1.0] * MEMBERS, 1024)
    return Group(b"r" * 16, ("a", "b", "c"), WEIGHTS, EVERYBODY, parts, 0)


def layout(codec: Codec) -> Layout:
    return Layout(Schema((TensorSpec("w", (SIZE,), "float32"),)), codec)


def values_of(member: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(member))


def store_of(codec: Codec, member: int, pool: BufferPool | None = None) -> tuple[RoundBuffers, torch.Tensor]:
    result = torch.zeros(SIZE)
    return RoundBuffers(
        group(), member, layout(codec), values_of(member), result, pool or BufferPool(), Mean()
    ), result


def received(store: RoundBuffers, part: int, payload: memoryview) -> memoryview:
    buffer = store.take(part)
    assert len(buffer) == store.size(part)
    buffer[:] = payload
    return buffer


def reduce(store: RoundBuffers, part: int, contributors: int) -> bytes:
    reduction = store.reduction(part, contributors)()
    store.keep_reduction(part, contributors, reduction)
    return reduction.digest


@codecs
def test_whoever_reduces_gets_the_mean_and_the_same_bytes(codec: Codec) -> None:
    stores = [store_of(codec, member) for member in range(MEMBERS)]
    for part in range(len(group().parts)):
        digests = set()
        for me, (store, _) in enumerate(stores):
            for member, (other, _) in enumerate(stores):
                if member != me:
                    store.keep_contribution(part, member, received(store, part, other.encode(part)))
            digests.add(reduce(store, part, EVERYBODY))
        assert len(digests) == 1
    weighted = torch.stack([values_of(member) * weight for member, weight in enumerate(WEIGHTS)])
    expected = weighted.sum(0) / sum(WEIGHTS)
    for _, result in stores:
        assert float((result - expected).norm() / expected.norm()) < 0.011
        assert torch.equal(result, stores[0][1])


@codecs
def test_a_mean_over_others_alone_needs_none_of_ours(codec: Codec) -> None:
    store, result = store_of(codec, ME)
    others = [store_of(codec, member)[0] for member in (0, 2)]
    for member, other in zip((0, 2), others, strict=True):
        store.keep_contribution(0, member, received(store, 0, other.encode(0)))
    both = reduce(store, 0, 0b111)
    assert store.mean(0, 0b101) is None
    assert reduce(store, 0, 0b101) != both
    payload = store.mean(0, 0b101)
    assert payload is not None
    stop = group().parts[0].stop
    reader, read = store_of(codec, 0)
    assert reader.keep_mean(0, 0b101, received(reader, 0, payload)) == blake3(payload).digest()
    assert torch.equal(read[:stop], result[:stop])
    with pytest.raises(KeyError):
        reduce(others[0], 0, 0b111)  # Nothing else may stand for what has not come.


@codecs
def test_what_does_not_decode_is_not_kept(codec: Codec) -> None:
    store, _ = store_of(codec, ME)
    bad = store.take(0)
    bad[:] = b"\xff" * len(bad)
    with pytest.raises(CodecError):
        store.keep_contribution(0, 0, bad)
    with pytest.raises(CodecError):
        store.keep_mean(0, EVERYBODY, bad)
    assert store.mean(0, EVERYBODY) is None


@codecs
def test_what_does_not_decode_takes_the_place_of_nothing(codec: Codec) -> None:
    (giver, given), (store, result) = store_of(codec, 0), store_of(codec, ME)
    reduce(giver, 0, 0b001)
    good = giver.mean(0, 0b001)
    assert good is not None
    store.keep_mean(0, 0b001, received(store, 0, good))
    bad = received(store, 0, good)
    bad[:] = b"\xff" * len(bad)
    with pytest.raises(CodecError):
        store.keep_mean(0, 0b011, bad)
    size = group().parts[0].size
    assert torch.equal(result[:size], given[:size])
    assert store.mean(0, 0b001) == good


@codecs
def test_our_own_fault_is_named_by_its_place_in_the_whole_vector(codec: Codec) -> None:
    contribution = values_of(ME)
    part = len(group().parts) - 1
    index = group().parts[part].start + 17
    contribution[index] = torch.nan
    store = RoundBuffers(group(), ME, layout(codec), contribution, torch.zeros(SIZE), BufferPool(), Mean())
    for call in (lambda: store.encode(part), lambda: reduce(store, part, 1 << ME)):
        with pytest.raises(NonFiniteError, match=f"value {index} of {SIZE} is nan") as caught:
            call()
        assert caught.value.index == index


def test_released_memory_goes_back_to_the_pool() -> None:
    pool = BufferPool()
    store, _ = store_of(parse_codec("int8"), ME, pool)
    other, _ = store_of(parse_codec("int8"), 0)
    for part in range(len(group().parts)):
        store.keep_contribution(part, 0, received(store, part, other.encode(part)))
        reduce(store, part, 0b011)
    assert pool.idle_bytes == 0
    store.release()
    assert sum(map(len, pool.idle.values())) == 2 * len(group().parts)
