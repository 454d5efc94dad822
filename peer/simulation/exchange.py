"""The exchange of a simulated round: the computation of a real group's members, once for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import structs

from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.aio.round_buffers import RoundBuffers
from equipoise.averaging.aio.round_driver import failed_outcome, group_of, mean_outcome
from equipoise.averaging.allreduce.events import Group
from equipoise.averaging.allreduce.paxos import members_of
from equipoise.averaging.layout import Vectors
from equipoise.averaging.manifest import Manifest
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.rules import RuleError
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.compression import CodecError


class Exchanged(NamedTuple):
    """The end of an exchange.

    Attributes:
        outcome: As the members see it, without times and bytes.
        mean: The encoded mean, u8 [`Layout.mean_size`], if the outcome is ok.
        before: The state that the mean changes, if any.
    """

    outcome: Outcome
    mean: memoryview
    before: StateId | None = None


def exchange(
    spec: RunSpec, manifest: Manifest, contributions: Mapping[str, memoryview], pool: BufferPool
) -> Exchanged:
    """Combine the encoded contributions of a group as its owners would: reduced in member order, and encoded.

    Args:
        contributions: The encoded vector of each member with a weight above 0, by PeerID.
    """
    group = group_of(spec, manifest)
    mean = memoryview(bytearray(spec.layout.mean_size(group.size)))
    stores = {
        at: RoundBuffers(
            group, at, spec.layout, Vectors(contributions[manifest.peers[at]], mean), pool, spec.rule
        )
        for at in members_of(group.contributors)
    }
    notes = []
    payloads = {}
    for at, store in stores.items():
        try:
            payloads[at] = [store.contribution(part) for part in range(len(group.parts))]
        except CodecError as error:
            notes.append(f"lost {group.names[at]}: its values are not sound: {error}")
    events = tuple(notes)
    try:
        if len(payloads) < group.quorum:
            raise RuleError(f"expected at least {group.quorum} contributions, got {len(payloads)}")
        means = _reduced(group, stores, payloads)
    except (CodecError, RuleError) as error:
        return Exchanged(structs.replace(failed_outcome(spec, manifest, str(error)), events=events), mean)
    encoded = EncodedMean(manifest, sum(1 << at for at in payloads), means)
    done = mean_outcome(spec, group, encoded, encoded.digest())
    given = mean[: spec.layout.mean_size(len(done.shares))]
    return Exchanged(structs.replace(done, events=events), given, encoded.before)


def _reduced(
    group: Group, stores: Mapping[int, RoundBuffers], payloads: Mapping[int, list[memoryview]]
) -> tuple[memoryview, ...]:
    """Reduce all parts at the first contributor: which member reduces a part changes no byte of the mean."""
    owner, *others = payloads
    contributors = sum(1 << at for at in payloads)
    for part in range(len(group.parts)):
        for at in others:
            stores[owner].keep_contribution(part, at, payloads[at][part])
        stores[owner].keep_reduction(part, contributors, stores[owner].reduction(part, contributors)())
    return stores[owner].means()
