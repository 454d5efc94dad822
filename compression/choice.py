"""The choice of the kernels with which this process computes, and its reason."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.compression import blockwise
from equipoise.compression.blockwise import OWN_ADDRESS, ArrayKernels
from equipoise.compression.errors import CodecError

ENVIRONMENT = "EQUIPOISE_KERNELS"
"""Name of the variable that decides if it is set to one of NAMES."""

NAMES = ("torch", "numba")

_PROBE_BLOCK = 32
_PROBE_WEIGHTS = (0.3, 0.7)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels for values on a CPU.

    Attributes:
        name: One of NAMES.
        arrays: Compiled kernels of the int8 codec; None where torch computes.
        reason: Why these, in a few words, for logs and `status`.
    """

    name: str
    arrays: ArrayKernels | None
    reason: str


@functools.cache
def kernels() -> Choice:
    """Choose the kernels, once per process; numba, where it is installed and does not disagree with torch.

    The first call imports numba and loads its compiled code (0.6-0.9 s; longer once per machine, when it compiles).
    Call it at start, where nobody waits.

    Raises:
        CodecError: EQUIPOISE_KERNELS is neither unset nor one of NAMES.
    """
    wanted = os.environ.get(ENVIRONMENT)
    if wanted not in (None, "", *NAMES):
        raise CodecError(f"{ENVIRONMENT}={wanted!r} is not known; expected {' or '.join(NAMES)}, or unset")
    if wanted == "torch":
        return Choice("torch", None, f"{ENVIRONMENT}=torch")
    origin = f"{ENVIRONMENT}=numba" if wanted else "numba is installed"
    try:
        compiled = _numba()
    except ModuleNotFoundError as error:
        hint = "pip install 'equipoise[fast]' for kernels that are 2-3 times as fast"
        return Choice("torch", None, f"{error.name} is not installed; {hint}")
    # What can go wrong in a compiler, its binary dependencies and its cache is not for us to enumerate; all of it
    # leaves the other kernels, and its reason is shown.
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        return Choice("torch", None, f"numba failed: {text}")
    if not _agree(compiled):
        return Choice("torch", None, "numba's bytes differ from torch's on this machine")
    return Choice("numba", compiled, origin)


def _numba() -> ArrayKernels:
    from equipoise.compression.numba_kernels import KERNELS

    return KERNELS


def _agree(compiled: ArrayKernels) -> bool:
    """Compare bytes with torch's on values of many magnitudes; a fused operation in either changes some of them."""
    count = 64 * _PROBE_BLOCK + 5
    exponents = torch.arange(count, dtype=torch.float32).div_(_PROBE_BLOCK).floor_().mul_(4).sub_(140)
    values = torch.linspace(-1.9, 1.7, count).mul_(torch.exp2(exponents.clamp_(max=127)))
    own, decoded, total = values.flip(0), torch.empty_like(values), torch.zeros_like(values)
    payload, mean = (
        torch.empty(blockwise.payload_size(count, _PROBE_BLOCK), dtype=torch.uint8) for _ in range(2)
    )
    blockwise.quantise(values, payload, _PROBE_BLOCK)
    blockwise.dequantise(payload, decoded, _PROBE_BLOCK)
    blockwise.quantise(own, mean, _PROBE_BLOCK)
    for each, weight in zip((payload, mean), _PROBE_WEIGHTS, strict=True):
        blockwise.accumulate(each, weight, total, _PROBE_BLOCK)
    blockwise.quantise(total, mean, _PROBE_BLOCK)
    blockwise.dequantise(mean, total, _PROBE_BLOCK)
    expected = [each.numpy() for each in (payload, decoded, mean, total)]
    first, second, third, fourth = found = [np.zeros_like(each) for each in expected]
    compiled.encode(values.numpy(), first, _PROBE_BLOCK)
    compiled.decode(first, second, _PROBE_BLOCK)
    addresses = np.array([compiled.address(first), OWN_ADDRESS], np.int64)
    compiled.reduce(addresses, np.array(_PROBE_WEIGHTS), own.numpy(), third, fourth, _PROBE_BLOCK)
    return all(one.tobytes() == other.tobytes() for one, other in zip(found, expected, strict=True))
