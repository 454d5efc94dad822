"""The choice of the kernels with which this process computes, and its reason.

Kernels are chosen only if they write numpy's bytes on this machine: a fused operation, another order or way to round
changes some of them.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from equipoise.compression import sparse
from equipoise.compression.array_math import (
    FORMATS,
    ArrayMath,
    BlockMath,
    FloatMath,
    Int8Math,
    nf4_math,
    sparse_math,
)
from equipoise.compression.blockwise import (
    LEVELS,
    ArrayKernels,
    Blocks,
    Kind,
    TensorKernels,
    clamped,
)
from equipoise.compression.errors import CodecError
from equipoise.compression.late_torch import torch
from equipoise.compression.nf4 import NF4, THRESHOLDS

ENVIRONMENT = "EQUIPOISE_KERNELS"
"""Name of the variable that decides if it is set to one of NAMES."""

NAMES = ("torch", "numba", "triton")

WORTH_VALUES = 256 * 1024
"""Fewest values for which kernels are loaded if they are not yet. Without them these take 2 ms, and 0.1 with; to load
them takes 0.7 s of a processor and 130 MB, which is much for 32 daemons of one machine."""

INTERPRETER = "TRITON_INTERPRET"
"""Name of Triton's own variable: with "1" its kernels run on CPU tensors, for tests."""

_COUNT = 64 * 128 + 100
"""Values of a row; payloads of so many lie one behind the other, each aligned."""

_BLOCKS = (32, 128)
_MATHS: list[BlockMath] = [
    *(Int8Math("int8", Blocks(block)) for block in _BLOCKS),
    nf4_math(),
    *map(sparse_math, sparse.GROUPS),
]
_WEIGHTS = (0.3, 1 / 3, 0.2, 0.7, 0.1)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels for values on a device.

    Attributes:
        name: One of NAMES.
        arrays: Compiled kernels for arrays in a CPU's memory; None where numpy or torch computes.
        reason: Why these, in a few words, for logs and `status`.
        tensors: Kernels for tensors; None where torch computes.
    """

    name: str
    arrays: ArrayKernels | None
    reason: str
    tensors: TensorKernels | None = None


@functools.cache
def kernels(device: str = "cpu") -> Choice:
    """Choose the kernels for a device, as "cpu" or "cuda:0", once per process.

    They are numba's on a CPU and Triton's on a GPU, where these are installed and do not disagree with numpy, whose
    bytes are torch's.
    The first call imports them and loads compiled code (0.6-0.9 s; longer once per machine, when they compile).
    Call it in a thread for which no round waits.

    Raises:
        CodecError: EQUIPOISE_KERNELS is neither unset nor one of NAMES.
    """
    wanted = os.environ.get(ENVIRONMENT)
    if wanted not in (None, "", *NAMES):
        raise CodecError(f"{ENVIRONMENT}={wanted!r} is not known; expected {', '.join(NAMES)}, or unset")
    if wanted == "torch":
        return Choice("torch", None, f"{ENVIRONMENT}=torch")
    on_cpu = device == "cpu"
    interpreted = wanted == "triton" and os.environ.get(INTERPRETER) == "1"
    if interpreted or (device.startswith("cuda") and wanted != "numba"):
        name, hint = "triton", "pip install 'equipoise[gpu]' for kernels of one pass"
    elif on_cpu:
        name, hint = "numba", "pip install 'equipoise[fast]' for kernels that are 2-3 times as fast"
    else:
        return Choice("torch", None, f"{wanted or 'triton'} does not run there")
    origin = f"{ENVIRONMENT}={name}" if wanted == name else f"{name} is installed"
    try:
        found = import_module(f"equipoise.compression.{name}_kernels").KERNELS
        if name == "triton":
            agreed, choice = _tensors_agree(found, torch.device(device)), Choice(name, None, origin, found)
        else:
            agreed, choice = _arrays_agree(found), Choice(name, found, origin)
    except ModuleNotFoundError as error:
        return Choice("torch", None, f"{error.name} is not installed; {hint}")
    # A compiler, its libraries and its cache may raise anything. Other kernels then compute, and the reason is shown.
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        return Choice("torch", None, f"{name} failed: {text}")
    return choice if agreed else Choice("torch", None, f"{name}'s bytes differ from torch's on this machine")


def are_worth(count: int) -> bool:
    """Whether to load kernels for `count` values: for many, or if EQUIPOISE_KERNELS asks for them."""
    return count >= WORTH_VALUES or bool(os.environ.get(ENVIRONMENT))


def compiled(count: int) -> ArrayKernels | None:
    """Return compiled kernels for `count` values on a CPU; None if none run here, or loading does not pay."""
    return kernels().arrays if kernels.cache_info().currsize or are_worth(count) else None


def kernels_for(device: torch.device) -> str:
    """Say in one line which kernels serve tensors of a device, and why if they are not the best.

    As "numba", "triton on cuda:0" or "torch on cuda:0: triton is not installed; ...".
    """
    on_cpu = device.type == "cpu"
    choice = kernels() if on_cpu else kernels(str(device))
    where = choice.name if on_cpu else f"{choice.name} on {device}"
    return f"{where}: {choice.reason}" if choice.name == "torch" else where


def _arrays_agree(kernels: ArrayKernels) -> bool:
    """Compare the bytes of kernels for arrays with numpy's."""
    blocks = all(
        _by_arrays(kernels, math.blocks) == _expected(math, math.blocks.size(_COUNT)) for math in _MATHS
    )
    return blocks and all(
        _expected(FloatMath(spec, lambda count: kernels), 2 * _COUNT)
        == _expected(FloatMath(spec), 2 * _COUNT)
        for spec in kernels.narrow
    )


