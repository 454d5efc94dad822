"""What codecs compute, one value at a time, in numpy scalars and integers: slow, and plain to check by eye."""

from __future__ import annotations

import itertools
import struct
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

F32_MAX = np.finfo(np.float32).max
TINY = np.float32(2.0**-116)


def int8_encode(values: Floats, block: int) -> bytes:
    """The scale of each block and its codes."""
    payload = b""
    for start in range(0, len(values), block):
        x = values[start : start + block]
        absmax = np.float32(max(abs(value) for value in x))
        if absmax < TINY:
            scale, inverse = np.float32(0), np.float32(0)
        else:
            scale = min(np.float32(absmax / np.float32(127)), largest_scale())
            inverse = np.float32(127) / absmax
        payload += struct.pack("<f", scale)
        # Python's round is half to even, and exact on the double that holds the single.
        payload += struct.pack(f"<{len(x)}b", *(round(float(value * inverse)) for value in x))
    return payload


def int8_decode(payload: bytes, count: int, block: int) -> Floats:
    """Code times scale."""
    found = []
    for at in range(0, len(payload), 4 + block):
        scale = np.frombuffer(payload[at : at + 4], dtype="<f4")[0]
        found += [
            np.float32(code) * scale for code in np.frombuffer(payload[at + 4 : at + 4 + block], np.int8)
        ]
    assert len(found) == count
    return np.array(found, dtype=np.float32)


NF4_LEVELS = (
    *("-1.0", "-0.6961928009986877", "-0.5250730514526367", "-0.39491748809814453", "-0.28444138169288635"),
    *("-0.18477343022823334", "-0.09105003625154495", "0.0", "0.07958029955625534", "0.16093020141124725"),
    *("0.24611230194568634", "0.33791524171829224", "0.44070982933044434", "0.5626170039176941"),
    *("0.7229568362236023", "1.0"),
)
"""QLoRA's (arXiv 2305.14314, appendix E), as bitsandbytes prints them."""


def nf4_thresholds() -> list[np.float32]:
    """Half-way between levels."""
    levels = [float(np.float32(level)) for level in NF4_LEVELS]
    return [np.float32((one + two) / 2) for one, two in itertools.pairwise(levels)]


def nf4_encode(values: Floats) -> bytes:
    """The scale of each block and its codes, of which the first half are low nibbles."""
    thresholds, payload = nf4_thresholds(), b""
    for start in range(0, len(values), 64):
        x = values[start : start + 64]
        absmax = np.float32(max(abs(value) for value in x))
        word = bf16_encode(np.array([absmax])) if absmax >= TINY else bytes(2)
        scale = float_decode("bf16", word)[0]
        codes = [sum(bool(value > threshold * scale) for threshold in thresholds) for value in x]
        codes = [*(codes if scale else [7] * len(x)), 7]
        half = (len(x) + 1) // 2
        payload += word + bytes(codes[i] | codes[half + i] << 4 for i in range(half))
    return payload


def nf4_decode(payload: bytes, count: int) -> Floats:
    """Level times scale."""
    found: list[np.float32] = []
    for at in range(0, len(payload), 34):
        scale, codes = float_decode("bf16", payload[at : at + 2])[0], payload[at + 2 : at + 34]
        nibbles = [code & 15 for code in codes] + [code >> 4 for code in codes]
        found += [np.float32(NF4_LEVELS[nibble]) * scale for nibble in nibbles[: count - len(found)]]
    return np.array(found, dtype=np.float32)


SPARSE = {64: (["3/8"], ["0", "3/4"]), 32: (["1/8", "3/8", "3/4"], ["0", "1/4", "1/2", "1"])}
"""Thresholds and levels, by the group."""


