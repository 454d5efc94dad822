"""What holds for every codec: bytes as the oracle's, sizes, buffers, refusals."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from equipoise.compression import Codec, CodecError, NonFiniteError, first_non_finite, parse_codec
from equipoise.compression.chunks import CHUNK_VALUES
from oracles import codecs as oracle

DENSE = ["fp32", "fp16", "bf16", "int8:block=32", "int8:block=128", "int8:block=256", "nf4:block=64"]
SPECS = [*DENSE, "sparse:group=64", "sparse:group=32"]
F32_MAX = torch.finfo(torch.float32).max

every_dense_codec = pytest.mark.parametrize("codec", [parse_codec(spec) for spec in DENSE], ids=DENSE)
every_codec = pytest.mark.parametrize("codec", [parse_codec(spec) for spec in SPECS], ids=SPECS)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def vectors(elements: st.SearchStrategy[float] = finite) -> st.SearchStrategy[torch.Tensor]:
    return st_numpy.arrays(np.float32, st.integers(0, 150), elements=elements).map(torch.from_numpy)


def encoded(codec: Codec, values: torch.Tensor) -> bytes:
    out = bytearray(codec.encoded_size(values.numel()))
    codec.encode(values, out)
    return bytes(out)


def decoded(codec: Codec, payload: bytes, count: int) -> torch.Tensor:
    out = torch.full((count,), torch.nan)
    codec.decode(payload, out)
    return out


def refusal(codec: Codec, payload: bytes, count: int) -> str | None:
    try:
        codec.check(payload, count)
    except CodecError as error:
        return str(error)
    return None


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@every_codec
@given(values=vectors())
def test_bytes_are_the_oracles(codec: Codec, values: torch.Tensor) -> None:
    payload = encoded(codec, values)
    assert payload == oracle.encode(codec.spec, values.numpy())
    expected = oracle.decode(codec.spec, payload, values.numel())
    assert same_bits(decoded(codec, payload, values.numel()), torch.tensor(expected))


@every_codec
@given(values=vectors())
def test_finite_values_decode_to_finite_values_that_pass_the_check(
    codec: Codec, values: torch.Tensor
) -> None:
    payload = encoded(codec, values)
    codec.check(payload, values.numel())
    assert decoded(codec, payload, values.numel()).isfinite().all()


@every_codec
@given(values=vectors(), weight=st.floats(-1e6, 1e6), start=finite)
def test_accumulate_is_one_product_and_one_sum(
    codec: Codec, values: torch.Tensor, weight: float, start: float
) -> None:
    payload = encoded(codec, values)
    total = torch.full_like(values, start)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = oracle.accumulate(total.numpy(), weight, decoded(codec, payload, values.numel()).numpy())
    codec.accumulate(payload, weight, total)
    # Infinities of both signs may have met: a NaN's own bits mean nothing.
    np.testing.assert_array_equal(total.numpy(), expected)


@every_dense_codec
@given(values=vectors())
def test_encoding_what_was_decoded_changes_little_more(codec: Codec, values: torch.Tensor) -> None:
    once = decoded(codec, encoded(codec, values), values.numel())
    twice = decoded(codec, encoded(codec, once), values.numel())
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


@every_codec
@pytest.mark.parametrize(
    "count", [0, 1, 31, 32, 33, 256, CHUNK_VALUES - 1, CHUNK_VALUES, CHUNK_VALUES + 1, 2 * CHUNK_VALUES + 100]
)
def test_pieces_make_no_difference(codec: Codec, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    payload = encoded(codec, values)
    assert len(payload) == codec.encoded_size(count)
    result = decoded(codec, payload, count)
    whole = CHUNK_VALUES // 4
    for start in range(0, count, whole):
        part = values[start : start + whole].clone()
        assert same_bits(decoded(codec, encoded(codec, part), part.numel()), result[start : start + whole])
    total = torch.ones(count)
    codec.accumulate(payload, 3.0, total)
    assert same_bits(total, 1 + 3 * result)


@every_codec
def test_a_slice_is_encoded_to_that_slice_of_the_bytes(codec: Codec) -> None:
    values, chance = torch.randn(5003, generator=torch.Generator().manual_seed(0)), Random(codec.spec)
    payload, cuts = encoded(codec, values), [*range(0, 5003, codec.granule), 5003]
    for _ in range(1000):
        start, stop = sorted(chance.choices(cuts, k=2))
        expected = payload[codec.encoded_size(start) : codec.encoded_size(stop)]
        assert encoded(codec, values[start:stop]) == expected


@every_codec
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [0, 40, CHUNK_VALUES + 7])
def test_refuses_what_is_not_finite_and_names_the_first(codec: Codec, wrong: float, index: int) -> None:
    values = torch.ones(CHUNK_VALUES + 50)
    values[index] = wrong
    values[-1] = torch.nan
    out = bytearray(codec.encoded_size(values.numel()))
    with pytest.raises(NonFiniteError, match=f"value {index} of {values.numel()} is {wrong}") as caught:
        codec.encode(values, out)
    assert caught.value.index == index
    assert first_non_finite(values) == index


def test_first_non_finite_of_finite_values() -> None:
    assert first_non_finite(torch.tensor([F32_MAX, -F32_MAX, 1e-45, -0.0])) is None
    assert first_non_finite(torch.empty(0)) is None


@every_codec
@pytest.mark.parametrize("off", [-1, 1])
def test_refuses_buffers_of_another_size(codec: Codec, off: int) -> None:
    size = codec.encoded_size(100)
    wrong, values = bytearray(size + off), torch.zeros(100)
    message = f"{codec.spec}: 100 values are {size} bytes, not {size + off}"
    for call in (
        lambda: codec.encode(values, wrong),
        lambda: codec.decode(wrong, values),
        lambda: codec.accumulate(wrong, 1.0, values),
        lambda: codec.check(wrong, 100),
        lambda: codec.check(b"", -100),
    ):
        with pytest.raises(CodecError, match=r"values are -?\d+ bytes, not"):
            call()
    with pytest.raises(CodecError, match=message):
        codec.check(wrong, 100)


@every_codec
@pytest.mark.parametrize(
    "values",
    [torch.zeros(64, dtype=torch.float64), torch.zeros(8, 8), torch.zeros(128)[::2], torch.zeros(())],
    ids=["float64", "matrix", "strided", "scalar"],
)
def test_refuses_other_tensors(codec: Codec, values: torch.Tensor) -> None:
    buffer = bytearray(codec.encoded_size(values.numel()))
    for call in (
        lambda: codec.encode(values, buffer),
        lambda: codec.decode(buffer, values),
        lambda: codec.accumulate(buffer, 1.0, values),
    ):
        with pytest.raises(CodecError, match="expected a contiguous float32 tensor of one dimension, got"):
            call()


@every_codec
@pytest.mark.parametrize("weight", [torch.nan, torch.inf, -torch.inf, 1e39])
def test_refuses_weights_that_are_no_finite_f32(codec: Codec, weight: float) -> None:
    into = torch.ones(10)
    with pytest.raises(CodecError, match="a weight is a finite f32, not"):
        codec.accumulate(encoded(codec, into), weight, into)
    assert torch.equal(into, torch.ones(10))


@every_codec
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_buffers_of_any_kind_and_alignment(codec: Codec, shift: int) -> None:
    values = torch.randn(70, generator=torch.Generator().manual_seed(1))
    expected = encoded(codec, values)
    size = len(expected)
    room = bytearray(size + 8)
    codec.encode(values, memoryview(room)[shift : shift + size])
    assert room[shift : shift + size] == expected
    assert not any(room[:shift] + room[shift + size :])
    tensor = torch.zeros(size + 8, dtype=torch.uint8)
    codec.encode(values, tensor[shift : shift + size])
    assert bytes(tensor[shift : shift + size].numpy()) == expected
    readonly = bytes(room)
    result = decoded(codec, expected, 70)
    for payload in (memoryview(readonly)[shift : shift + size], tensor[shift : shift + size]):
        codec.check(payload, 70)
        out, total = torch.empty(70), torch.zeros(70)
        codec.decode(payload, out)
        codec.accumulate(payload, 1.0, total)
        assert same_bits(out, result)
        assert torch.equal(total, result)
    assert readonly == bytes(room)


@pytest.mark.filterwarnings("error")
def test_read_only_payloads_give_no_warning() -> None:
    codec = parse_codec("int8")
    payload = encoded(codec, torch.ones(300))
    assert torch.equal(decoded(codec, payload, 300), torch.ones(300))


def test_refuses_buffers_it_cannot_use() -> None:
    codec, values = parse_codec("fp32"), torch.zeros(4)
    with pytest.raises(CodecError, match="read-only"):
        codec.encode(values, bytes(16))
    with pytest.raises(CodecError, match="strided memoryview"):
        codec.decode(memoryview(bytes(32))[::2], values)
    with pytest.raises(CodecError, match="contiguous uint8 tensor"):
        codec.decode(torch.zeros(4), values)
    with pytest.raises(CodecError, match="contiguous uint8 tensor"):
        codec.decode(torch.zeros(32, dtype=torch.uint8)[::2], values)


@every_codec
def test_typed_and_shaped_memoryviews_are_bytes(codec: Codec) -> None:
    values = torch.ones(128)
    payload = encoded(codec, values)
    view = memoryview(payload).cast("B", (len(payload) // 2, 2))
    assert torch.equal(decoded(codec, view, 128), decoded(codec, payload, 128))  # type: ignore[arg-type]
    empty = torch.empty(0)
    codec.encode(empty, bytearray())
    codec.decode(b"", empty)
    codec.accumulate(b"", 1.0, empty)
    codec.check(b"", 0)


@every_dense_codec
def test_parameters_and_inference_mode(codec: Codec) -> None:
    parameter = torch.nn.Parameter(torch.ones(40))
    payload = encoded(codec, parameter)
    codec.accumulate(payload, 1.0, parameter)
    torch.testing.assert_close(parameter.detach(), torch.full((40,), 2.0))
    with torch.inference_mode():
        assert encoded(codec, torch.ones(40)) == payload
    assert encoded(codec, torch.ones(40)) == payload


@every_codec
@example(values=torch.tensor([4.9e-40, -(2.0**-127), 3.3895e38, -3.3895e38]))
@given(values=vectors(st.floats(-(2.0**-113), 2.0**-113, width=32) | finite))
def test_flushing_subnormal_numbers_changes_no_byte(codec: Codec, values: torch.Tensor) -> None:
    payload = encoded(codec, values)
    result = decoded(codec, payload, values.numel())
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    try:
        flushed = encoded(codec, values)
        again = decoded(codec, payload, values.numel())
    finally:
        torch.set_flush_denormal(False)
    assert flushed == payload
    assert same_bits(again, result)


@every_codec
@given(data=st.data(), count=st.integers(0, 80))
def test_any_bytes_decode_or_are_refused(codec: Codec, data: st.DataObject, count: int) -> None:
    size = codec.encoded_size(count)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    into = torch.zeros(count)
    codec.accumulate(payload, 2.0, into)
    fault = refusal(codec, payload, count)
    if fault is None:
        assert decoded(codec, payload, count).isfinite().all()
        return
    assert len(fault.splitlines()) == 1
    for buffer, out in (
        (payload, torch.empty(count)),
        (memoryview(bytearray(payload)), np.empty(count, "f")),
    ):
        with pytest.raises(CodecError) as caught:
            codec.decode(buffer, out)
        assert str(caught.value) == fault


@every_codec
def test_threads_do_not_share_scratch(codec: Codec) -> None:
    count, workers = CHUNK_VALUES + 300, 4
    inputs = [
        torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 1e5 for seed in range(workers)
    ]
    expected = [encoded(codec, values) for values in inputs]
    start = threading.Barrier(workers)
    wrong = []

    def work(index: int) -> None:
        start.wait()
        for _ in range(5):
            total = torch.zeros(count)
            codec.accumulate(expected[index], 1.0, total)
            if encoded(codec, inputs[index]) != expected[index]:
                wrong.append(index)
            if not torch.equal(total, decoded(codec, expected[index], count)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