def _tensors_agree(kernels: TensorKernels, device: torch.device) -> bool:
    """Compare the bytes of kernels for tensors on a device with numpy's."""
    kinds: list[tuple[Kind, ArrayMath, int]] = [
        (math.blocks, math, math.blocks.size(_COUNT)) for math in _MATHS
    ]
    kinds += [(getattr(torch, one.name), FloatMath(spec), _COUNT * one.size) for spec, one in FORMATS.items()]
    return all(
        _by_tensors(kernels, kind, size, device) == _expected(math, size) for kind, math, size in kinds
    )


def _rows() -> NDArray[np.float32]:
    """Values of many magnitudes; of one, so that all count in a sum; half-way between two of bf16, or two codes.

    Of nf4 these are thresholds. Behind the last whole block values cancel out, so that whatever else is added shows.
    """
    even = np.linspace(-1.9, 1.7, _COUNT, dtype=np.float32)
    exponents = np.minimum(np.arange(_COUNT) // max(_BLOCKS) * 4 - 140, 127).astype(np.float32)
    halves = np.arange(0x3F80, 0x3F80 + _COUNT, dtype=np.int32) * 0x1_0000 + 0x8000
    codes = np.arange(_COUNT, dtype=np.float32) % 32 - np.float32(15.5)
    codes[:: min(_BLOCKS)] = LEVELS
    for number, threshold in enumerate(THRESHOLDS):
        codes[number + 1 :: NF4.block] = threshold * np.float32(LEVELS)
    rows = np.stack([even * np.exp2(exponents), even, -np.roll(even, 3), halves.view(np.float32), codes])
    short = _COUNT % max(_BLOCKS)
    rows[:, -short:] = np.roll(even[-short:], 1)
    rows[::2, -short:] *= -1
    return rows


def _expected(math: ArrayMath, size: int) -> bytes:
    """Return the encoded rows, their encoded weighted sum, and the decoded rows."""
    rows, total = _rows(), np.zeros(_COUNT, np.float32)
    *payloads, mean = encoded = np.zeros((len(rows) + 1, size), np.uint8)
    decoded = np.empty_like(rows)
    for row, payload, out, weight in zip(rows, payloads, decoded, _WEIGHTS, strict=True):
        math.encode(row, payload)
        math.decode(payload, out)
        math.accumulate(payload, weight, total)
    math.encode(total, mean)
    return encoded.tobytes() + decoded.tobytes()


def _by_arrays(kernels: ArrayKernels, blocks: Blocks) -> bytes:
    rows, total = _rows(), np.zeros(_COUNT, np.float32)
    *payloads, mean = encoded = np.zeros((len(rows) + 1, blocks.size(_COUNT)), np.uint8)
    decoded = np.zeros_like(rows)
    for number, (row, payload, out) in enumerate(zip(rows, payloads, decoded, strict=True)):
        kernels.encode(row, payload, *blocks)
        kernels.decode(payload, out, *blocks, number % 2 == 0)
        kernels.accumulate(payload, _WEIGHTS[number], total, *blocks)
    addresses = np.array([payload.ctypes.data for payload in payloads], np.int64)
    scratch, in_turn = np.empty(_COUNT, np.float32), np.zeros_like(mean)
    kernels.reduce(addresses, np.array(_WEIGHTS), mean, scratch, *blocks)
    kernels.encode(total, in_turn, *blocks)
    return encoded.tobytes() + decoded.tobytes() if (in_turn == mean).all() else b""


def _by_tensors(kernels: TensorKernels, kind: Kind, size: int, device: torch.device) -> bytes:
    rows = torch.from_numpy(_rows()).to(device)
    *payloads, mean = encoded = torch.zeros(len(rows) + 1, size, dtype=torch.uint8, device=device)
    decoded = torch.zeros_like(rows)
    notes = [kernels.encode(row, payload, kind) for row, payload in zip(rows, payloads, strict=True)]
    for payload, out in zip(payloads, decoded, strict=True):
        kernels.decode(payload, out, kind)
    notes.append(kernels.reduce(payloads, _WEIGHTS, mean, _COUNT, kind))
    finite = None not in map(clamped, notes)
    return encoded.cpu().numpy().tobytes() + decoded.cpu().numpy().tobytes() if finite else b""
