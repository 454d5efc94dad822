"""The bytes of means that were missed: those that a daemon keeps for others, and one that it has been sent.

What comes is proved step by step: the joins are signed by those whom they name, the manifest's hash is the round's id,
and the mean's digest is over that, the contributors and every encoded byte. Whether it is the mean that the group made
of its state, only the digest tells, to whom knows what state it must lead to.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from equipoise.averaging.aio.round import group_of
from equipoise.averaging.allreduce.ballot import members_of
from equipoise.averaging.manifest import ManifestError, Verify
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.spec import MAX_GROUP_SIZE, RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.transfer.image import ImageId, digests_of
from equipoise.averaging.transfer.mean import (
    MAX_MANIFEST_BYTES,
    EncodedMean,
    MeanError,
    cut,
    read_head,
)
from equipoise.compression import CodecError, parse_codec

PART_SLACK_BYTES = 64
"""What a part's encoding takes beyond its share of the whole vector's, rounded up: the scale of a block cut short."""


Room = Callable[[], torch.Tensor]
"""Makes room for a mean, f32 [D]."""


@dataclass(frozen=True, slots=True)
class Imaged:
    """A kept mean as an image.

    Attributes:
        image: Its bytes.
        digests: Of its chunks.
        name: What it is called.
    """

    image: memoryview
    digests: bytes
    name: ImageId

    @classmethod
    def of(cls, mean: EncodedMean) -> Imaged:
        """Make it: a copy of all bytes, and their digests; for a thread."""
        image = memoryview(mean.image())
        digests = digests_of(image)
        return cls(image, digests, ImageId.of(len(image), digests))


def most_bytes(spec: RunSpec) -> int:
    """The largest image of a mean of this run."""
    parts = -(-spec.schema.size // spec.part_values) + MAX_GROUP_SIZE
    return (
        parse_codec(spec.codec).encoded_size(spec.schema.size) + parts * PART_SLACK_BYTES + MAX_MANIFEST_BYTES
    )


async def room(size: int) -> memoryview:
    """Memory for an image, which takes none before it is written to."""
    return memoryview(mmap.mmap(-1, size))


def decode(image: memoryview, spec: RunSpec, after: StateId, verify: Verify, room: Room) -> Outcome:
    """Check an image of a mean, and decode it; for a thread.

    Args:
        image: Its bytes.
        spec: The run.
        after: The state that it must lead on from.
        verify: Checks a join's signature.
        room: Makes room for the mean; what is there is undefined if this raises.

    Returns:
        What the round came to.

    Raises:
        MeanError: It is none, or of another run or state.
    """
    manifest, contributors, payload = read_head(image)
    try:
        manifest.check(verify, spec=spec.hash, group_size=spec.group_size, own=None)
        group = group_of(spec, manifest)
        codec = parse_codec(spec.codec)
        parts = cut(payload, [codec.encoded_size(part.size) for part in group.parts])
        mean = EncodedMean(manifest, contributors, parts)
        if mean.before != after:
            raise MeanError(f"expected the mean after epoch {after.epoch}, got one after {mean.before}")
        result = room()
        for part, encoded in zip(group.parts, parts, strict=True):
            codec.check(encoded, part.size)
            codec.decode(encoded, result[part.start : part.stop])
    except (ManifestError, CodecError) as error:
        raise MeanError(str(error)) from error
    counted = list(members_of(contributors))
    return Outcome(
        ok=True,
        reason=f"missed, and had from others: mean over {len(counted)} of {group.size} members",
        run=spec.name,
        round=manifest.round,
        group=manifest.peers,
        contributors={manifest.peers[member]: group.weights[member] for member in counted},
        digest=mean.digest().hex(),
        bytes_received=len(image),
        compression_ratio=4 * spec.schema.size / codec.encoded_size(spec.schema.size),
        states={join.peer: join.state for join in manifest.members if join.state is not None},
    )
