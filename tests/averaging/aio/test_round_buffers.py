"""What a store keeps, reduces and refuses; the arithmetic itself is tested with the codecs."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3

from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.aio.round_buffers import RoundBuffers
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.layout import Layout, Vectors
from equipoise.averaging.rules import Mean, Reduced, Rule, RuleError, parse_rule
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.averaging.weights import ATTENDANCE_LIMIT
from equipoise.compression import Codec, CodecError, parse_codec
from equipoise.compression.device_reduce import DeviceReducer
from fakes.vectors import decoded, encoded

SIZE, MEMBERS, ME, EVERYBODY = 5000, 3, 1, 0b111
WEIGHTS = (1.0, 2.0, 5.0)

ERRORS = {"fp32": 1e-6, "fp16": 1e-3, "int8": 0.011, "nf4": 0.14, "sparse": 1.0}
"""Of means, by codec, in norms. A mean of nf4 is rounded twice, each time by .092."""

codecs = pytest.mark.parametrize("codec", list(map(parse_codec, ERRORS)), ids=repr)


def group(weights: tuple[float, ...] = WEIGHTS) -> Group:
    parts = layout(parse_codec("sparse")).cut([1.0] * MEMBERS, 1024)
    return Group(b"r" * 16, ("a", "b", "c"), weights, EVERYBODY, parts, 0)


def layout(codec: Codec) -> Layout:
    return Layout(Schema((TensorSpec("w", (SIZE,), "float32"),)), codec)


def values_of(member: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(member))


class Result:
    """The memory for the mean, decoded when it is looked at."""

    def __init__(self, codec: Codec) -> None:
        self.layout = layout(codec)
        self.memory = memoryview(bytearray(self.layout.mean_size(MEMBERS)))
        # The parts that a test does not touch decode to zeros: with nf4, bytes of 0 are no payload.
        self.memory[: self.layout.encoded_size] = encoded(self.layout, torch.zeros(SIZE))
        self.contributors = EVERYBODY

    @property
    def values(self) -> torch.Tensor:
        return decoded(self.layout, self.memory, list(group().shares(self.contributors).values()))


def store_of(
    codec: Codec, member: int, pool: BufferPool | None = None, reducer: DeviceReducer | None = None
) -> tuple[RoundBuffers, Result]:
    result = Result(codec)
    vectors = Vectors(encoded(result.layout, values_of(member)), result.memory)
    return RoundBuffers(
        group(), member, result.layout, vectors, pool or BufferPool(), Mean(), reducer
    ), result


def received(store: RoundBuffers, part: int, payload: memoryview) -> memoryview:
    assert len(payload) in (store.size(part), store.mean_size(part, EVERYBODY), store.mean_size(part, 0b101))
    buffer = store._pool.take(len(payload))
    buffer[:] = payload
    return buffer


def reduce(store: RoundBuffers, part: int, contributors: int) -> bytes:
    reduction = store.reduction(part, contributors)()
    store.keep_reduction(part, contributors, reduction)
    return reduction.digest


@codecs
def test_every_member_reduces_to_the_mean_and_the_same_bytes(codec: Codec) -> None:
    stores = [store_of(codec, member) for member in range(MEMBERS)]
    for part in range(len(group().parts)):
        digests = set()
        for me, (store, _) in enumerate(stores):
            for member, (other, _) in enumerate(stores):
                if member != me:
                    store.keep_contribution(part, member, received(store, part, other.contribution(part)))
            digests.add(reduce(store, part, EVERYBODY))
        assert len(digests) == 1
    weighted = torch.stack([values_of(member) * weight for member, weight in enumerate(WEIGHTS)])
    expected = weighted.sum(0) / sum(WEIGHTS)
    for _, result in stores:
        assert float((result.values - expected).norm() / expected.norm()) < ERRORS[codec.spec.split(":")[0]]
        assert result.memory == stores[0][1].memory
    if codec.needs_feedback:  # Each receiver adds up what the members have sent, in their order.
        exact = torch.zeros(SIZE)
        for member, share in group().shares(EVERYBODY).items():
            exact += decoded(layout(codec), encoded(layout(codec), values_of(member))) * share
        assert torch.equal(stores[0][1].values, exact)


@codecs
def test_a_mean_over_others_alone_needs_none_of_ours(codec: Codec) -> None:
    store, result = store_of(codec, ME)
    others = [store_of(codec, member)[0] for member in (0, 2)]
    for member, other in zip((0, 2), others, strict=True):
        store.keep_contribution(0, member, received(store, 0, other.contribution(0)))
    both = reduce(store, 0, 0b111)
    assert store.mean(0, 0b101) is None
    assert reduce(store, 0, 0b101) != both
    payload = store.mean(0, 0b101)
    assert payload is not None
    stop = group().parts[0].stop
    reader, read = store_of(codec, 0)
    assert reader.keep_mean(0, 0b101, received(reader, 0, payload)) == blake3(payload).digest()
    result.contributors = read.contributors = 0b101
    assert torch.equal(read.values[:stop], result.values[:stop])
    with pytest.raises(KeyError):
        reduce(others[0], 0, 0b111)  # Nothing else may stand for what has not come.


def ruled(
    rule: Rule, weights: tuple[float, ...], values: list[float], reducer: DeviceReducer | None = None
) -> torch.Tensor:
    """The first part of the result of a round by `rule`; each member's values are all alike."""
    result = Result(parse_codec("fp32"))
    stores = [
        RoundBuffers(
            group(weights),
            me,
            result.layout,
            Vectors(encoded(result.layout, torch.full((SIZE,), value)), result.memory),
            BufferPool(),
            rule,
            reducer,
        )
        for me, value in enumerate(values)
    ]
    for member in (0, 2):
        stores[ME].keep_contribution(0, member, received(stores[ME], 0, stores[member].contribution(0)))
    reduce(stores[ME], 0, EVERYBODY)
    return result.values[: group().parts[0].stop]


