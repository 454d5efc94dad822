"""Whether kernels write numpy's bytes here; a fused operation, another order or way to round changes some of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.array_math import FORMATS, ArrayMath, BlockMath, FloatMath
from equipoise.compression.blockwise import LEVELS, ArrayKernels, payload_size
from equipoise.compression.device_kernels import Kind, TensorKernels, clamped
from equipoise.compression.late_torch import torch

COUNT = 64 * 128 + 4
"""Values of a row; payloads of so many lie one behind the other, each aligned."""

BLOCKS = (32, 128)
WEIGHTS = (0.3, 1 / 3, 0.2, 0.7, 0.1)


def arrays_agree(kernels: ArrayKernels) -> bool:
    """Compare the bytes of kernels for arrays with numpy's."""
    blocks = all(
        _by_arrays(kernels, block) == _expected(BlockMath("int8", block), payload_size(COUNT, block))
        for block in BLOCKS
    )
    return blocks and all(
        _expected(FloatMath(spec, lambda count: kernels), 2 * COUNT) == _expected(FloatMath(spec), 2 * COUNT)
        for spec in kernels.narrow
    )


def tensors_agree(kernels: TensorKernels, device: torch.device) -> bool:
    """Compare the bytes of kernels for tensors on a device with numpy's."""
    kinds: list[tuple[Kind, ArrayMath, int]] = [
        (block, BlockMath("int8", block), payload_size(COUNT, block)) for block in BLOCKS
    ]
    kinds += [(getattr(torch, one.name), FloatMath(spec), COUNT * one.size) for spec, one in FORMATS.items()]
    return all(
        _by_tensors(kernels, kind, size, device) == _expected(math, size) for kind, math, size in kinds
    )


def _rows() -> NDArray[np.float32]:
    """Values of many magnitudes; of one, so that all count in a sum; half-way between two of bf16, or two codes."""
    even = np.linspace(-1.9, 1.7, COUNT, dtype=np.float32)
    exponents = np.minimum(np.arange(COUNT) // max(BLOCKS) * 4 - 140, 127).astype(np.float32)
    halves = np.arange(0x3F80, 0x3F80 + COUNT, dtype=np.int32) * 0x1_0000 + 0x8000
    codes = np.arange(COUNT, dtype=np.float32) % 32 - np.float32(15.5)
    codes[:: min(BLOCKS)] = LEVELS
    return np.stack([even * np.exp2(exponents), even, -np.roll(even, 3), halves.view(np.float32), codes])


def _expected(math: ArrayMath, size: int) -> bytes:
    """What the rows are encoded to, their weighted sum, and what the rows are decoded to."""
    rows, total = _rows(), np.zeros(COUNT, np.float32)
    *payloads, mean = encoded = np.zeros((len(rows) + 1, size), np.uint8)
    decoded = np.empty_like(rows)
    for row, payload, out, weight in zip(rows, payloads, decoded, WEIGHTS, strict=True):
        math.encode(row, payload)
        math.decode(payload, out)
        math.accumulate(payload, weight, total)
    math.encode(total, mean)
    return encoded.tobytes() + decoded.tobytes()


def _by_arrays(kernels: ArrayKernels, block: int) -> bytes:
    rows = _rows()
    *payloads, mean = encoded = np.zeros((len(rows) + 1, payload_size(COUNT, block)), np.uint8)
    decoded = np.zeros_like(rows)
    for row, payload, out in zip(rows, payloads, decoded, strict=True):
        kernels.encode(row, payload, block)
        kernels.decode(payload, out, block)
    addresses = np.array([kernels.address(payload) for payload in payloads], np.int64)
    kernels.reduce(addresses, np.array(WEIGHTS), mean, np.empty(COUNT, np.float32), block)
    return encoded.tobytes() + decoded.tobytes()


def _by_tensors(kernels: TensorKernels, kind: Kind, size: int, device: torch.device) -> bytes:
    rows = torch.from_numpy(_rows()).to(device)
    *payloads, mean = encoded = torch.zeros(len(rows) + 1, size, dtype=torch.uint8, device=device)
    decoded = torch.zeros_like(rows)
    notes = [kernels.encode(row, payload, kind) for row, payload in zip(rows, payloads, strict=True)]
    for payload, out in zip(payloads, decoded, strict=True):
        kernels.decode(payload, out, kind)
    notes.append(kernels.reduce(payloads, WEIGHTS, mean, COUNT, kind))
    finite = None not in map(clamped, notes)
    return encoded.cpu().numpy().tobytes() + decoded.cpu().numpy().tobytes() if finite else b""
