"""A mean that this peer missed and was sent: its bytes are checked, then decoded.

They are proved step by step: the joins are signed by those whom they name, the manifest's hash is the round's id, the
mean's digest is over that, the contributors and every encoded byte, and more than half of the members have signed that
digest. Whether their round was the group's, the peers tell by whom this peer knows its state (`Circle`); a peer
that knows what state the mean must lead to needs only the digest.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from equipoise.averaging.aio.round_driver import group_of, weights_of
from equipoise.averaging.allreduce.events import Group
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
"""Makes room for a mean, f32 [D]. Raises ValueError where there is none."""


class NoRoomError(Exception):
    """There is no room for a mean that is the group's; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which mean is wanted.

    Attributes:
        run: The run.
        after: The state that it must lead on from.
        circle: Who tells that it is the group's; None where the state tells that it must lead to.
    """

    run: RunSpec
    after: StateId
    circle: Circle | None


def most_bytes(spec: RunSpec) -> int:
    """The largest image of a mean of this run."""
    return spec.layout.encoded_size + MAX_MANIFEST_BYTES


async def room(size: int) -> memoryview:
    """Memory for an image, which takes none before it is written to."""
    return memoryview(mmap.mmap(-1, size))


def decode(
    image: memoryview, wanted: Wanted, proofs: Iterable[Commit], verify: Verify, room: Room
) -> Outcome:
    """Check an image of a mean, and decode it; for a thread.

    Args:
        image: Its bytes.
        wanted: What it must be.
        proofs: What was given to prove it.
        verify: Checks signatures.
        room: Makes room for the mean; what is there is undefined if this raises.

    Returns:
        What the round came to.

    Raises:
        MeanError: It is none, of another run or state, or not proved.
        NoRoomError: There is no room.
    """
    spec = wanted.run
    manifest, contributors, payload = read_head(image)
    try:
        size, quorum = spec.options.group_size, spec.strategy.quorum
        manifest.check(verify, spec=spec.hash, group_size=size, own=None, quorum=quorum)
        group = group_of(spec, manifest)
        codecs = [spec.layout.codec_of(part) for part in group.parts]
        sizes = [codec.encoded_size(part.size) for codec, part in zip(codecs, group.parts, strict=True)]
        parts = cut(payload, sizes)
        mean = EncodedMean(manifest, contributors, parts)
        if manifest.before != wanted.after:
            after = wanted.after.epoch
            raise MeanError(f"expected the mean after epoch {after}, got one after {manifest.before}")
        digest = mean.digest()
        voted = voters(manifest, contributors, digest, proofs, verify)
        if wanted.circle is not None:
            wanted.circle.check(manifest, wanted.after, voted)
        try:
            result = room()
        except ValueError as error:
            raise NoRoomError(str(error)) from error
        for codec, part, encoded in zip(codecs, group.parts, parts, strict=True):
            codec.decode(encoded, result[part.start : part.stop])
    except (ManifestError, CodecError) as error:
        raise MeanError(str(error)) from error
    return _outcome(mean, group, digest, spec)


def _outcome(mean: EncodedMean, group: Group, digest: bytes, spec: RunSpec) -> Outcome:
    manifest = mean.manifest
    counted, capped = weights_of(group, manifest.peers, mean.contributors)
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
