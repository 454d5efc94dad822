"""Tensors to safetensors bytes and back, so that equal tensors are equal bytes.

The format is https://github.com/huggingface/safetensors: 8 bytes of length, little-endian; a JSON header; the values,
contiguous. The library's own writer copies every tensor twice and its reader a third time, where a snapshot must not
hold up a training step; so this writes into one buffer, and reads without copying. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import torch

from equipoise.peer.errors import EquipoiseError

ALIGNMENT = 8
"""Bytes; every dtype's values can then be viewed where they lie."""

MAX_HEADER_BYTES = 32 * 2**20
"""Longest header: a hundred thousand tensors take half. A hostile one is twenty times as large once it is parsed."""

MAX_DIMENSIONS = 64
"""As many as torch can index. The product of a header's worth of numbers would never end."""

MAX_LENGTH = 2**48
"""More values than any machine can address."""

METADATA = "__metadata__"

DTYPES: Mapping[str, torch.dtype] = {
    "C128": torch.complex128,
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's names of dtypes; `C128` is ours."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Float = Literal["C128", "C64", "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]
Name = _Float | Literal["I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"]
Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]


class Entry(msgspec.Struct, frozen=True):
    """A tensor's entry in a header."""

    dtype: Name
    shape: Annotated[list[Length], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_metadata = msgspec.json.Decoder(dict[str, str])
_entry = msgspec.json.Decoder(Entry)


class ImageError(EquipoiseError, ValueError):
    """A state cannot be written as an image, or an image cannot be loaded here; nothing was loaded."""


def _allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def pack(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    room: Callable[[int], torch.Tensor] = _allocate,
) -> torch.Tensor:
    """Write tensors, on any device, as one safetensors file, u8 [bytes], on the CPU, where there is `room`.

    The bytes are the same for the same tensors and metadata, in whatever order they come.

    Raises:
        ImageError: A tensor is sparse or of a dtype without a name in the format; names it. Or the header is too long.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, text, at = _header_of(ordered, metadata)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    image = room(len(head) + at)
    image[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    values = image[len(head) :]
    with torch.no_grad():
        for name, tensor in ordered:
            start, end = header[name]["data_offsets"]
            values[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return image


def header_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> int:
    """Length of the header of such a file, without its values; see `pack`."""
    return len(_header_of(list(tensors.items()), metadata)[1])


def _header_of(
    ordered: list[tuple[str, torch.Tensor]], metadata: Mapping[str, str]
) -> tuple[dict[str, Any], bytes, int]:
    """The header of a file with these tensors, its text, and the bytes of the values."""
    header: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))}
    at = 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.element_size()
        if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
            got = f"{tensor.dtype}, {tensor.layout}"
            raise ImageError(f"tensor {name!r}: expected dense values of a known dtype, got {got}")
        dtype, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        told = f"expected names, shapes and what is no tensor to take at most {MAX_HEADER_BYTES} bytes"
        raise ImageError(f"{told}, got {len(text)}: keep large lists of numbers as tensors")
    return header, text, at


def unpack(
    image: torch.Tensor, most: int = MAX_HEADER_BYTES
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file, u8 [bytes] on the CPU, as views of it, and its metadata; all is checked.

    Raises:
        ImageError: It is no safetensors file, or not a whole one, or its header is longer than `most`.
    """
    size = int.from_bytes(bytes(image[:8].tolist()), "little")
    if len(image) < 8 or not 0 < size <= min(len(image) - 8, most):
        told = f"expected a safetensors file with a header of at most {most} bytes"
        raise ImageError(f"{told}, got {len(image)} bytes with a header of {size}")
    try:
        header = _header.decode(image[8 : 8 + size].numpy().data)
        metadata = _metadata.decode(header.pop(METADATA, b"{}"))
        entries = {name: _entry.decode(raw) for name, raw in header.items()}
    except (ValueError, RecursionError) as error:
        raise ImageError(f"expected a header of names, dtypes, shapes and offsets: {error}") from None
    values = image[8 + size :]
    tensors, at = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        tensors[name] = _view(name, entry, values, at)
        at += tensors[name].numel() * tensors[name].element_size()
    if at != len(values):
        raise ImageError(f"expected {at} bytes of values, got {len(values)}")
    return tensors, metadata


def _view(name: str, entry: Entry, values: torch.Tensor, at: int) -> torch.Tensor:
    dtype, (start, end) = DTYPES[entry.dtype], entry.data_offsets
    size = math.prod(entry.shape) * dtype.itemsize
    if start != at or end != at + size or end > len(values):
        told = f"tensor {name[:80]!r}: expected {size} bytes at {at} of {len(values)}, got {start} to {end}"
        raise ImageError(told)
    part = values[start:end]
    if part.storage_offset() % dtype.itemsize or part.data_ptr() % dtype.itemsize:
        part = part.clone()  # Somebody else's writer; ours aligns.
    try:
        return part.view(dtype).view(entry.shape)
    except RuntimeError as error:  # Without values, but so long that torch cannot count it.
        raise ImageError(f"tensor {name[:80]!r}: {str(error)[:120]}") from None
