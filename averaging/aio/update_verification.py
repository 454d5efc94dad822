"""A mean that this peer missed and was sent: its bytes are checked, then decoded.

They are proved step by step: every join is signed by the peer that it names, the manifest's hash is the round's id,
the mean's digest is over that, the contributors and every encoded byte, and more than half of the members have signed
that digest. The peers from which this peer has its state tell whether that round was the group's (`Circle`). A
peer that knows what state the mean must lead to needs only the digest.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable

import torch

from equipoise.averaging.aio.round_driver import group_of, weights_of
from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.manifest import ManifestError, Verify
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.update import (
    MAX_MANIFEST_BYTES,
    Circle,
    EncodedMean,
    MeanError,
    cut,
    read_head,
    voters,
)
from equipoise.compression import CodecError

Room = Callable[[], torch.Tensor]
"""Makes room for a mean, f32 [D]. It raises ValueError if there is no room."""


class NoRoomError(Exception):
    """There is no room for a mean that is the group's; the message says why."""


def most_bytes(spec: RunSpec) -> int:
    """The largest image of a mean of this run."""
    return spec.layout.encoded_size + MAX_MANIFEST_BYTES


async def room(size: int) -> memoryview:
    """Memory for an image, which takes none before it is written to."""
    return memoryview(mmap.mmap(-1, size))


def decode(
    image: memoryview,
    spec: RunSpec,
    after: StateId,
    circle: Circle | None,
    proofs: Iterable[Commit],
    verify: Verify,
    room: Room,
) -> Outcome:
    """Check an image of a mean, and decode it; for a thread.

    Args:
        image: Its bytes.
        spec: The run.
        after: The state that the mean must lead on from.
        circle: The peers that tell whether it is the group's; None if the caller knows the state that it must lead to.
        proofs: The votes that came beside it.
        verify: Checks signatures.
        room: Makes room for the mean; its content is undefined if this raises.

    Returns:
        The outcome of the mean's round.

    Raises:
        MeanError: The image is not a mean, is of another run or state, or is not proved.
        NoRoomError: There is no room.
    """
    manifest, contributors, payload = read_head(image)
    try:
        size, quorum = spec.options.group_size, spec.strategy.quorum
        manifest.check(verify, spec=spec.hash, group_size=size, own=None, quorum=quorum)
        group = group_of(spec, manifest)
        codecs = [spec.layout.codec_of(part) for part in group.parts]
        sizes = [codec.encoded_size(part.size) for codec, part in zip(codecs, group.parts, strict=True)]
        parts = cut(payload, sizes)
        mean = EncodedMean(manifest, contributors, parts)
        if manifest.before != after:
            raise MeanError(f"expected the mean after epoch {after.epoch}, got one after {manifest.before}")
        digest = mean.digest()
        voted = voters(manifest, contributors, digest, proofs, verify)
        if circle is not None:
            circle.check(manifest, after, voted)
        try:
            result = room()
        except ValueError as error:
            raise NoRoomError(str(error)) from error
        for codec, part, encoded in zip(codecs, group.parts, parts, strict=True):
            codec.decode(encoded, result[part.start : part.stop])
    except (ManifestError, CodecError) as error:
        raise MeanError(str(error)) from error
    counted, capped = weights_of(group, manifest.peers, contributors)
    return Outcome(
        ok=True,
        reason=f"missed, and had from others: mean over {len(counted)} of {group.size} members",
        run=spec.name,
        round=manifest.round,
        group=manifest.peers,
        contributors=counted,
        capped=capped,
        digest=digest.hex(),
        bytes_received=mean.size,
        compression_ratio=spec.layout.compression_ratio,
        states=manifest.states,
    )
