"""nf4: the oracle's bytes at the edges of the number range, figures, payloads that no encoder writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise.compression import Codec, CodecError, kernels, parse_codec
from equipoise.compression.block_codecs import NF4Codec
from equipoise.compression.blockwise import MIN_ABSMAX
from oracles import codecs as oracle

NF4 = NF4Codec()
F32_MAX = np.finfo(np.float32).max
TINY = np.float32(MIN_ABSMAX)
DRAWN = np.random.default_rng(0).standard_normal(129).astype(np.float32)
ONE = np.eye(1, 129, 40, dtype=np.float32)[0]

VECTORS = {
    "random": DRAWN,
    "zero": DRAWN * 0,
    "subnormal": DRAWN * np.float32(1e-44),
    "2^-116 - 1 ulp": np.clip(DRAWN, -1, 1) * np.nextafter(TINY, np.float32(0)),
    "2^-116": np.clip(DRAWN, -1, 1) * TINY,
    "2^-116 + 1 ulp": np.clip(DRAWN, -1, 1) * np.nextafter(TINY, np.float32(1)),
    "constant": np.full(129, -3.7, np.float32),
    "one outlier": DRAWN + 1000 * ONE,
    "f32_max": np.clip(DRAWN, -1, 1) * F32_MAX,
    "thresholds": np.resize(np.array([2.0, *(2 * one for one in oracle.nf4_thresholds())], np.float32), 129),
}


def encoded(codec: Codec, values: np.ndarray) -> bytes:
    out = bytearray(codec.encoded_size(len(values)))
    codec.encode(values, out)
    return bytes(out)


@pytest.mark.parametrize("name", VECTORS)
def test_every_kernel_writes_the_oracles_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    for choice in ("torch", "numba"):
        monkeypatch.setenv("EQUIPOISE_KERNELS", choice)
        kernels.cache_clear()
        for count in range(130):
            values = VECTORS[name][:count]
            payload = oracle.nf4_encode(values)
            assert encoded(NF4, values) == payload
            NF4.check(payload, count)
            tensor = torch.zeros(len(payload), dtype=torch.uint8)
            NF4._encode(torch.from_numpy(values), tensor)
            assert tensor.numpy().tobytes() == payload
            out = np.empty(count, np.float32)
            NF4.decode(bytearray(payload), out)
            assert out.tobytes() == oracle.nf4_decode(payload, count).tobytes()
    kernels.cache_clear()


def test_codes_of_the_first_half_are_low_nibbles() -> None:
    assert encoded(NF4, np.array([1, -1, 0], np.float32)) == b"\x80\x3f\x7f\x70"
    assert [NF4.encoded_size(count) for count in (0, 1, 64, 65)] == [0, 3, 34, 37]


def test_error_on_a_normal_distribution_and_bits() -> None:
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    payload, out = bytearray(NF4.encoded_size(1 << 20)), torch.empty(1 << 20)
    NF4.encode(values, payload)
    NF4.decode(payload, out)
    assert 8 * len(payload) / (1 << 20) == 4.25
    assert 0.091 <= (out - values).norm() / values.norm() <= 0.093


WRONG = {
    "truncated": (lambda payload: payload[:-1], "70 values are 39 bytes, not 38"),
    "longer": (lambda payload: payload + b"\x77", "70 values are 39 bytes, not 40"),
    "NaN": (lambda payload: b"\xc0\x7f" + payload[2:], "the scale of block 0 of 2 is nan; expected 0, or"),
    "infinite": (
        lambda payload: payload[:34] + b"\x80\x7f" + payload[36:],
        "the scale of block 1 of 2 is inf",
    ),
    "negative": (lambda payload: b"\x80\xbf" + payload[2:], "the scale of block 0 of 2 is -1.0"),
    "minus 0": (lambda payload: b"\x00\x80" + payload[2:], "the scale of block 0 of 2 is -0.0"),
    "subnormal": (lambda payload: b"\x01\x00" + payload[2:], "the scale of block 0 of 2 is 9.18"),
    "below 2^-116": (lambda payload: b"\x7f\x05" + payload[2:], "the scale of block 0 of 2 is 1.19"),
    "a code in scale 0": (
        lambda payload: payload[:34] + bytes(2) + payload[36:],
        "block 1 has scale 0 and a code",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("choice", ["torch", "numba"])
def test_what_no_encoder_writes_is_refused_and_changes_nothing(
    wrong: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choice == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("EQUIPOISE_KERNELS", choice)
    kernels.cache_clear()
    change, told = WRONG[wrong]
    payload, out = bytearray(change(encoded(NF4, DRAWN[:70]))), np.full(70, 5, np.float32)
    for call in (
        lambda: NF4.check(payload, 70),
        lambda: NF4.decode(payload, out),
        lambda: NF4.decode(payload, torch.from_numpy(out)),
    ):
        with pytest.raises(CodecError, match=rf"\Anf4:block=64: {told}.*\Z"):
            call()
    assert (out == 5).all()
    kernels.cache_clear()


@pytest.mark.parametrize("choice", ["torch", "numba"])
def test_a_nibble_without_a_value_is_7(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("EQUIPOISE_KERNELS", choice)
    kernels.cache_clear()
    payload = bytearray(encoded(NF4, DRAWN[:71]))
    payload[-1] ^= 0x10
    with pytest.raises(CodecError, match=r"\Anf4:block=64: the nibble behind value 71 is 6; expected 7\Z"):
        NF4.check(payload, 71)
    kernels.cache_clear()


def test_there_is_one_block() -> None:
    assert parse_codec("nf4").spec == parse_codec("nf4:block=64").spec == "nf4:block=64"
    with pytest.raises(CodecError, match=r"\Anf4: block is 64, not 32\Z"):
        parse_codec("nf4:block=32")
