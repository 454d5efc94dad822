"""The places of a run's tensors in its flat fp32 vector `[D]`, and the codec that carries each part of it.

The vector has two regions. In the first, each tensor begins at a multiple of the codec's granule, so no block of the
codec holds values of two tensors: beside weights of N(0, 1), a bias of 1e-3 would decode to exactly 0. The values
between the end of a tensor and the next granule are padding, and zero. The second region follows. It holds the tensors
that a block would serve badly: tensors of fewer than `MIN_CODED_VALUES` values, and averaged buffers. They travel in
fp32 with any codec. With the codec fp32, there is one region.

The layout follows from the schema and the codec alone, so the hash of the run's spec covers it.

The encoded vector is what a script and its daemon share: the encoded granules of the first region, one after another,
then the values of the second. So the payload of a part, which begins at a granule, is a slice of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import filterfalse
from typing import NamedTuple

from equipoise.averaging.partition import GRANULE, Part, partition
from equipoise.averaging.schema import Schema, TensorSpec
from equipoise.compression import Codec, parse_codec

MIN_CODED_VALUES = 256
"""Fewest values of a tensor that the codec carries. A scalar, a gate or a short bias is a few bytes in fp32. In a
block, its error would be relative to the largest value beside it."""

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
        encoded_size: Bytes of the encoded vector; the same for all cuts.
    """

    def __init__(self, schema: Schema, codec: Codec) -> None:
        self.schema = schema
        self.codec = codec
        self.places: list[Place] = []
        exact = () if codec == EXACT else tuple(filter(_is_exact, schema.tensors))
        coded = schema.tensors if codec == EXACT else tuple(filterfalse(_is_exact, schema.tensors))
        self.coded = self._place(coded, 0, codec.granule)
        if exact:  # Values in fp32 follow, and lie at multiples of 4 bytes with any format before them.
            granules = EXACT.alignment // math.gcd(codec.encoded_size(codec.granule), EXACT.alignment)
            self.coded += -self.coded % (granules * codec.granule)
        self.size = self._place(exact, self.coded, 1)
        self.encoded_size = self._begin(self.size)

    def _place(self, tensors: Sequence[TensorSpec], start: int, granule: int) -> int:
        """Place tensors one after another; returns the end of the last, behind which there is no padding."""
        stop = start
        for tensor in tensors:
            begin = start + -(-(stop - start) // granule) * granule
            stop = begin + tensor.size
            self.places.append(Place(tensor, begin, stop))
        return stop

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

    def encoded(self, start: int, stop: int) -> slice:
        """The bytes of the encoded vector that hold values `start`, of a granule the first or padding, to `stop`."""
        return slice(self._begin(start), self._begin(stop))

    # A mean, where the codec joins contributions, is their first regions one after another, and then the second region.

    def mean_size(self, contributors: int) -> int:
        """Bytes of the encoded mean of so many contributors."""
        return self.encoded_size + (self._copies(contributors) - 1) * self._begin(self.coded)

    def mean(self, start: int, stop: int, contributors: int) -> list[slice]:
        """The bytes of the encoded mean that hold values `start` to `stop`, of one region; see `encoded`.

        One slice for each contribution where the codec joins them, else one.
        """
        place, copies, region = self.encoded(start, stop), self._copies(contributors), self._begin(self.coded)
        steps = range(copies) if start < self.coded else (copies - 1,)
        return [slice(place.start + step * region, place.stop + step * region) for step in steps]

    def put_mean(self, part: Part, contributors: int, payload: memoryview, into: memoryview) -> None:
        """Write the encoded mean of a part to its places in the encoded mean."""
        at = 0
        for place in self.mean(part.start, part.stop, contributors):
            into[place] = payload[at : at + place.stop - place.start]
            at += place.stop - place.start

    def _copies(self, contributors: int) -> int:
        granule = self.codec.granule
        return self.codec.mean_size(granule, contributors) // self.codec.encoded_size(granule)

    def _begin(self, index: int) -> int:
        """The byte at which value `index` begins if it is the first of a granule, else the byte of its code."""
        exact = max(index - self.coded, 0)
        return self.codec.encoded_size(index - exact) + EXACT.encoded_size(exact)

    def locate(self, index: int) -> tuple[str, int]:
        """The tensor that holds value `index` of the flat vector, and the value's place in that tensor."""
        return next((spec.name, index - start) for spec, start, stop in self.places if index < stop)


class Vectors(NamedTuple):
    """The two encoded vectors of a round.

    Attributes:
        contribution: This peer's, u8 [`Layout.encoded_size`]. It may be memory of another process, which may write at
            any time: what is used of it is copied first, and then checked.
        mean: Takes the mean, u8, at least [`Layout.mean_size`], part by part as it comes: undefined until the round has
            succeeded.
        clamped: How many values of the contribution were clamped when it was encoded.
        norm: 2-norm of the contribution's values when it was encoded; infinite if nobody has taken it.
    """

    contribution: memoryview
    mean: memoryview
    clamped: int = 0
    norm: float = math.inf


def _is_exact(tensor: TensorSpec) -> bool:
    return tensor.size < MIN_CODED_VALUES or tensor.buffer
