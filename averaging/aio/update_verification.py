"""Decodes the image of a mean that this peer missed, once it is here; its digest was checked chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch

from equipoise.averaging.aio.round_driver import group_of, weights_of
from equipoise.averaging.manifest import Verify
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.update import MAX_MANIFEST_BYTES, EncodedMean, cut, read_head


def most_bytes(spec: RunSpec) -> int:
    """The largest image of a mean of this run."""
    return spec.layout.encoded_size + MAX_MANIFEST_BYTES


def decode(
    image: memoryview, spec: RunSpec, after: StateId, verify: Verify, room: Callable[[], torch.Tensor]
) -> Outcome:
    """Decode an image of a mean, for a thread; returns the outcome of the mean's round.

    Args:
        image: Its bytes.
        spec: The run.
        after: The state that the mean must lead on from.
        verify: Checks the signatures of the members' joins.
        room: Makes room for the mean, f32 [D]; its content is undefined if this raises.

    Raises:
        ValueError: The image is no mean of this run after this state, or there is no room.
        FrameRefused: Its manifest does not decode.
    """
    manifest, contributors, payload = read_head(image)
    size, quorum = spec.options.group_size, spec.strategy.quorum
    manifest.check(verify, spec=spec.hash, group_size=size, own=None, quorum=quorum)
    if manifest.before != after:
        raise ValueError(f"expected the mean after epoch {after.epoch}, got one after {manifest.before}")
    group = group_of(spec, manifest)
    codecs = [spec.layout.codec_of(part) for part in group.parts]
    sizes = [codec.encoded_size(part.size) for codec, part in zip(codecs, group.parts, strict=True)]
    mean = EncodedMean(manifest, contributors, cut(payload, sizes))
    result = room()
    for codec, part, encoded in zip(codecs, group.parts, mean.parts, strict=True):
        codec.decode(encoded, result[part.start : part.stop])
    counted, capped = weights_of(group, manifest.peers, contributors)
    return Outcome(
        ok=True,
        reason=f"missed, and had from others: mean over {len(counted)} of {group.size} members",
        run=spec.name,
        round=manifest.round,
        group=manifest.peers,
        contributors=counted,
        capped=capped,
        digest=mean.digest().hex(),
        bytes_received=mean.size,
        compression_ratio=spec.layout.compression_ratio,
        states=manifest.states,
    )
