"""The split of one data set's samples among many peers: alike, by uneven shares, or a few classes each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.compression.grammar import Registry, canonical, decimal, whole

Indices = NDArray[np.int64]


class Split(ABC):
    """One way to deal samples.

    Attributes:
        spec: The canonical spec.
    """

    spec: str

    @abstractmethod
    def deal(self, labels: Indices, peers: int, chance: np.random.Generator) -> list[list[Indices]]:
        """Return, for each peer, its pieces: indices of `labels`, which are 0 to C - 1, i64 [n]."""

    def may_have(self, peer: int, label: int) -> bool:
        """Whether a peer without samples may get one of this label."""
        return True


class Iid(Split):
    """Every peer gets as many samples as any other, or one less, at random."""

    spec = "iid"

    def deal(self, labels: Indices, peers: int, chance: np.random.Generator) -> list[list[Indices]]:
        """See `Split.deal`."""
        return [[part] for part in np.array_split(chance.permutation(len(labels)), peers)]


class Dirichlet(Split):
    """Each class is dealt in shares drawn from a symmetric Dirichlet distribution: the smaller alpha, the more uneven.

    Hsu 2019 (arXiv:1909.06335), section 3, drawn class by class, as Li 2021 (arXiv:2102.02079) does.
    """

    def __init__(self, alpha: float) -> None:
        """`alpha` is above 0.

        Raises:
            ValueError: It is 0.
        """
        if not alpha > 0:
            raise ValueError(f"dirichlet: expected alpha above 0, got {alpha!r}")
        self._alpha = alpha
        self.spec = canonical("dirichlet", {"alpha": alpha})

    def deal(self, labels: Indices, peers: int, chance: np.random.Generator) -> list[list[Indices]]:
        """See `Split.deal`."""
        parts: list[list[Indices]] = [[] for _ in range(peers)]
        for label in range(int(labels.max(initial=-1)) + 1):
            samples = chance.permutation(np.flatnonzero(labels == label))
            shares = chance.dirichlet(np.full(peers, self._alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
            for part, piece in zip(parts, np.split(samples, cuts), strict=True):
                part.append(piece)
        return parts


class Classes(Split):
    """Every peer gets samples of `each` classes; the peers of a class get about as many of it as each other.

    Each peer in turn takes the classes that the fewest have taken. With fewer than C places in all, for C classes,
    some classes have no peer, and their samples are dealt to no peer. (McMahan 2017, arXiv:1602.05629, section 3, deals
    shards of sorted samples instead, in which a peer may find more classes.)
    """

    def __init__(self, each: int) -> None:
        """`each` is at least 1.

        Raises:
            ValueError: It is 0.
        """
        if each < 1:
            raise ValueError(f"classes: expected at least 1 class for each peer, got {each}")
        self._each = each
        self._taken: list[set[int]] = []
        self.spec = canonical("classes", {"each": each})

    def deal(self, labels: Indices, peers: int, chance: np.random.Generator) -> list[list[Indices]]:
        """See `Split.deal`.

        Raises:
            ValueError: There are fewer classes than each peer should get.
        """
        count = int(labels.max(initial=-1)) + 1
        if self._each > count:
            raise ValueError(
                f"classes: expected at most {count} for each peer, as there are, got {self._each}"
            )
        takers: list[list[int]] = [[] for _ in range(count)]
        for peer in range(peers):
            tie = chance.permutation(count)
            for label in sorted(range(count), key=lambda one: (len(takers[one]), tie[one]))[: self._each]:
                takers[label].append(peer)
        self._taken = [{label for label in range(count) if peer in takers[label]} for peer in range(peers)]
        parts: list[list[Indices]] = [[] for _ in range(peers)]
        for label, members in enumerate(takers):
            samples = chance.permutation(np.flatnonzero(labels == label))
            for peer, piece in zip(members, np.array_split(samples, max(len(members), 1)), strict=False):
                parts[peer].append(piece)
        return parts

    def may_have(self, peer: int, label: int) -> bool:
        """See `Split.may_have`."""
        return label in self._taken[peer]


SPLITS: Registry[Split] = Registry("split", "splits", "dirichlet:alpha=0.3")
"""All splits; `SPLITS.register` makes another one known."""

SPLITS.register("iid", Iid)
SPLITS.register("dirichlet", Dirichlet, alpha=decimal(0.3))
SPLITS.register("classes", Classes, each=whole(2))


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
    split = SPLITS.parse(how)
    given = np.asarray(labels)
    if given.ndim != 1:
        raise ValueError(f"expected one label for each sample, got an array of shape {list(given.shape)}")
    if isinstance(peers, bool) or not isinstance(peers, int) or peers < 1:
        raise ValueError(f"expected at least 1 peer, got {peers!r}")
    numbered = np.unique(given, return_inverse=True)[1].astype(np.int64)
    pieces = split.deal(numbered, peers, np.random.default_rng(seed))
    parts = [np.sort(np.concatenate([*own, np.empty(0, np.int64)])) for own in pieces]
    for peer, part in enumerate(parts):
        if not len(part):
            _give_one(parts, peer, numbered, split)
    return parts


def _give_one(parts: list[Indices], peer: int, labels: Indices, split: Split) -> None:
    """Give a peer without samples one of the peer that has the most, if it may have one of those."""
    for giver in sorted(range(len(parts)), key=lambda one: -len(parts[one])):
        if len(parts[giver]) < 2:
            return
        for at, sample in enumerate(parts[giver]):
            if split.may_have(peer, int(labels[sample])):
                parts[peer] = parts[giver][at : at + 1]
                parts[giver] = np.delete(parts[giver], at)
                return
