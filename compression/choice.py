"""The choice of the kernels with which this process computes, and its reason."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from equipoise.compression.blockwise import ArrayKernels
from equipoise.compression.device_kernels import TensorKernels
from equipoise.compression.errors import CodecError
from equipoise.compression.late_torch import torch
from equipoise.compression.probe import arrays_agree, tensors_agree

ENVIRONMENT = "EQUIPOISE_KERNELS"
"""Name of the variable that decides if it is set to one of NAMES."""

NAMES = ("torch", "numba", "triton")

WORTH_VALUES = 256 * 1024
"""Fewest values for which kernels are loaded if they are not yet. Without them these take 2 ms, and 0.1 with; to load
them takes 0.7 s of a processor and 130 MB, which is much for 32 daemons of one machine."""

INTERPRETER = "TRITON_INTERPRET"
"""Name of Triton's own variable: with "1" its kernels run on CPU tensors, for tests."""


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
        if name == "triton":
            tensors = _triton()
            agreed, choice = tensors_agree(tensors, torch.device(device)), Choice(name, None, origin, tensors)
        else:
            arrays = _numba()
            agreed, choice = arrays_agree(arrays), Choice(name, arrays, origin)
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


def _triton() -> TensorKernels:
    from equipoise.compression.triton_kernels import KERNELS

    return KERNELS


def _numba() -> ArrayKernels:
    from equipoise.compression.numba_kernels import KERNELS

    return KERNELS
