"""Loaders of frameworks, made to draw this peer's share of the data in place of shuffling all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import RandomSampler, Sampler

from equipoise.peer.client.run import JoinedRun
from equipoise.peer.training.shares import Shares, mark_of

log = logging.getLogger(__name__)


class EndlessShares(Sampler[int]):
    """This peer's shares of one pass after another: as long as the data set, since frameworks plan by its length."""

    def __init__(self, run: JoinedRun, dataset: Any, mark: str) -> None:
        """Draw from a data set with this mark."""
        self._run, self._shares, self._count = run, Shares(run, dataset), len(dataset)
        self._shares.mark = mark
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
        return len({*self._shares.look()} - {self._run.peer})


def sampling_of(loader: Any) -> Any:
    """What holds the sampler of a `DataLoader`, as `sampler`; Accelerate may have wrapped it."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


def share(run: JoinedRun, loaders: Iterable[Any], wanted: bool) -> None:
    """Have the `DataLoader`s that shuffle draw this peer's share, if that is `wanted`, and tell what is done.

    Only peers with equal data sets share them, by a mark of each: parts of private data would be left out otherwise. A
    peer tells one mark, so loaders of a second data set stay as they are. Other samplers stay, too.
    """
    if not wanted:
        log.info("run %s: shares=False: this peer draws all of its data", run.name)
        return
    told = ""
    for loader in loaders:
        batches, why = sampling_of(loader), ""
        data: Any = getattr(loader, "dataset", None)
        sampler = getattr(batches, "sampler", None)
        if not isinstance(sampler, RandomSampler) or sampler.replacement or len(sampler) != len(data):
            why = f"the loader does not shuffle them ({type(sampler).__name__})"
        elif told not in ("", mark := mark_of(data)):
            why = "they are a second data set"
        if why:
            log.warning("run %s: the data are not shared, since %s: give each peer other data", run.name, why)
            continue
        told = mark
        batches.sampler = EndlessShares(run, data, mark)
        line = "run %s: peers with an equal data set (%d samples) draw a share of it each; shares=False turns that off"
        log.info(line, run.name, len(batches.sampler))
