"""Which kernels this process computes with, and why."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import numpy as np
import torch

from equipoise.compression.blockwise import OWN_ADDRESS, Kernels, payload_size
from equipoise.compression.errors import CodecError
from equipoise.compression.torch_kernels import TorchKernels

ENVIRONMENT = "EQUIPOISE_KERNELS"
"""Set to one of NAMES, it decides."""

NAMES = ("torch", "numba")

_TORCH = TorchKernels()
_PROBE_BLOCK = 32
_PROBE_WEIGHTS = (0.3, 0.7)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels for tensors on a CPU.

    Attributes:
        int8: The arithmetic of the int8 codec.
        reason: Why these, in a few words, for logs and `status`.
    """

    int8: Kernels
    reason: str

    @property
    def name(self) -> str:
        """One of NAMES."""
        return self.int8.name


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
        return Choice(_TORCH, f"{ENVIRONMENT}=torch")
    origin = f"{ENVIRONMENT}=numba" if wanted else "numba is installed"
    try:
        compiled = _numba()
    except ModuleNotFoundError as error:
        hint = "pip install 'equipoise[fast]' for kernels that are 2-3 times as fast"
        return Choice(_TORCH, f"{error.name} is not installed; {hint}")
    # What can go wrong in a compiler, its binary dependencies and its cache is not for us to enumerate; all of it
    # leaves the other kernels, and its reason is shown.
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0]
        return Choice(_TORCH, f"numba failed: {text}")
    if not _agree(compiled, _TORCH):
        return Choice(_TORCH, "numba's bytes differ from torch's on this machine")
    return Choice(compiled, origin)


def kernels_for(device: torch.device) -> Kernels:
    """Return the int8 kernels for tensors on `device`."""
    return kernels().int8 if device.type == "cpu" else _TORCH


def _numba() -> Kernels:
    from equipoise.compression.numba_kernels import NumbaKernels

    return NumbaKernels()


def _agree(one: Kernels, other: Kernels) -> bool:
    """Compare bytes on values of many magnitudes; a fused operation in either changes some of them."""
    count = 64 * _PROBE_BLOCK + 5
    exponents = torch.arange(count, dtype=torch.float32).div_(_PROBE_BLOCK).floor_().mul_(4).sub_(140)
    values = torch.linspace(-1.9, 1.7, count).mul_(torch.exp2(exponents.clamp_(max=127)))
    results = [_run(kernels, values) for kernels in (one, other)]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*results, strict=True))


def _run(kernels: Kernels, values: torch.Tensor) -> list[torch.Tensor]:
    payload = torch.empty(payload_size(values.numel(), _PROBE_BLOCK), dtype=torch.uint8)
    kernels.quantise(values, payload, _PROBE_BLOCK)
    decoded, total = torch.empty_like(values), values * 0.3
    kernels.dequantise(payload, decoded, _PROBE_BLOCK)
    kernels.accumulate(payload, 0.7, total, _PROBE_BLOCK)
    return [payload, decoded, total, *_reduce(kernels, payload, values.flip(0))]


def _reduce(kernels: Kernels, payload: torch.Tensor, own: torch.Tensor) -> list[torch.Tensor]:
    mean, out = torch.empty_like(payload), torch.zeros_like(own)
    if kernels.arrays is not None:
        kernels.arrays.reduce(
            np.array([kernels.arrays.address(payload.numpy()), OWN_ADDRESS], np.int64),
            np.array(_PROBE_WEIGHTS),
            own.numpy(),
            mean.numpy(),
            out.numpy(),
            _PROBE_BLOCK,
        )
        return [mean, out]
    kernels.quantise(own, mean, _PROBE_BLOCK)
    for each, weight in zip((payload, mean), _PROBE_WEIGHTS, strict=True):
        kernels.accumulate(each, weight, out, _PROBE_BLOCK)
    kernels.quantise(out, mean, _PROBE_BLOCK)
    kernels.dequantise(mean, out, _PROBE_BLOCK)
    return [mean, out]
