"""A round's encoded mean, kept for peers that missed the round, and its image.

An image of a mean is the length of the manifest (u32, big-endian), the manifest in msgpack, the contributors (a
bitmask, u64, little-endian) and the encoded parts one after another. The lengths of the parts follow from the manifest
and the run's spec alone, as in the round. The mean's digest is over the manifest's hash, the contributors and the
digests of all parts: so it proves every byte of the image.

The image does not prove that the round was the group's: anybody can make up identities that join and average.
`answers.UpdateQuery` decides which image to believe.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from equipoise.averaging.allreduce.part_table import mean_digest
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.ports import parser
from equipoise.averaging.state import StateId

MAX_MANIFEST_BYTES = 256 * 1024
"""Most bytes of a manifest: 64 joins, each a credential of 1 KiB, a signature of 512 bytes, and some hundred bytes."""

MASK_BYTES = 8
"""Bytes of the contributors' mask: a group has up to 64 members."""

_LENGTH = struct.Struct(">I")

_manifest = parser(Manifest, "a manifest")


@dataclass(frozen=True, slots=True)
class EncodedMean:
    """The mean of one round.

    Attributes:
        manifest: The round's group.
        contributors: Bitmask of the members that are in the mean.
        parts: The parts, encoded by the run's codec, in order.
    """

    manifest: Manifest
    contributors: int
    parts: tuple[memoryview, ...]

    @property
    def before(self) -> StateId | None:
        """The state that it changes; None if the members hold none, or its contributors only attended."""
        changes = any(self.manifest.members[at].bound for at in members_of(self.contributors))
        return self.manifest.before if changes else None

    @property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(len(part) for part in self.parts)

    def image(self) -> bytearray:
        """The image, the same at every member. It is copied part by part, so that other threads have their turn."""
        manifest = msgspec.msgpack.encode(self.manifest)
        mask = self.contributors.to_bytes(MASK_BYTES, "little")
        image = bytearray(_LENGTH.pack(len(manifest)) + manifest + mask)
        for part in self.parts:
            image += part
        return image

    def digest(self) -> bytes:
        """The mean's digest, as in the round's votes."""
        digests = (blake3(part).digest() for part in self.parts)
        return mean_digest(self.manifest.id, self.contributors, digests)


def read_head(image: memoryview) -> tuple[Manifest, int, memoryview]:
    """The manifest, not checked, the contributors, and the encoded parts that follow.

    Raises:
        ValueError: The image does not begin with a manifest and contributors.
        FrameRefused: The manifest does not decode.
    """
    if len(image) < _LENGTH.size:
        raise ValueError(f"expected a mean, got {len(image)} bytes")
    (length,) = _LENGTH.unpack_from(image)
    begins = _LENGTH.size + length
    if length > MAX_MANIFEST_BYTES or begins + MASK_BYTES > len(image):
        raise ValueError(f"expected a manifest and a mean, got a length of {length} in {len(image)} bytes")
    manifest: Manifest = _manifest(image[_LENGTH.size : begins])
    contributors = int.from_bytes(image[begins : begins + MASK_BYTES], "little")
    members = manifest.members
    if not contributors or contributors >> len(members):
        raise ValueError(f"expected contributors among {len(members)} members, got {contributors:b}")
    return manifest, contributors, image[begins + MASK_BYTES :]
