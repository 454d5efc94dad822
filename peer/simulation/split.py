"""The split of one data set's samples among many peers: alike, by uneven shares, or a few classes each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.grammar import decimal, whole
from equipoise.compression.registry import Registry

Indices = NDArray[np.int64]

Dealt = tuple[list[list[Indices]], list[set[int]]]
"""For each peer its pieces, which are indices of samples, and the labels of which it may have samples."""

Deal = Callable[[Indices, int, np.random.Generator], Dealt]
"""Deals samples by their labels, 0 to C - 1, i64 [n], to a number of peers."""


def iid() -> Deal:
    """Every peer gets as many samples as any other, or one less, at random."""

    def deal(labels: Indices, peers: int, chance: np.random.Generator) -> Dealt:
        pieces = np.array_split(chance.permutation(len(labels)), peers)
        return [[piece] for piece in pieces], [set(labels.tolist())] * peers

    return deal


def dirichlet(alpha: float) -> Deal:
    """Each class is dealt in shares drawn from a symmetric Dirichlet distribution: the smaller alpha, the more uneven.

    Hsu 2019 (arXiv:1909.06335), section 3, drawn class by class, as Li 2021 (arXiv:2102.02079) does.

    Raises:
        ValueError: `alpha` is 0.
    """
    if not alpha > 0:
        raise ValueError(f"dirichlet: expected alpha above 0, got {alpha!r}")

    def deal(labels: Indices, peers: int, chance: np.random.Generator) -> Dealt:
        parts: list[list[Indices]] = [[] for _ in range(peers)]
        for label in range(int(labels.max(initial=-1)) + 1):
            samples = chance.permutation(np.flatnonzero(labels == label))
            shares = chance.dirichlet(np.full(peers, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
            for part, piece in zip(parts, np.split(samples, cuts), strict=True):
                part.append(piece)
        return parts, [set(labels.tolist())] * peers

    return deal


def classes(each: int) -> Deal:
    """Every peer gets samples of `each` classes; the peers of a class get about as many of it as each other.

    Each peer in turn takes the classes that the fewest have taken. With fewer than C places in all, for C classes,
    some classes have no peer, and their samples are dealt to no peer. (McMahan 2017, arXiv:1602.05629, section 3, deals
    shards of sorted samples instead, in which a peer may find more classes.)

    Raises:
        ValueError: `each` is 0 or, when samples are dealt, more than there are classes.
    """
    if each < 1:
        raise ValueError(f"classes: expected at least 1 class for each peer, got {each}")

    def deal(labels: Indices, peers: int, chance: np.random.Generator) -> Dealt:
        count = int(labels.max(initial=-1)) + 1
        if each > count:
            raise ValueError(f"classes: expected at most {count} for each peer, as there are, got {each}")
        takers: list[list[int]] = [[] for _ in range(count)]
        for peer in range(peers):
            tie = chance.permutation(count)
            for label in sorted(range(count), key=lambda one: (len(takers[one]), tie[one]))[:each]:
                takers[label].append(peer)
        parts: list[list[Indices]] = [[] for _ in range(peers)]
        for label, members in enumerate(takers):
            samples = chance.permutation(np.flatnonzero(labels == label))
            for peer, piece in zip(members, np.array_split(samples, max(len(members), 1)), strict=False):
                parts[peer].append(piece)
        return parts, [{label for label in range(count) if peer in takers[label]} for peer in range(peers)]

    return deal


SPLITS: Registry[Deal] = Registry("split", "splits", "dirichlet:alpha=0.3")
"""All splits; `SPLITS.register` makes another one known."""

SPLITS.register("iid", iid)
SPLITS.register("dirichlet", dirichlet, alpha=decimal(0.3))
SPLITS.register("classes", classes, each=whole(2))


def partition(labels: Any, peers: int, how: str, seed: int = 0) -> list[Indices]:
    """Deal the samples of a data set to peers; the same for the same arguments.

    Every sample is dealt once, except for those of classes that no peer gets by `classes`. No peer is left without
    samples, unless there are fewer samples than peers, or fewer of a peer's classes than peers that have them.

    Args:
        labels: The label of each sample, numbers or words: a list, an array or a tensor, [n].
        peers: At least 1.
        how: "iid"; "dirichlet:alpha=0.3", uneven shares of each class; or "classes:each=2", so many classes each.
        seed: At least 0.

    Returns:
        For each peer the indices of its samples, i64, ascending.

    Raises:
        ValueError: An argument is out of its range; says what was expected and what came.
    """
    deal = SPLITS.parse(how)
    given = np.asarray(labels)
    if given.ndim != 1:
        raise ValueError(f"expected one label for each sample, got an array of shape {list(given.shape)}")
    if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
        raise ValueError(f"expected at least 1 peer, got {peers!r}")
    numbered = np.unique(given, return_inverse=True)[1].astype(np.int64)
    pieces, allowed = deal(numbered, peers, np.random.default_rng(seed))
    parts = [np.sort(np.concatenate([*own, np.empty(0, np.int64)])) for own in pieces]
    for peer, part in enumerate(parts):
        if not len(part):
            _give_one(parts, peer, numbered, allowed[peer])
    return parts


def _give_one(parts: list[Indices], peer: int, labels: Indices, allowed: set[int]) -> None:
    """Give a peer without samples one sample with an allowed label, of the peer that has the most samples."""
    for giver in sorted(range(len(parts)), key=lambda one: -len(parts[one])):
        if len(parts[giver]) < 2:
            return
        for at, sample in enumerate(parts[giver]):
            if int(labels[sample]) in allowed:
                parts[peer] = parts[giver][at : at + 1]
                parts[giver] = np.delete(parts[giver], at)
                return
