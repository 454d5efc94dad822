"""The places of a run's tensors in its flat fp32 vector `[D]`, and the codec that carries each part of it.

The vector has two regions. In the first, each tensor begins at a multiple of the codec's granule, so no block of the
codec holds values of two tensors: beside weights of N(0, 1), a bias of 1e-3 would decode to exactly 0. The values
between the end of a tensor and the next granule are padding, and zero. The second region follows. It holds the tensors
that a block would serve badly: tensors of fewer than `MIN_CODED_VALUES` values, and averaged buffers. They travel in
fp32 with any codec. With the codec fp32, there is one region.

The layout follows from the schema and the codec alone, so the hash of the run's spec covers it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import filterfalse
from typing import NamedTuple

import torch

from equipoise.averaging.partition import GRANULE, Part, partition
from equipoise.averaging.schema import Schema, SchemaError, TensorSpec
from equipoise.compression import Codec, first_non_finite, parse_codec

MIN_CODED_VALUES = 256
"""Fewest values of a tensor that the codec carries. A scalar, a gate or a short bias is a few bytes in fp32. In a
block, its error would be relative to the largest value beside it."""

CHECKED_VALUES = 512 * 1024
"""Number of values checked together for being finite: few enough to be in the cache, many enough for small tensors."""

EXACT_GRANULE = 4096
"""Granule of the cuts in the second region, in values: 16 KiB, about the cost of a frame."""

EXACT = parse_codec("fp32")
"""Codec of the second region."""


class Place(NamedTuple):
    """The place of one tensor.

    Attributes:
        tensor: The tensor.
        start: Index of its first value in the flat vector.
        stop: Index behind its last value; padding may follow.
    """

    tensor: TensorSpec
    start: int
    stop: int


class Layout:
    """The places of all tensors of a schema, for one codec.

    Attributes:
        schema: The tensors.
        codec: The codec of the first region.
        places: The place of each tensor, in the order of the flat vector.
        coded: Number of values of the first region, padding included.
        size: D, number of values of the flat vector, padding included.
    """

    def __init__(self, schema: Schema, codec: Codec) -> None:
        self.schema = schema
        self.codec = codec
        self.places: list[Place] = []
        exact = () if codec == EXACT else tuple(filter(_is_exact, schema.tensors))
        coded = schema.tensors if codec == EXACT else tuple(filterfalse(_is_exact, schema.tensors))
        self.coded = self._place(coded, 0, codec.granule)
        self.size = self._place(exact, self.coded, 1)

    def _place(self, tensors: Sequence[TensorSpec], start: int, granule: int) -> int:
        """Place tensors one after another; returns the end of the last, behind which there is no padding."""
        stop = start
        for tensor in tensors:
            begin = start + -(-(stop - start) // granule) * granule
            stop = begin + tensor.size
            self.places.append(Place(tensor, begin, stop))
        return stop

    @cached_property
    def encoded_size(self) -> int:
        """Bytes of the whole encoded vector; the same for all cuts."""
        return self.codec.encoded_size(self.coded) + EXACT.encoded_size(self.size - self.coded)

    @property
    def compression_ratio(self) -> float:
        """Bytes of the tensors' values in fp32, divided by the bytes of the encoded vector."""
        return 4 * self.schema.size / self.encoded_size

    def codec_of(self, part: Part) -> Codec:
        """The codec that carries the values of a part."""
        return self.codec if part.start < self.coded else EXACT

    def cut(self, fractions: Sequence[float], part_values: int) -> tuple[Part, ...]:
        """Cut the vector into shares proportional to `fractions`, and those into parts; see `partition`.

        No part holds values of both regions, and no block of the codec holds values of two parts. So a vector is
        encoded to the same scales and codes for all cuts.
        """
        coded = partition(self.coded, fractions, part_values, math.lcm(GRANULE, self.codec.granule))
        exact = partition(self.size - self.coded, fractions, part_values, EXACT_GRANULE)
        behind = (Part(self.coded + part.start, self.coded + part.stop, part.owner) for part in exact)
        return (*coded, *behind)

    def views(self, flat: torch.Tensor, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The tensors of these names in the flat vector, f32 [D], sharing its memory."""
        return {
            spec.name: flat[start:stop].view(spec.shape)
            for spec, start, stop in self.places
            if spec.name in names
        }

    def flatten(self, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Copy checked tensors, converted to fp32, into the flat vector `out`, f32 [D], and zero all padding.

        Args:
            tensors: By name: all of the schema, or some of them. The places of the others stay as they are.
            out: The flat vector.

        Raises:
            SchemaError: A tensor holds NaN or Inf (also one that overflows fp32); `out` is then undefined.
        """
        checked = end = 0
        for spec, place, stop in self.places:
            if end < place:
                out[end:place].zero_()
            end = stop
            if spec.name not in tensors:
                if checked < place:
                    self._require_finite(out, checked, place)
                checked = stop
                continue
            flat = tensors[spec.name].detach().reshape(-1)
            # Checks values while they are in the cache, a piece or several tensors at a time.
            for at in range(place, stop, CHECKED_VALUES):
                behind = min(at + CHECKED_VALUES, stop)
                out[at:behind].copy_(flat[at - place : behind - place])
                if behind - checked >= CHECKED_VALUES:
                    self._require_finite(out, checked, behind)
                    checked = behind
        self._require_finite(out, checked, self.size)

    def unflatten(self, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the flat vector, f32 [D], into checked tensors in place: all of the schema, or some of them."""
        with torch.no_grad():
            for name, values in self.views(flat, tensors).items():
                tensors[name].copy_(values)

    def shift(self, before: torch.Tensor, after: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Move checked tensors, in place, by the difference of two flat vectors, f32 [D]: tensors += after - before."""
        with torch.no_grad():
            old = self.views(before, tensors)
            for name, new in self.views(after, tensors).items():
                tensors[name].add_((new - old[name]).to(tensors[name].device))

    def locate(self, index: int) -> tuple[str, int]:
        """The tensor that holds value `index` of the flat vector, and the value's place in that tensor."""
        return next((spec.name, index - start) for spec, start, stop in self.places if index < stop)

    def _require_finite(self, flat: torch.Tensor, start: int, stop: int) -> None:
        bad = first_non_finite(flat[start:stop])
        if bad is not None:
            name, at = self.locate(start + bad)
            raise SchemaError(
                f"tensor {name!r} holds {float(flat[start + bad])} at flat index {at}: "
                f"expected finite values within fp32's range"
            )


def _is_exact(tensor: TensorSpec) -> bool:
    return tensor.size < MIN_CODED_VALUES or tensor.buffer
