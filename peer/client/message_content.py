"""The content of a message between scripts: a safetensors file of its tensors, with its fields in the metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import torch

from equipoise.compression import CodecError, parse_codec
from equipoise.peer.client.safetensors_io import (
    DTYPES,
    MAX_DIMENSIONS,
    NAMES,
    ImageError,
    Length,
    Name,
    pack,
    unpack,
)

RAW = "raw"
"""The codec of exact bytes, of any dtype."""

MAX_ABOUT_BYTES = 1024 * 1024
"""Longest description of a message, its fields included; larger values belong into tensors."""


class Coded(msgspec.Struct, frozen=True, array_like=True):
    """The dtype and the shape of a tensor whose values are encoded."""

    dtype: Name
    shape: Annotated[list[Length], msgspec.Meta(max_length=MAX_DIMENSIONS)]


_coded = msgspec.json.Decoder(dict[str, Coded])


def encode(
    tensors: Mapping[str, torch.Tensor],
    fields: Mapping[str, Any],
    codec: str,
    room: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Write a message, u8 [bytes], where there is `room` for so many bytes.

    With another codec than `raw`, floating-point tensors are encoded, and others travel as they are.

    Raises:
        ValueError: A tensor is not dense, or of no known dtype; a field has no JSON; or they are too long.
        equipoise.compression.CodecError: The codec is unknown, or needs error feedback; or a value is not finite.
    """
    try:
        about = {"fields": json.dumps(fields)}
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected fields of text, numbers, lists and dicts: {error}") from None
    written = {name: tensor.detach() for name, tensor in tensors.items()}
    if codec != RAW:
        floating = {name: one for name, one in written.items() if one.is_floating_point() and one.numel()}
        coded = {name: (NAMES[one.dtype], list(one.shape)) for name, one in floating.items()}
        about |= {"codec": codec, "coded": json.dumps(coded)}
        written |= {name: _encoded(codec, one) for name, one in floating.items()}
    if len(about["fields"]) > MAX_ABOUT_BYTES // 2:
        size = len(about["fields"])
        raise ValueError(f"expected fields of at most {MAX_ABOUT_BYTES // 2} bytes, got {size}: send tensors")
    return pack(written, about, room)


def decode(content: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a message of another peer, u8 [bytes]: tensors, of which raw ones are views of it, and fields.

    Raises:
        ImageError: It is not what `encode` writes.
    """
    tensors, about = unpack(content, MAX_ABOUT_BYTES)
    try:
        fields = json.loads(about.get("fields", ""))
        for name, one in _coded.decode(about.get("coded", "{}")).items():
            tensors[name] = _decoded(about.get("codec", ""), one, tensors[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise ImageError(f"expected the fields and the encoded tensors of a message: {error}") from None
    if not isinstance(fields, dict):
        raise ImageError(f"expected the fields of a message by name, got {type(fields).__name__}")
    return tensors, fields


def _encoded(spec: str, tensor: torch.Tensor) -> torch.Tensor:
    codec, values = parse_codec(spec), tensor.resolve_neg().reshape(-1).to(torch.float32).contiguous()
    if codec.needs_feedback:
        raise CodecError(f"codec {codec.spec} leaves most values out: send them raw, or by another codec")
    payload = torch.empty(codec.encoded_size(values.numel()), dtype=torch.uint8, device="cpu")
    codec.encode(values.numpy() if values.is_cpu else values, payload.numpy().data)
    return payload


def _decoded(spec: str, one: Coded, payload: torch.Tensor) -> torch.Tensor:
    codec, count, dtype = parse_codec(spec), math.prod(one.shape), DTYPES[one.dtype]
    size = codec.encoded_size(count)
    if codec.needs_feedback or not dtype.is_floating_point or payload.dtype != torch.uint8 or not count:
        raise ValueError(f"expected encoded floating-point values, got {payload.dtype} as {spec[:64]!r}")
    if payload.dim() != 1 or payload.numel() != size:
        raise ValueError(f"expected {size} bytes of {count} values, got {list(payload.shape)[:2]}")
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    codec.decode(payload.numpy().data, values.numpy())
    return values.to(dtype).view(one.shape)
