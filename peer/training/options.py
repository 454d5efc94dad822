"""The options of training, as keywords that type checkers know, and checked values with their defaults."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Required, TypedDict, TypeVar

import torch
from blake3 import blake3

from equipoise.averaging.outer import above_zero, below_one, require_in_range
from equipoise.averaging.replication.follower import Alone
from equipoise.averaging.replication.known import Trust
from equipoise.peer.training.counting import Count
from equipoise.peer.training.history import REPLICATED_ROUNDS
from equipoise.peer.training.image import Stateful

MAX_FRAGMENTS = 12
"""Most fragments of one `DiLoCo`: each is a run, of which a daemon takes 64."""

MAX_VALUE_CHARS = 200
"""Longest description of hyperparameters in a term (a term may have 256); a longer one is cut, and its digest added."""

log = logging.getLogger(__name__)

Schedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]

Kind = TypeVar("Kind")


class _CommonKeywords(TypedDict, total=False):
    wait_for: int
    alone: Alone
    patience: float
    timeout: float
    trust: Trust
    masters: bool


class OptionKeywords(_CommonKeywords, total=False):
    """The keywords of `Run.optimizer`; `Options` documents them."""

    target_batch_size: Required[float]
    batch_size: float
    clip: float | None
    scheduler: Schedule | None
    buffers: bool
    extra: Mapping[str, Stateful]
    on_update: Callable[[], object] | None
    delay: bool


class LocalKeywords(_CommonKeywords, total=False):
    """The keywords of `DiLoCo` and `LocalSGD` beside `every`; `LocalOptions` documents them."""

    fragments: int
    delay: int
    merge: float
    weight: float
    count: Count | None
    buffers: bool
    feedback: float


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of steps and of local steps.

    Attributes:
        wait_for: Other peers to wait for before the first step, at most a minute: a short loop would be over.
        alone: Behaviour while no other peer is known: `train` on with this peer's own gradients or differences, or
            `wait`. With `wait`, `step` still returns and adds gradients up, but makes no update; `reason` says so.
        patience: Seconds without company before this peer trains alone.
        timeout: Seconds for one round.
        trust: The peers whose claims decide the group's state. `known`: peers that this peer has trained with, against
            any number of strangers, while one of them is there; for a newcomer, the peers by which its daemon's user
            had it join (`--join`), or else most. `heads`: all peers, for swarms of known members: anybody can make up
            peers.
        masters: Whether the optimizer steps fp32 masters of parameters in bf16 and fp16, which hold their cast.
            Snapshots and checkpoints hold the masters, so such peers meet peers with fp32 parameters.
    """

    wait_for: int = 0
    alone: Alone = "train"
    patience: float = 10.0
    timeout: float = 30.0
    trust: Trust = "known"
    masters: bool = False

    def __init_subclass__(cls) -> None:
        """Have the subclass's help tell these options too."""
        if cls.__doc__ and CommonOptions.__doc__:
            cls.__doc__ = f"{cls.__doc__.rstrip()}{CommonOptions.__doc__.split('Attributes:')[1]}"

    def __post_init__(self) -> None:
        require_in_range("wait_for", self.wait_for, 0, math.inf, "a whole number of peers >= 0", int)
        above_zero("timeout", self.timeout)
        _require("alone", self.alone, self.alone in ("train", "wait"), "'train' or 'wait'")
        _require("trust", self.trust, self.trust in ("known", "heads"), "'known' or 'heads'")
        require_in_range("patience", self.patience, 0, math.inf, "seconds >= 0")


@dataclass(frozen=True, kw_only=True)
class Options(CommonOptions):
    """Options of a swarm's steps. Options that all peers must have alike become terms of the run.

    Attributes:
        target_batch_size: Samples, of all peers together, that make an update.
        batch_size: Samples in one call of `step`; `SwarmOptimizer.batch_size` can be set before each call.
        clip: Largest norm, over all parameters, of the averaged gradient; a larger one is scaled down. None: no limit.
        scheduler: Makes a learning-rate scheduler of the optimizer; it steps once an epoch, and is part of the state.
        buffers: Whether BatchNorm's statistics and other persistent floating-point buffers are averaged too, in fp32.
            If not, each peer has its own, and neither newcomers nor checkpoints get them. Integer and bool buffers of
            at most 1,024 values stay each trained peer's own; a newcomer gets their mean, rounded. A peer whose
            statistics hold NaN or Inf only observes that round.
        extra: Further state for newcomers, by name: objects with `state_dict` and `load_state_dict`, alike everywhere.
            They may change in `on_update` alone.
        on_update: Called once after each update, before a snapshot of the new state is taken, also for updates that
            this peer catches up with: several in one call of `step`. It is the place for all that follows the updates
            alike on all peers: averaged weights (EMA), clipping of weights, a change of hyperparameters at some
            `SwarmOptimizer.epoch`. What the script writes to parameters elsewhere parts this peer from the others.
        delay: Whether the loop goes on during a round. The peer applies the mean when it comes, at the latest when the
            peer has accumulated as much again as it contributed. Gradients are then up to one step old.
    """

    target_batch_size: float
    batch_size: float = 1
    clip: float | None = None
    scheduler: Schedule | None = None
    buffers: bool = False
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    on_update: Callable[[], object] | None = None
    delay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("target_batch_size", "batch_size"):
            above_zero(name, getattr(self, name))
        if self.clip is not None:
            above_zero("clip", self.clip)