def test_a_rule_gets_every_contribution_once_whatever_its_weight() -> None:
    assert ruled(parse_rule("median"), (1.0, 2.0, 1e-3), [1.0, 5.0, 4.0]).unique().tolist() == [4.0]


def test_another_rule_than_the_mean_stays_on_the_cpu() -> None:
    reducer = DeviceReducer(torch.device("meta"))
    assert ruled(parse_rule("median"), WEIGHTS, [1.0, 5.0, 4.0], reducer).unique().tolist() == [4.0]
    assert reducer.trouble == ""


@pytest.mark.parametrize("absent", range(MEMBERS))
def test_the_zeros_of_a_member_that_only_attends_are_no_contribution(absent: int) -> None:
    weights = tuple(ATTENDANCE_LIMIT if member == absent else 1.0 for member in range(MEMBERS))
    values = [0.0 if member == absent else 2.0 + 2 * member for member in range(MEMBERS)]
    expected = sum(values) / 2
    assert ruled(parse_rule("median"), weights, values).unique().tolist() == [expected]
    assert ruled(parse_rule("median"), (ATTENDANCE_LIMIT,) * MEMBERS, [0.0] * MEMBERS).unique().tolist() == [
        0
    ]


class Broken(Rule):
    """Another package's rule, with a fault of each kind."""

    name = spec = "broken"

    def __init__(self, values: object) -> None:
        self.values = values

    def reduce(self, rows: torch.Tensor, weights: torch.Tensor) -> Reduced:
        if isinstance(self.values, Exception):
            raise self.values
        return self.values if self.values is None else Reduced(self.values, weights)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            RuleError("broken: needs at least 5 contributions, got 3"),
            "broken: needs at least 5 contrib.* got 3",
        ),
        (KeyError("a\nb"), r"the rule broken failed: KeyError: 'a\\nb'"),
        (IndexError("first\nsecond"), "the rule broken failed: IndexError: first second"),
        (None, "the rule broken failed: AttributeError: .*"),
        (torch.ones(3), r"the rule broken returned torch.float32 \[3\], expected torch.float32 \[1024\]"),
        (torch.ones(1024).double(), "the rule broken returned torch.float64 .* expected torch.float32 .*"),
        (torch.full((1024,), torch.inf), "the rule broken returned inf"),
    ],
)
def test_a_fault_of_a_rule_is_an_error_of_one_line(values: object, said: str) -> None:
    with pytest.raises(RuleError, match=rf"\A{said}\Z"):
        ruled(Broken(values), WEIGHTS, [1.0, 2.0, 3.0])


@codecs
def test_a_payload_that_does_not_decode_is_not_kept(codec: Codec) -> None:
    store, _ = store_of(codec, ME)
    bad = memoryview(bytearray(b"\xff" * store.size(0)))
    with pytest.raises(CodecError):
        store.keep_contribution(0, 0, bad)
    with pytest.raises(CodecError):
        store.keep_mean(0, EVERYBODY, bad)
    assert store.mean(0, EVERYBODY) is None


@codecs
def test_a_payload_that_does_not_decode_replaces_no_mean(codec: Codec) -> None:
    (giver, given), (store, result) = store_of(codec, 0), store_of(codec, ME)
    reduce(giver, 0, 0b001)
    good = giver.mean(0, 0b001)
    assert good is not None
    store.keep_mean(0, 0b001, received(store, 0, good))
    bad = received(store, 0, good)
    bad[:] = b"\xff" * len(bad)
    with pytest.raises(CodecError):
        store.keep_mean(0, 0b011, bad)
    size, result.contributors, given.contributors = group().parts[0].size, 0b001, 0b001
    assert torch.equal(result.values[:size], given.values[:size])
    assert store.mean(0, 0b001) == good


@codecs
def test_values_written_while_their_round_goes_on_are_sent_only_if_sound(codec: Codec) -> None:
    result = Result(codec)
    memory = encoded(result.layout, values_of(ME))
    store = RoundBuffers(group(), ME, result.layout, Vectors(memory, result.memory), BufferPool(), Mean())
    part = len(group().parts) - 1
    sent = bytes(store.contribution(part))
    memory[:] = b"\xff" * len(memory)
    for call in (lambda: store.contribution(part), store.reduction(part, 1 << ME)):
        with pytest.raises(CodecError):
            call()
    assert store.mean(part, 1 << ME) is None
    assert result.memory == Result(codec).memory
    codec.check(sent, group().parts[part].size)


def test_released_memory_goes_back_to_the_pool() -> None:
    pool = BufferPool()
    store, _ = store_of(parse_codec("int8"), ME, pool)
    other, _ = store_of(parse_codec("int8"), 0)
    for part in range(len(group().parts)):
        store.keep_contribution(part, 0, received(store, part, other.contribution(part)))
        reduce(store, part, 0b011)
    scratch = sum(map(len, pool.idle.values()))
    store.release()
    assert sum(map(len, pool.idle.values())) == scratch + 2 * len(group().parts)
