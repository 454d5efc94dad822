"""Loaders of frameworks, made to draw this peer's share of the data in place of shuffling all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import RandomSampler, Sampler

from equipoise.peer.client.run import JoinedRun
from equipoise.peer.errors import DaemonLost
from equipoise.peer.training.shares import Shares, mark_of

log = logging.getLogger(__name__)


class EndlessShares(Sampler[int]):
    """This peer's shares of one pass after another: as long as the data set, since frameworks plan by its length."""

    def __init__(self, run: JoinedRun, dataset: Any) -> None:
        self._run, self._shares, self._count = run, Shares(run, dataset), len(dataset)
        self._shares.mark = mark_of(dataset)
        self._drawn = self._draw()
        self._others()  # Tells them the mark before the first sample is drawn.

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._count):
            yield next(self._drawn)

    def _draw(self) -> Iterator[int]:
        yield from self._shares
        if not self._others():
            log.info(
                "run %s: no other peer has an equal data set: this peer draws all of its own", self._run.name
            )
        while True:
            yield from self._shares

    def _others(self) -> int:
        """The number of other live peers with an equal data set."""
        with contextlib.suppress(DaemonLost):
            return len({*self._run.core.members(self._shares.mark)} - {self._run.peer})
        return 0


def share(run: JoinedRun, loader: Any, wanted: bool) -> None:
    """Have a `DataLoader` that shuffles draw this peer's share, if that is `wanted`, and tell what is done.

    Only peers with equal data sets share them, by a mark of each: parts of private data would be left out otherwise. A
    sampler that the script has chosen stays.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):  # Wrapped by Accelerate.
        batches = batches.batch_sampler
    sampler, data = getattr(batches, "sampler", None), getattr(loader, "dataset", None)
    if not wanted:
        log.info("run %s: shares=False: this peer draws all of its data", run.name)
    elif (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and len(sampler) == len(sampler.data_source)
    ):
        batches.sampler = EndlessShares(run, data)
        told = "run %s: peers with an equal data set (%d samples) draw a share of it each; shares=False turns that off"
        log.info(told, run.name, len(batches.sampler))
    else:
        told = "run %s: the data are not shared, since the loader does not shuffle them (%s): give each peer other data"
        log.warning(told, run.name, type(sampler).__name__)