@dataclass(frozen=True, kw_only=True)
class LocalOptions(CommonOptions):
    """Options of local steps. Options that all peers must have alike become terms of the run.

    Attributes:
        every: Inner steps, H, between two exchanges of the same parameters.
        fragments: Number of parts, P, that are exchanged in turn, each every H steps, so that the link is used evenly
            (Streaming DiLoCo, 2501.18512, section 2.1).
        delay: Inner steps, tau, below H / P, that the loop makes during an exchange (section 2.2).
        merge: Share, alpha, of those steps that a peer keeps: own <- agreed + alpha (own - agreed); equation 4.
        weight: Weight of each step of this peer in the mean or, where batches are counted, of each sample or token.
        count: Counts a batch, as `lambda batch: batch["attention_mask"].sum()`: a contribution weighs what its batches
            count. It gets what the module gets in training, before each forward pass that is not compiled; `count` of
            the loop takes numbers in its place.
        buffers: As in `Options`; with fragments, the buffers travel with the first of them.
        feedback: The factor of error feedback, from 0 to 1: a contribution is what this peer has moved by, and this
            times what the codec has left out of earlier ones. Codecs of few bits need it, as `sparse`; 0 is without.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    merge: float = 0.0
    weight: float = 1.0
    count: Count | None = None
    buffers: bool = False
    feedback: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in_range("feedback", self.feedback, 0, math.nextafter(1, 2), "a number from 0 to 1")
        require_in_range("every", self.every, 1, math.inf, "a whole number of steps >= 1", int)
        most = min(MAX_FRAGMENTS, self.every)
        expected = f"1 to {most}, and no more than `every`"
        require_in_range("fragments", self.fragments, 1, most + 1, expected, int)
        gap = self.every // self.fragments
        require_in_range("delay", self.delay, 0, gap, f"0 to {gap - 1} steps: below every / fragments", int)
        below_one("merge", self.merge)
        above_zero("weight", self.weight)


class FederatedKeywords(TypedDict, total=False):
    """The keywords of `Federated` beside `checkpoints`; `FederatedOptions` documents them."""

    rounds: int | None
    until: str
    patience: int
    proximal: float
    config: Mapping[str, Any]
    wait_for: int
    extra: Mapping[str, Stateful]


@dataclass(frozen=True, kw_only=True)
class FederatedOptions:
    """Options of a federated training. All but `wait_for` become terms of the run; of `extra`, its names.

    Attributes:
        rounds: Rounds after which the training ends; None for no limit.
        until: A condition under which it ends, `NAME >= NUMBER` with >=, <=, > or <, on a metric of `evaluate` or else
            of `fit`. The less favourable median of what the peers reported must meet it in two rounds in a row. What
            `evaluate` returns of a model travels with the next round's joins, so the training ends two rounds after the
            model that meets it; `Checkpoints.best` keeps that.
        patience: Rounds without an improvement of that metric after which it ends, below 1000; 0 for no limit.
        proximal: The factor mu of FedProx's proximal term, which `Task.proximal` returns.
        config: Options that all peers must have alike, by name, as JSON can hold them; `Task.config` shows them.
        wait_for: Other peers to wait for before the first round, at most a minute.
        extra: Further state for newcomers and checkpoints, by name: objects with `state_dict` and `load_state_dict`,
            alike everywhere. They may change in a round's update alone, not in `fit`.
    """

    rounds: int | None = None
    until: str = ""
    patience: int = 0
    proximal: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)
    wait_for: int = 0
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rounds is not None:
            require_in_range(
                "rounds", self.rounds, 1, math.inf, "a whole number of rounds >= 1, or None", int
            )
        expected = f"a whole number of rounds >= 0, below {REPLICATED_ROUNDS}"
        require_in_range("patience", self.patience, 0, REPLICATED_ROUNDS, expected, int)
        _require("patience", self.patience, bool(self.until) or not self.patience, "0 without `until`")
        require_in_range("proximal", self.proximal, 0, math.inf, "a finite number >= 0")
        require_in_range("wait_for", self.wait_for, 0, math.inf, "a whole number of peers >= 0", int)


def from_keywords(
    call: str, kind: type[Kind], keywords: Mapping[str, Any], others: tuple[str, ...] = ()
) -> Kind:
    """Options of one kind from the keywords of a call; `others` are the call's further keywords, to suggest from.

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
    if keywords.get("trust") == "heads":
        log.warning(
            'trust="heads": strangers that are more than the others replace what this peer has trained'
        )
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in keywords and one.default is one.default_factory is MISSING:
            raise TypeError(f"{call}(...) needs {one.name}=")
    return kind(**keywords)


def number(value: float) -> str:
    """A number as a term: without a fraction if it is whole, else with all digits that set it apart from the next."""
    return f"{value:.0f}" if float(value).is_integer() else repr(float(value))


def short(told: str) -> str:
    """A text as a term; if it is long or not printable, its beginning and a digest."""
    plain = told if told.isascii() and told.isprintable() else ""
    if plain == told and len(told) <= MAX_VALUE_CHARS:
        return told
    return f"{plain[:MAX_VALUE_CHARS]} blake3 {blake3(told.encode()).hexdigest()[:16]}".strip()


def _require(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
