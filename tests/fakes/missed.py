"""Rounds of routers over a network in memory, and those that missed one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch

from equipoise.averaging.aio.round_driver import group_of
from equipoise.averaging.aio.transfer import Transfer
from equipoise.averaging.manifest import Join, Manifest
from equipoise.averaging.metrics import Report, values_of
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.replication.answers import Wish
from equipoise.averaging.replication.update import EncodedMean
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from fakes.cluster import SPEC, Cluster
from fakes.memory import FakeIdentity
from fakes.vectors import averaged, decoded


async def rounds(
    cluster: Cluster,
    names: str,
    state: StateId,
    spec: RunSpec = SPEC,
    boast: str = "",
    reports: bool = False,
    weight: float = 1.0,
) -> list[tuple[Outcome, torch.Tensor]]:
    """One round of these peers, who hold that state, all of one weight but `boast`; what each has of it.

    With `reports`, each reports a score.
    """
    size = spec.layout.size

    async def one(name: str) -> tuple[Outcome, torch.Tensor]:
        result = torch.empty(size)
        values = torch.randn(size, generator=torch.Generator().manual_seed(ord(name)))
        run = cluster.routers[name]._runs[spec.name]
        scores = values_of({"score": ord(name) / 7}) if reports else {}
        reported = scores, Report(float(ord(name)), scores)
        claimed = 1e12 if name == boast else weight
        return await averaged(run, values, result, claimed, 20.0, state, *reported), result

    return await asyncio.gather(*map(one, names))


def kept_by(keeper: Transfer, before: StateId) -> EncodedMean:
    """The mean that a peer keeps."""
    kept = keeper.donor._means[before]
    assert isinstance(kept, EncodedMean)
    return kept


async def recovered(
    transfer: Transfer, after: StateId, circle: Iterable[str] = ""
) -> tuple[Outcome, torch.Tensor, dict[str, int]]:
    """What comes of the mean after that state."""
    layout, stored = transfer._spec.layout, memoryview(b"")

    def room(size: int) -> memoryview:
        nonlocal stored
        stored = memoryview(bytearray(size))
        return stored

    wish = Wish(after=after, circle=frozenset(circle))
    got = await transfer.fetch(wish, 20.0, room)
    outcome = got.round or Outcome(ok=False, reason=got.reason)
    mean = decoded(layout, stored, outcome.shares) if outcome else torch.zeros(layout.size)
    return outcome, mean, got.sources


def round_of(names: str, state: StateId, spec: RunSpec = SPEC) -> Manifest:
    """These peers, who hold that state, in one round."""
    joins = []
    for name in names:
        nonce = name.encode().ljust(16, b".")
        stated = Join(name, spec.hash, state.epoch, 1.0, 0.0, True, nonce, b"", state, b"")
        joins.append(stated.signed(FakeIdentity(name).sign))
    return Manifest.of(names[0], joins)


def mean_of(names: str, state: StateId, spec: RunSpec = SPEC) -> EncodedMean:
    """Return the mean that these peers agreed on in such a round."""
    manifest = round_of(names, state, spec)
    parts = []
    for part in group_of(spec, manifest).parts:
        codec = spec.layout.codec_of(part)
        parts.append(memoryview(bytearray(codec.encoded_size(part.size))))
        codec.encode(torch.full((part.size,), float(len(names))), parts[-1])
    return EncodedMean(manifest, (1 << len(names)) - 1, tuple(parts))
