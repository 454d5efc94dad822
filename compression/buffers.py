"""Callers' buffers as arrays and tensors that share their memory; only read-only ones are copied, to tensors."""

from __future__ import annotations

from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.errors import CodecError
from equipoise.compression.late_torch import is_tensor, torch

_Plain = bytes | bytearray | memoryview

Buffer: TypeAlias = "bytes | bytearray | memoryview | torch.Tensor"
"""Bytes: anything that exports a contiguous buffer, or a contiguous uint8 tensor on any device."""

Values: TypeAlias = "torch.Tensor | NDArray[np.float32]"
"""Values, f32 [n], contiguous: a tensor on any device, or an array."""

_F32 = np.dtype(np.float32)


def plain(values: Values) -> NDArray[np.float32] | None:
    """Return `values` as an array if compiled kernels can work on them as they are."""
    if not isinstance(values, np.ndarray):
        if not values.is_cpu or values.dtype != torch.float32:
            return None
        values = values.detach().numpy()
    return values if values.dtype is _F32 and values.ndim == 1 and values.flags.carray else None


def raw(buffer: Buffer) -> NDArray[np.uint8] | None:
    """Return `buffer` as an array if compiled kernels can work on it as it is."""
    if is_tensor(buffer) or isinstance(buffer, bytes):
        return None
    view = memoryview(cast(_Plain, buffer))
    return np.frombuffer(view, np.uint8) if view.c_contiguous and not view.readonly and view.nbytes else None


def contiguous(buffer: Buffer, *, written: bool = False) -> NDArray[np.uint8]:
    """Return `buffer`, which is no tensor, as an array, uint8 [bytes], that shares its memory.

    Raises:
        CodecError: The buffer is not contiguous, or read-only though to be `written`.
    """
    view = memoryview(cast(_Plain, buffer))
    if not view.c_contiguous:
        raise CodecError("the buffer is a strided memoryview; pass a contiguous one")
    if written and view.readonly:
        kind = type(buffer).__name__
        raise CodecError(f"the buffer to encode into is read-only ({kind}); pass a writable one")
    # An empty view of several dimensions cannot be cast, and has no bytes to share.
    return np.asarray(view.cast("B") if view.nbytes else memoryview(bytearray()))


def shared(buffer: Buffer, *, written: bool = False) -> torch.Tensor:
    """Return `buffer` as a tensor, uint8 [bytes], that shares its memory, or copies it if it is read-only.

    The tensor must not be written unless `written`.

    Raises:
        CodecError: The buffer is not contiguous, a tensor of another dtype, or read-only though to be `written`.
    """
    if is_tensor(buffer):
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            got = f"{buffer.dtype} {list(buffer.shape)}"
            raise CodecError(f"expected a contiguous uint8 tensor as buffer, got {got}")
        return buffer.view(-1)
    array = contiguous(buffer, written=written)
    # torch knows no read-only tensors. What comes from other peers lies in writable memory.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
