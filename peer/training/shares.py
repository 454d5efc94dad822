"""Shares of the data: each live peer of a run draws its own part of one common order, and no peer waits for another.

Who draws what is rendezvous hashing (Thaler and Ravishankar 1998): of all members of a pass, the one with the highest
hash beside the sample draws it. So a peer that comes takes samples over from all others, and none changes hands between
those. Peers compute alike from the seed, the pass and the members, and exchange nothing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterator, Sized
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves
from torch.utils.data import Sampler, Subset

from equipoise.limits import MAX_MARK_CHARACTERS
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.errors import DaemonLost

FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.25, 5.0
"""Seconds to the second look at the members, and the most between two looks; each pause is twice the one before. Peers
that begin together soon know of each other. A later one draws what falls to it until the others look."""

SLOT_BITS = 16
"""Samples are dealt by this many bits of their hash: with millions of them, each peer is still hashed 65,536 times."""

MARKED_SAMPLES = 4
"""Samples of a data set of which its mark is made."""


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash integers, u64 [n], alike on all machines: the finalizer of SplitMix64 (Steele 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Pass:
    """One peer's pass over its part of the data: it reads no clock, and asks nobody.

    Attributes:
        members: The peers among which the data are dealt; it grows.
        drawn: Samples that this peer has drawn.
        left: Indices of those that it has yet to draw, i64 [n], in the common order.
    """

    def __init__(self, count: int, seed: int, number: int, me: str, members: Collection[str]) -> None:
        """Deal `count` samples among this peer, `me`, and the `members`, for the pass of this `number`."""
        self._me, self._key = me, f"{seed} {number}"
        self.members = frozenset(members) | {me}
        self.drawn = 0
        left = self._mine(np.arange(count))
        self.left = left[np.argsort(self._hashed(left), kind="stable")]

    def __len__(self) -> int:
        return self.drawn + len(self.left)

    def meet(self, members: Collection[str]) -> None:
        """Hand over to new members what falls to them of what is left. What those drew that left comes next pass."""
        if not self.members.issuperset(members):
            self.members |= frozenset(members)
            self.left = self._mine(self.left)

    def draw(self) -> int:
        """The next sample's index; at least one is left."""
        first, self.left, self.drawn = int(self.left[0]), self.left[1:], self.drawn + 1
        return first

    def _mine(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the samples that fall to this peer: by the lowest bits of their hashes, of which all are spread."""
        slots = np.arange(1 << SLOT_BITS, dtype=np.uint64)
        best, owned = np.zeros_like(slots), np.zeros(len(slots), bool)
        for peer in sorted(self.members):
            score = mixed(slots ^ _number(f"{self._key} {peer}"))
            owned = np.where(score > best, peer == self._me, owned)
            best = np.maximum(best, score)
        mine: NDArray[np.bool_] = owned[self._hashed(indices) % np.uint64(len(slots))]
        return indices[mine]

    def _hashed(self, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What orders the samples."""
        return mixed(indices.astype(np.uint64) ^ _number(self._key))


def _number(told: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake3(told.encode()).digest(8), "little"))


class Shares(Sampler[int]):
    """Has each live peer draw its own part of a data set that all have: `DataLoader(data, sampler=Shares(run, data))`.

    At each pass, the samples are dealt among the peers that are there, in an order that all have in common. A peer that
    comes meanwhile takes over its part of what is left. What a peer that left had not drawn comes back in the next
    pass. Each peer counts its own passes, so a fast one begins the next earlier.

    Attributes:
        epoch: Number of the pass that comes next. Frameworks call `set_epoch`; a script that resumes sets it.
        mark: That of the data set, as `mark_of` returns it, if only peers with an equal one are to share it.
    """

    def __init__(self, run: JoinedRun, dataset: Sized, *, seed: int = 0) -> None:
        """Share a data set.

        Args:
            run: Its live peers share the data.
            dataset: A data set with a length, alike on all peers.
            seed: Alike on all peers; another one has other orders.

        Raises:
            TypeError: The data set has no length, as one that is streamed.
        """
        self._run, self._seed, self._count = run, seed, _length(dataset)
        self._members: tuple[str, ...] = ()
        self._pass: Pass | None = None
        self.epoch, self.mark = 0, ""

    def set_epoch(self, epoch: int) -> None:
        """Say which pass comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Samples of the pass that goes on or, before the first one, of that; newcomers make it shorter."""
        return len(self._pass or self._deal(self._count))

    def __iter__(self) -> Iterator[int]:
        current, clock = self._deal(self._count), self._run.core.clock
        self._pass, self.epoch = current, self.epoch + 1
        pause = FIRST_LOOK_SECONDS
        looks_at = clock() + pause
        while len(current.left):
            if clock() >= looks_at:
                current.meet(self.look())
                pause = min(2 * pause, LOOK_SECONDS)
                looks_at = clock() + pause
            if len(current.left):
                yield current.draw()

    def split(self, dataset: Any) -> Any:
        """This peer's part of a data set in the pass that comes next, for loaders that take no sampler.

        Call it before each pass, with the same data set on all peers. A peer that comes meanwhile gets its part from
        the next pass on.

        Returns:
            Of a data set with `select`, as those of Hugging Face, what that returns; of others, a `Subset`.

        Raises:
            TypeError: The data set has no length.
        """
        part = self._deal(_length(dataset)).left.tolist()
        self.epoch += 1
        return dataset.select(part) if hasattr(dataset, "select") else Subset(dataset, part)

    def _deal(self, count: int) -> Pass:
        return Pass(count, self._seed, self.epoch, self._run.peer, self.look())

    def look(self) -> tuple[str, ...]:
        """The live peers; while the daemon is gone, those of the last look."""
        with contextlib.suppress(DaemonLost):
            self._members = self._run.core.members(self.mark)
        return self._members


def mark_of(dataset: Any) -> str:
    """What tells data sets apart, 16 characters: a hash of the length and a few samples, with chance set to 0."""
    count = _length(dataset)
    content = blake3(str(count).encode())
    with _chance_at_0():
        for at in sorted({*np.linspace(0, count - 1, MARKED_SAMPLES).astype(int).tolist()}) if count else ():
            for value in tree_leaves(dataset[at]):
                array = np.asarray(
                    value.detach().cpu().double() if isinstance(value, torch.Tensor) else value
                )
                plain = array.tobytes() if array.dtype.kind in "biufcSU" else _plain(value)
                content.update(f"{array.dtype.kind} {array.shape} ".encode() + plain)
    return content.hexdigest()[:MAX_MARK_CHARACTERS]


@contextlib.contextmanager
def _chance_at_0() -> Iterator[None]:
    """Set the generators of Python, numpy and torch to 0 within the block: data sets may augment samples by them."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _plain(value: object) -> bytes:
    """What tells an object apart: its repr or, if that names its address, its class."""
    kind = type(value)
    return (kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(value)).encode()


def _length(dataset: object) -> int:
    if isinstance(dataset, Sized):
        return len(dataset)
    hint = "give each peer other files, or shards, of data that are streamed"
    raise TypeError(f"expected a data set with a length, got {type(dataset).__name__}: {hint}")
