"""A round's encoded mean, kept for peers that missed the round. The votes that prove the mean travel beside it
(`quorum_proof`).

An image of one is the length of the manifest (u32, big-endian), the manifest in msgpack, the contributors (a bitmask,
u64, little-endian) and the encoded parts one after another. How long those are follows from the manifest and the run's
spec alone, as in the round. The mean's digest is over the manifest's hash, the contributors and the digests of all
parts: so it proves every byte of the image.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from blake3 import blake3

from equipoise.averaging.allreduce.part_table import mean_digest
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.ports import FrameRefused, parser

MAX_MANIFEST_BYTES = 256 * 1024
"""Most bytes of a manifest: 64 joins of a credential of 1 KiB, a signature of half of that, and some hundred bytes."""

MASK_BYTES = 8
"""Bytes of the contributors' mask: a group has up to 64 members."""

_LENGTH = struct.Struct(">I")

_manifest = parser(Manifest, "a manifest")


class MeanError(ValueError):
    """These bytes are no mean of this run, or not proved to be the group's; the message says why."""


@dataclass(frozen=True, slots=True)
class EncodedMean:
    """The mean that one round came to.

    Attributes:
        manifest: The round's group.
        contributors: Bitmask of the members that are in the mean.
        parts: Encoded by the run's codec, in order.
    """

    manifest: Manifest
    contributors: int
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(len(part) for part in self.parts)

    def image(self) -> bytearray:
        """All of it as bytes, the same at every member; copied part by part, so that other threads have their turn."""
        manifest = msgspec.msgpack.encode(self.manifest)
        mask = self.contributors.to_bytes(MASK_BYTES, "little")
        image = bytearray(_LENGTH.pack(len(manifest)) + manifest + mask)
        for part in self.parts:
            image += part
        return image

    def digest(self) -> bytes:
        """As of the round's outcome."""
        digests = (blake3(part).digest() for part in self.parts)
        return mean_digest(self.manifest.id, self.contributors, digests)


def read_head(image: memoryview) -> tuple[Manifest, int, memoryview]:
    """The manifest, not checked, the contributors, and what follows them.

    Raises:
        MeanError: The image does not begin with these.
    """
    if len(image) < _LENGTH.size:
        raise MeanError(f"expected a mean, got {len(image)} bytes")
    (length,) = _LENGTH.unpack_from(image)
    begins = _LENGTH.size + length
    if length > MAX_MANIFEST_BYTES or begins + MASK_BYTES > len(image):
        raise MeanError(f"expected a manifest and a mean, got a length of {length} in {len(image)} bytes")
    try:
        manifest: Manifest = _manifest(image[_LENGTH.size : begins])
    except FrameRefused as error:
        raise MeanError(str(error)) from error
    contributors = int.from_bytes(image[begins : begins + MASK_BYTES], "little")
    members = manifest.members
    if not contributors or contributors >> len(members):
        raise MeanError(f"expected contributors among {len(members)} members, got {contributors:b}")
    return manifest, contributors, image[begins + MASK_BYTES :]


def cut(payload: memoryview, sizes: Sequence[int]) -> tuple[memoryview, ...]:
    """Parts of these sizes, one after another.

    Raises:
        MeanError: They are not all of it.
    """
    if len(payload) != sum(sizes):
        raise MeanError(f"expected {sum(sizes)} bytes of encoded values, got {len(payload)}")
    return tuple(payload[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True))
