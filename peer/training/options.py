"""The options of training, as keywords that type checkers know, and checked values with their defaults."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Required, TypedDict, TypeVar

import torch

from equipoise.peer.training.image import Stateful
from equipoise.peer.training.replica import Alone, Trust

MAX_FRAGMENTS = 12
"""Most fragments of one `DiLoCo`: each is a run, and a daemon takes 16 of one script."""

Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

Kind = TypeVar("Kind")


class _CommonKeywords(TypedDict, total=False):
    wait_for: int
    alone: Alone
    patience: float
    timeout: float
    trust: Trust
    clock: Callable[[], float]


class OptionKeywords(_CommonKeywords, total=False):
    """The keywords of `Run.optimizer`; `Options` says what each means."""

    target_batch_size: Required[float]
    batch_size: float
    clip: float | None
    scheduler: Schedule | None
    buffers: bool
    extra: Mapping[str, Stateful]
    delay: bool


class LocalKeywords(_CommonKeywords, total=False):
    """The keywords of `DiLoCo` and `LocalSGD` beside `every`; `LocalOptions` says what each means."""

    fragments: int
    delay: int
    merge: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of steps and of local steps.

    Attributes:
        wait_for: Other peers to wait for before the first step, for `WAIT_SECONDS` at most: a short loop would be over.
        alone: Behaviour where nobody else is known: `train` on with the own gradients or differences, or `wait`.
            `step` then returns all the same and adds gradients up, but makes no update; `epoch` stands, `reason` tells.
        patience: Seconds without company before it trains alone.
        timeout: Seconds for one round.
        trust: Source of the group's state. `known`: the word of peers that this one has trained with, against any
            number of strangers, while one of them is there. `heads`: that of all, where the members are known.
        clock: Seconds on a steady clock.
    """

    wait_for: int = 0
    alone: Alone = "train"
    patience: float = 10.0
    timeout: float = 30.0
    trust: Trust = "known"
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        _require_number("wait_for", self.wait_for, 0, math.inf, "a whole number of peers >= 0", int)
        _require_positive("timeout", self.timeout)
        _require("alone", self.alone, self.alone in ("train", "wait"), "'train' or 'wait'")
        _require("trust", self.trust, self.trust in ("known", "heads"), "'known' or 'heads'")
        _require_number("patience", self.patience, 0, math.inf, "seconds >= 0")


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Options of a swarm's steps. Those that all peers must have alike become terms of the run.

    Attributes:
        target_batch_size: Samples, of all peers together, that make an update.
        batch_size: Samples in one call of `step`; `SwarmOptimizer.batch_size` can be set before any of them.
        clip: Largest norm, over all parameters, of the averaged gradient; larger ones are scaled down. None: any.
        scheduler: Makes a learning-rate scheduler of the optimizer; it is stepped once an epoch, and part of the state.
        buffers: Whether BatchNorm's statistics and other persistent floating-point buffers are averaged as well; if
            not, each peer has its own, and neither newcomers nor checkpoints get them. They travel in fp32. Counters
            stay each peer's own. A peer whose statistics hold NaN or Inf only takes from that round.
        extra: By name, what else newcomers get: anything with `state_dict` and `load_state_dict`, alike on all peers.
        delay: Whether the loop goes on while a round does; its mean is applied when it is there, at the latest when
            this peer has as much again as it gave. Gradients are then up to one step old.
    """

    target_batch_size: float
    batch_size: float = 1
    clip: float | None = None
    scheduler: Schedule | None = None
    buffers: bool = False
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    delay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_batch_size", "batch_size"):
            _require_positive(name, getattr(self, name))
        if self.clip is not None:
            _require_positive("clip", self.clip)


@dataclass(frozen=True, kw_only=True)
class LocalOptions(CommonOptions):
    """Options of local steps. Those that all peers must have alike become terms of the run.

    Attributes:
        every: Inner steps, H, between two exchanges of the same parameters.
        fragments: Parts, P, that are exchanged in turn, each every H steps, so that the link is used evenly (Streaming
            DiLoCo, 2501.18512, section 2.1).
        delay: Inner steps, tau, below H / P, that the loop makes while an exchange goes on (section 2.2).
        merge: Share, alpha, of those steps that a peer keeps: own <- agreed + alpha (own - agreed); equation 4.
        weight: Of this peer in the mean.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    merge: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_number("every", self.every, 1, math.inf, "a whole number of steps >= 1", int)
        most = min(MAX_FRAGMENTS, self.every)
        expected = f"1 to {most}, and no more than `every`"
        _require_number("fragments", self.fragments, 1, most + 1, expected, int)
        gap = self.every // self.fragments
        _require_number("delay", self.delay, 0, gap, f"0 to {gap - 1} steps: below every / fragments", int)
        _require_number("merge", self.merge, 0, 1, "a number from 0 to below 1")
        _require_positive("weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class GossipOptions:
    """Options of an exchange in pairs.

    Attributes:
        every: Steps from the beginning of one exchange to that of the next, if that has ended by then.
        weight: Of this peer in the mean of a pair.
        timeout: Seconds for one exchange, the search for a partner included. The loop does not wait for it.
        wait_for: Other peers to wait for before the loop begins, for a minute at most.
    """

    every: int
    weight: float = 1.0
    timeout: float = 30.0
    wait_for: int = 0

    def __post_init__(self) -> None:
        _require_number("every", self.every, 1, math.inf, "a whole number of steps >= 1", int)
        _require_positive("weight", self.weight)
        _require_positive("timeout", self.timeout)
        _require_number("wait_for", self.wait_for, 0, math.inf, "a whole number of peers >= 0", int)


class GossipKeywords(TypedDict, total=False):
    """Keywords of `Gossip` beside `every`."""

    weight: float
    timeout: float
    wait_for: int


def from_keywords(kind: type[Kind], keywords: Mapping[str, Any], others: tuple[str, ...] = ()) -> Kind:
    """Options of one kind from the keywords of a call, which takes `others` too: one of those may be meant.

    Raises:
        TypeError: A keyword is unknown, or a required one is missing; names it, and the closest known one.
        ValueError: A value is out of its range.
    """
    known = sorted((*(one.name for one in fields(kind)), *others))  # type: ignore[arg-type]
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise TypeError(f"unknown option {name!r}; {hint}")
    return kind(**keywords)


def number(value: float) -> str:
    """A number as a term: whole if it is, and otherwise with every digit that tells it from the next."""
    return f"{value:.0f}" if float(value).is_integer() else repr(float(value))


def _require_positive(name: str, value: float) -> None:
    _require_number(name, value, math.ulp(0.0), math.inf, "a finite number above 0")


def _require_number(
    name: str,
    value: object,
    least: float,
    below: float,
    expected: str,
    kind: type[int] | UnionType = int | float,
) -> None:
    valid = isinstance(value, kind) and not isinstance(value, bool) and least <= value < below
    _require(name, value, valid, expected)


def _require(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
