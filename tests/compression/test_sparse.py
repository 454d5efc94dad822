"""sparse: the oracle's bytes at the edges of the number range, figures, means, payloads that no encoder writes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from equipoise.compression import CodecError, kernels, parse_codec
from equipoise.compression.block_codecs import SparseCodec
from oracles import codecs as oracle

F32_MAX, TINY = np.finfo(np.float32).max, np.float32(2.0**-116)
DRAWN = np.random.default_rng(0).standard_normal(1025).astype(np.float32)
SMALL = np.clip(DRAWN, -1, 1)
TIES = np.resize(np.array([8, *([1, -3, 3, 6, -6, 0, -0.0] * 9)], np.float32), 1025)

VECTORS = {
    "random": DRAWN,
    "zero": DRAWN * 0,
    "subnormal": DRAWN * np.float32(1e-44),
    "2^-116 - 1 ulp": SMALL * np.nextafter(TINY, np.float32(0)),
    "2^-116": SMALL * TINY,
    "2^-116 + 1 ulp": SMALL * np.nextafter(TINY, np.float32(1)),
    "constant": np.full(1025, -3.7, np.float32),
    "one outlier": DRAWN + 1000 * np.eye(1, 1025, 40, dtype=np.float32)[0],
    "f32_max": SMALL * F32_MAX,
    "thresholds and equal magnitudes": TIES,
}
COUNTS = (*range(0, 1026, 31), 1, 2, 63, 64, 65, 511, 512, 513, 1023, 1024)


@pytest.fixture(params=["torch", "numba"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("EQUIPOISE_KERNELS", request.param)
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def encoded(codec: SparseCodec, values: np.ndarray) -> bytearray:
    out = bytearray(codec.encoded_size(len(values)))
    codec.encode(values, out)
    return out


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("group", [64, 32])
@pytest.mark.parametrize("name", VECTORS)
def test_every_kernel_writes_the_oracles_bytes(name: str, group: int) -> None:
    codec = SparseCodec(group)
    for count in COUNTS:
        values = VECTORS[name][:count]
        payload = oracle.sparse_encode(values, group)
        assert encoded(codec, values) == payload
        codec.check(payload, count)
        tensor = torch.zeros(len(payload), dtype=torch.uint8)
        codec._encode(torch.from_numpy(values), tensor)
        assert tensor.numpy().tobytes() == payload
        out = np.full(count, np.nan, np.float32)
        codec.decode(bytearray(payload), out)
        assert out.tobytes() == oracle.sparse_decode(payload, count, group).tobytes()


def test_bits_and_error_on_a_normal_distribution() -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    for group, bits, least, most in ((64, 0.15625, 0.945, 0.947), (32, 0.28125, 0.909, 0.915)):
        codec, out = SparseCodec(group), torch.empty(1 << 20)
        payload = encoded(codec, values.numpy())
        codec.decode(payload, out)
        assert 8 * len(payload) / (1 << 20) == bits
        assert least <= (out - values).norm() / values.norm() <= most


def test_the_index_the_sign_and_the_magnitude_of_a_value() -> None:
    values = np.zeros(70, np.float32)
    values[[3, 66]] = -2, 1.5
    assert encoded(SparseCodec(64), values) == bytes.fromhex("0040") + bytes([3 | 64 | 128, 2 | 128])
    assert encoded(SparseCodec(32), values) == bytes.fromhex("0040") + bytes([3 | 32 | 3 << 6, 0, 2 | 2 << 6])
    assert [SparseCodec(32).encoded_size(count) for count in (0, 1, 32, 33, 512, 513)] == [0, 3, 3, 4, 18, 21]


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("group", [64, 32])
def test_a_mean_is_its_contributions_joined_and_added_up_in_turn(group: int) -> None:
    codec, weights, rows = SparseCodec(group), [0.1, 1 / 3, 0.5], [DRAWN, -np.roll(DRAWN, 1), DRAWN**3]
    payloads = [encoded(codec, row) for row in rows]
    mean = bytearray(codec.mean_size(1025, 3))
    assert codec.reduce(payloads, weights, mean, np.empty(1025, np.float32)) == 0
    assert mean == b"".join(payloads)
    expected = np.zeros(1025, np.float32)
    for payload, weight in zip(payloads, weights, strict=True):
        expected = oracle.accumulate(expected, weight, oracle.sparse_decode(payload, 1025, group))
    array, tensor, queued = np.ones(1025, np.float32), torch.ones(1025), torch.ones(1025)
    codec.decode_mean(mean, weights, array)
    codec.decode_mean(mean, weights, tensor)
    codec.begin_decode_mean(torch.frombuffer(mean, dtype=torch.uint8), weights, queued)
    assert array.tobytes() == tensor.numpy().tobytes() == queued.numpy().tobytes() == expected.tobytes()


WRONG = {
    "truncated": (lambda payload: payload[:-1], "570 values are 13 bytes, not 12"),
    "longer": (lambda payload: payload + b"\0", "570 values are 13 bytes, not 14"),
    "NaN": (lambda payload: b"\xc0\x7f" + payload[2:], "the scale of block 0 of 2 is nan; expected 0, or"),
    "infinite": (
        lambda payload: payload[:10] + b"\x80\x7f" + payload[12:],
        "the scale of block 1 of 2 is inf",
    ),
    "negative": (lambda payload: b"\x80\xbf" + payload[2:], "the scale of block 0 of 2 is -1.0"),
    "minus 0": (lambda payload: b"\x00\x80" + payload[2:], "the scale of block 0 of 2 is -0.0"),
    "subnormal": (lambda payload: b"\x01\x00" + payload[2:], "the scale of block 0 of 2 is 9.18"),
    "a byte in scale 0": (
        lambda payload: bytes(2) + payload[2:],
        "block 0 has scale 0 and a byte other than 0",
    ),
    "an index too far": (
        lambda payload: payload[:12] + b"\x3a",
        "an index in the last group, of 58 values, is 58",
    ),
}


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("wrong", WRONG)
def test_what_no_encoder_writes_is_refused_and_changes_nothing(wrong: str) -> None:
    change, told = WRONG[wrong]
    codec, out = SparseCodec(64), np.full(570, 5, np.float32)
    sound = bytes(encoded(codec, DRAWN[:570]))
    payload = bytearray(change(sound))
    for call in (
        lambda: codec.check(payload, 570),
        lambda: codec.decode(payload, out),
        lambda: codec.decode(payload, torch.from_numpy(out)),
    ):
        with pytest.raises(CodecError, match=rf"\Asparse:group=64: {told}.*\Z"):
            call()
    for mean, weights in ((bytearray(sound + payload), [0.5, 0.5]), (bytearray(sound), [0.5, 0.5])):
        with pytest.raises(CodecError, match=r"\Asparse:group=64: .*\Z"):
            codec.decode_mean(mean, weights, out)
    assert (out == 5).all()


def test_the_mean_of_another_number_of_contributors_is_refused() -> None:
    told = r"\Asparse:group=64: the mean of 3 contributions of 512 values is 30 bytes, not 20\Z"
    with pytest.raises(CodecError, match=told):
        SparseCodec(64).check_mean(bytearray(20), 512, 3)


def test_there_are_two_groups() -> None:
    assert parse_codec("sparse").spec == parse_codec("sparse:group=64").spec == "sparse:group=64"
    with pytest.raises(CodecError, match=r"\Asparse: group is 64 or 32, not 16\Z"):
        parse_codec("sparse:group=16")