def sparse_encode(values: Floats, group: int) -> bytes:
    """The scale of each 512 values, and a byte of each group: index, sign, magnitude."""
    payload = b""
    for start in range(0, len(values), 512):
        x = values[start : start + 512]
        absmax = np.float32(max(abs(value) for value in x))
        word = bf16_encode(np.array([absmax])) if absmax >= TINY else bytes(2)
        scale, codes = float_decode("bf16", word)[0], []
        for chosen in (x[at : at + group] for at in range(0, len(x), group)):
            index = max(range(len(chosen)), key=lambda i: (abs(chosen[i]), -i))
            m = sum(abs(chosen[index]) > np.float32(Fraction(one)) * scale for one in SPARSE[group][0])
            codes.append(index + group * int(chosen[index] < 0) + 2 * group * m if m and scale else 0)
        payload += word + bytes(codes)
    return payload


def sparse_decode(payload: bytes, count: int, group: int) -> Floats:
    """Sign times level times scale, at the index of each group; 0 elsewhere."""
    found, size = np.zeros(count, np.float32), 2 + 512 // group
    for block, at in enumerate(range(0, len(payload), size)):
        scale = float_decode("bf16", payload[at : at + 2])[0]
        for number, code in enumerate(payload[at + 2 : at + size]):
            level = np.float32(Fraction(SPARSE[group][1][code // (2 * group)]))
            if level:
                sign = np.float32(-1 if code // group % 2 else 1)
                found[512 * block + group * number + code % group] = sign * (level * scale)
    return found


def largest_scale() -> np.float32:
    """The greatest f32 whose product with 127 is finite."""
    scale = F32_MAX / np.float32(127)
    with np.errstate(over="ignore"):
        while not np.isfinite(np.float32(127) * scale):
            scale = np.nextafter(scale, np.float32(0))
    return scale


def fp16_encode(values: Floats) -> bytes:
    """struct's half precision rounds to nearest even."""
    return b"".join(struct.pack("<e", max(-65504.0, min(65504.0, float(value)))) for value in values)


def bf16_encode(values: Floats) -> bytes:
    """The upper half of the single's bits, rounded to nearest even, kept from carrying into an infinity."""
    halves = []
    for (bits,) in struct.iter_unpack("<I", values.astype("<f4").tobytes()):
        sign, magnitude = bits & 0x8000_0000, bits & 0x7FFF_FFFF
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        halves.append(sign >> 16 | min(rounded, 0x7F7F))
    return struct.pack(f"<{len(halves)}H", *halves)


def float_decode(spec: str, payload: bytes) -> Floats:
    """Every fp16 and bf16 is an f32."""
    if spec == "fp32":
        return np.frombuffer(payload, dtype="<f4")
    if spec == "fp16":
        return np.frombuffer(payload, dtype="<f2").astype(np.float32)
    return (np.frombuffer(payload, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


def encode(spec: str, values: Floats) -> bytes:
    """What the codec of the canonical `spec` makes of `values`."""
    if spec.startswith("int8:block="):
        return int8_encode(values, int(spec.removeprefix("int8:block=")))
    if spec.startswith("sparse:group="):
        return sparse_encode(values, int(spec.removeprefix("sparse:group=")))
    encoders = {"fp32": _raw, "fp16": fp16_encode, "bf16": bf16_encode, "nf4:block=64": nf4_encode}
    return encoders[spec](values)


def decode(spec: str, payload: bytes, count: int) -> Floats:
    """What the codec of the canonical `spec` makes of `payload`."""
    if spec.startswith("int8:block="):
        return int8_decode(payload, count, int(spec.removeprefix("int8:block=")))
    if spec.startswith("sparse:group="):
        return sparse_decode(payload, count, int(spec.removeprefix("sparse:group=")))
    return nf4_decode(payload, count) if spec == "nf4:block=64" else float_decode(spec, payload)


def accumulate(total: Floats, weight: float, decoded: Floats) -> Floats:
    """One product and one sum, each rounded to f32."""
    return np.array(
        [t + np.float32(np.float32(weight) * d) for t, d in zip(total, decoded, strict=True)],
        dtype=np.float32,
    )


def _raw(values: Floats) -> bytes:
    return values.astype("<f4").tobytes()
