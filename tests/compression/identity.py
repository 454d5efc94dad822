"""Print, as JSON, this process's kernels, and digests of what they make of many values: run by test_triton_kernels.py.

Kernels are chosen once per process, so each choice has one of its own, with EQUIPOISE_KERNELS in its environment.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import os
import sys
from typing import Any

import numpy as np
import torch

from equipoise.compression import Codec, CodecError, Values, kernels, parse_codec
from equipoise.compression.choice import ENVIRONMENT

SPECS = (
    "fp32",
    "fp16",
    "bf16",
    "int8:block=32",
    "int8",
    "int8:block=4096",
    "nf4",
    "sparse",
    "sparse:group=32",
)
MAGNITUDES = (1e-44, 1e-37, 2.0**-116, 1e-3, 1.0, 3e4, 1e20, torch.finfo(torch.float32).max)
COUNTS = (1, 300, 4501)
FEW = (MAGNITUDES[0], 1.0, MAGNITUDES[-1]), COUNTS[1:], (1, 3, 16)
"""Of these, and of numbers of members, those that --few takes: Triton's interpreter is slow."""

WEIGHTS = (1 / 3, 0.0, 2.0**-30)
MEMBERS = 16


def values_of(count: int, magnitude: float, seed: int) -> torch.Tensor:
    """Values up to `magnitude`, with zeros of both signs, half steps of a code, and one block of zeros."""
    values = torch.rand(count, generator=torch.Generator().manual_seed(seed)).mul_(2).sub_(1)
    values[::7] = 0.0
    values[3::7] = -0.0
    values[5::64] = (
        torch.arange(len(values[5::64]), dtype=torch.float32).remainder_(254).sub_(126.5).div_(127)
    )
    values[6::64] = 1.0
    values[4096 : 4096 + 128] = 0.0
    return values.mul_(magnitude)


def digest(*parts: memoryview | torch.Tensor | int) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(
            part.numpy()
            if isinstance(part, torch.Tensor)
            else str(part).encode()
            if isinstance(part, int)
            else part
        )
    return made.hexdigest()[:16]


def room(codec: Codec, count: int) -> memoryview:
    return memoryview(bytearray(codec.encoded_size(count)))


def given(values: torch.Tensor) -> Values:
    """The values as codecs get them: with --arrays, those of a process without torch."""
    return values.numpy() if "--arrays" in sys.argv else values


def encoded(codec: Codec, values: Values) -> tuple[memoryview, int]:
    payload = room(codec, len(values))
    return payload, codec.encode(values, payload)


def reduced(codec: Codec, payloads: list[memoryview], count: int) -> str:
    weights = [WEIGHTS[index % len(WEIGHTS)] for index in range(len(payloads))]
    mean, out = memoryview(bytearray(codec.mean_size(count, len(payloads)))), torch.empty(count)
    clamped = codec.reduce(payloads, weights, mean, given(torch.empty(count)))
    codec.decode_mean(mean, weights, given(out))
    return digest(mean, clamped, out)


def digests() -> dict[str, str]:
    found = {}
    magnitudes, counts, groups = FEW if "--few" in sys.argv else (MAGNITUDES, COUNTS, range(1, MEMBERS + 1))
    for codec in map(parse_codec, SPECS):
        for magnitude in magnitudes:
            for count in counts:
                values = values_of(count, magnitude, count)
                payload, clamped = encoded(codec, given(values))
                out = torch.empty(count)
                codec.decode(payload, given(out))
                case = f"{codec.spec}, {count} of {magnitude:.3g}"
                found[f"encode {case}"] = digest(payload, clamped)
                found[f"decode {case}"] = digest(out)
        # Neighbours have opposite signs: what no value holds adds up, and shows beside sums that cancel out.
        rows = [values_of(4500, (-1) ** index * 10.0 ** (index % 5 - 2), index) for index in range(MEMBERS)]
        # As arrays: that tensors give the same bytes is compared above.
        payloads = [encoded(codec, row.numpy())[0] for row in rows]
        for members in groups:
            found[f"reduce {codec.spec}, {members} members"] = reduced(codec, payloads[:members], 4500)
        found.update(refusals(codec))
    return found


def refusals(codec: Codec) -> dict[str, str]:
    """What a codec says of values, and of a sum, that are not finite."""
    found = {}
    for wrong in (math.nan, math.inf, -math.inf):
        values = values_of(9001, 1.0, 0)
        values[[8123, 8999]] = wrong
        try:
            encoded(codec, given(values))
        except CodecError as error:
            found[f"{codec.spec} of {wrong}"] = str(error)
    if codec.needs_feedback:  # Its sum is made where it is decoded.
        return found
    payload = encoded(codec, given(torch.full((300,), 6e4)))[0]
    try:
        codec.reduce([payload] * 2, [3e38] * 2, room(codec, 300), given(torch.empty(300)))
    except CodecError as error:
        found[f"{codec.spec} of a sum"] = str(error)
    return found


def patch_once() -> None:
    """Have Triton's interpreter patch its language once for each function: at each call, that is most of its time."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)


if __name__ == "__main__":
    np.seterr(all="ignore")  # Triton's interpreter is numpy, which warns of what CPUs and GPUs do silently.
    torch.set_num_threads(1)
    if os.environ.get(ENVIRONMENT) == "triton":
        patch_once()
        if "--few" not in sys.argv:
            kernels()  # Compares tiles of the usual size.
        # A program of the interpreter takes some milliseconds, whatever its tile.
        vars(importlib.import_module("equipoise.compression.triton_kernels"))["TILE"] = 4096
    chosen = kernels()
    found = {} if "--choice" in sys.argv else digests()
    print(json.dumps({"kernels": chosen.name, "reason": chosen.reason, "found": found}))
