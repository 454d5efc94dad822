"""Training with local steps: each peer trains by itself, and now and then the peers exchange their differences.

    with DiLoCo(run, every=50):
        for batch in batches: ...  # the loop as it is: any torch optimizer over the run's parameters

Each peer sends its difference from the last agreed parameters, so that a coarse codec costs little. The mean moves the
agreed parameters by one outer step, alike on all peers. The inner optimizer's moments stay each peer's own.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Self, TypeVar, Unpack

import torch
from humanfriendly.text import pluralize
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.outer import Average, Descent, Nesterov, OuterStep, parse_outer
from equipoise.averaging.replication.follower import ATTENDANCE
from equipoise.averaging.schema import SchemaError
from equipoise.averaging.state import StateId
from equipoise.averaging.weights import discounted
from equipoise.peer.client.interrupts import frees_its_run
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.tensors import stepped_tensors
from equipoise.peer.errors import Refused
from equipoise.peer.training import image
from equipoise.peer.training.agreed import AgreedModel, Named
from equipoise.peer.training.checkpoint import Checkpoints, keep_checkpoints
from equipoise.peer.training.counting import Seen, counted, watch_batches
from equipoise.peer.training.feedback import Feedback
from equipoise.peer.training.guard import is_probe, require_same_tensors
from equipoise.peer.training.masters import Masters
from equipoise.peer.training.member import (
    CATCH_UP_SECONDS,
    FINISH_SECONDS,
    Finished,
    Member,
    require_places,
    wait_for,
)
from equipoise.peer.training.options import LocalKeywords, LocalOptions, from_keywords, number

End = TypeVar("End")

Reference = Callable[[], torch.optim.Optimizer | None]
"""A weak reference to an optimizer."""

log = logging.getLogger(__name__)

_watching: list[LocalTraining[Any]] = []
_hook: list[RemovableHandle] = []
_lock = threading.Lock()

RETRIES = 10
"""Most attempts after a failed round, spread over the steps to the next exchange: the others may be about to come."""


LATE_SECONDS = 600.0
"""Longest time for which a late contribution waits for the next round: the steps of the others may take minutes."""


class Offer(NamedTuple):
    """A contribution that no mean has, as far as this peer knows.

    Attributes:
        state: The state from which it was made.
        moved: What it moves back by, by name, fp32; with error feedback, the residual has it.
        weight: Its weight in its own round.
    """

    state: StateId
    moved: Named
    weight: float


@dataclass
class Schedule:
    """When a fragment is exchanged: each `every` steps, `offset` after a multiple, and soon after a failure.

    Attributes:
        sent_at: The step at which the last exchange began.
        retry_at: The step of the next attempt; None if the last exchange has not failed.
    """

    every: int
    offset: int
    sent_at: int = 0
    retry_at: int | None = None

    @property
    def pause(self) -> int:
        """Steps from one attempt to the next."""
        return max(self.every // RETRIES, 1)

    def is_due(self, step: int) -> bool:
        """Whether an exchange is due at a step."""
        return step % self.every == self.offset % self.every or step == self.retry_at


class LocalTraining(ABC, Generic[End]):
    """A `with` block that follows the steps of the loop's optimizer. It ends with `finish`, unless an error ends it.

    The loop's optimizer is the first one that makes a step and holds any of the run's parameters. Another one takes its
    place by two steps in a row: the script has made a new one.

    Attributes:
        steps: Steps of the loop's optimizer.
        finished: Result of `finish`, once it has returned.
    """

    def __init__(self, run: JoinedRun, parameters: Collection[torch.Tensor]) -> None:
        """`parameters` are the run's.

        Raises:
            Refused: No optimizer can step any of them.
        """
        self.steps = 0
        self.finished: End | None = None
        self._run = run
        self._followed = {id(parameter) for parameter in parameters}
        if not any(parameter.requires_grad and parameter.is_leaf for parameter in parameters):
            told = f"no optimizer steps the tensors of run {run.name!r}: they are detached or frozen"
            raise Refused(told, "give the module or its parameters to join")
        self._counted: Reference = _none
        self._last: Reference = _none

    @abstractmethod
    def finish(self) -> End:
        """End together with the others."""

    @abstractmethod
    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Go on after a step of the loop's optimizer, in the thread that made it."""

    def __enter__(self) -> Self:
        # One global hook serves all, because torch may be calling its hooks in another thread.
        with _lock:
            _watching.append(self)
            if not _hook:
                _hook.extend(
                    [register_optimizer_step_pre_hook(_prepare), register_optimizer_step_post_hook(_tell)]
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _lock:
            _watching.remove(self)
            while _hook and not _watching:
                _hook.pop().remove()
        if kind is None and self._counted is _none:
            told = "run %s: no optimizer over the joined tensors has made a step: make it from those"
            log.warning(told, self._run.name)
        if kind is None and self.finished is None:
            self.finish()

    def _begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Note that an optimizer of this process begins a step, maybe with a closure."""

    def _is_over_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return bool(held & self._followed)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer of this process has made a step."""
        if is_probe(optimizer):
            return
        counted, last = self._counted(), self._last()
        if optimizer is not counted and not self._is_over_ours(optimizer):
            return
        self._last = weakref.ref(optimizer)
        if counted is None or optimizer is last:
            self._counted = self._last
        if self._counted() is optimizer:
            self._stepped(optimizer)


def _none() -> None:
    """A reference to no optimizer."""


@_disable_dynamo
def _prepare(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    closure = args[1] if len(args) > 1 else keywords.get("closure")
    for watching in tuple(_watching):
        watching._begins(optimizer, closure is not None)


@_disable_dynamo
def _tell(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for watching in tuple(_watching):
        watching._follow(optimizer)


class DiLoCo(LocalTraining[Finished]):
    """Local steps with an outer optimizer (Douillard 2023, 2311.08105), streaming if there are several fragments.

    A context manager: until it ends, it watches the steps of the optimizer that holds the run's parameters.

    Attributes:
        steps: Inner steps, as the group counts them.
        finished: Result of `finish`, once it has returned.
    """

    @frees_its_run
    def __init__(
        self,
        run: JoinedRun,
        every: int = 0,
        outer: OuterStep | str | None = None,
        *,
        checkpoints: Checkpoints | None = None,
        **options: Unpack[LocalKeywords],
    ) -> None:
        """Agree with the others on the way of training.

        Args:
            run: Joined with the model or its tensors, and used for nothing else.
            every: See `LocalOptions`.
            outer: The outer optimizer, or its spec, as "fedadam:eta=0.1"; copied for each fragment. By default
                `Nesterov(lr=0.7, momentum=0.9)`.
            checkpoints: Checkpoints of the agreed state, without the inner optimizer; one directory a fragment, one
                epoch an outer step.
            **options: Other fields of `LocalOptions`.

        Raises:
            TypeError: An option is unknown; names it, and the closest known one.
            ValueError: An option is out of its range.
            SchemaError: Buffers are to be averaged, but the run was not joined with a module.
            Refused: Another loop trains with the run already, or its peers agreed on other terms, or fill a group,
                or no optimizer can step any of its tensors.
            CheckpointError: Training should resume, but the checkpoints are damaged or of another training.
        """
        call, given = type(self).__name__, {"every": every, **options}
        self._options = from_keywords(call, LocalOptions, given, ("outer", "checkpoints"))
        outer = parse_outer(outer) if isinstance(outer, str) else outer or Nesterov()
        run.core.begin_training(call, self._options.feedback > 0)
        require_places(run, self._options.wait_for)
        parameters = stepped_tensors(run.core.binding.source)
        super().__init__(run, parameters.values())
        self._parameters = parameters
        buffers = image.averaged_buffers(run, self._options.buffers)
        parts = [(run, parameters)]
        if self._options.fragments > 1:
            named = enumerate(dealt(parameters, self._options.fragments))
            parts = [(run.core.branch(f"{run.name}/{at}", part), part) for at, part in named]
        self._masters = Masters(run.name, parameters, self._options.masters)
        stepped = [{name: self._masters.tensors[name] for name in part} for _, part in parts]
        self._fragments = [
            Fragment(part_run, stepped[at], {} if at else buffers, copy.deepcopy(outer), self._options, at)
            for at, (part_run, _) in enumerate(parts)
        ]
        for fragment in self._fragments:
            fragment.written = self._masters.write
        terms = {
            "training": type(self).__name__,
            "outer step": str(outer),
            "steps between exchanges": str(every),
            "fragments": str(self._options.fragments),
            "delay": str(self._options.delay),
            "merge": number(self._options.merge),
            "buffers": "averaged" if self._options.buffers else "each peer's own",
            **({"error feedback": number(self._options.feedback)} if self._options.feedback else {}),
        }
        frozen = image.frozen_of(run.core.binding.source, run.options.base)
        for at, fragment in enumerate(self._fragments):
            fragment.run.agree(terms, self._options.buffers and at == 0, frozen=frozen)
        wait_for([fragment.run for fragment in self._fragments], self._options.wait_for)
        self._batches = self._options.count and watch_batches(
            run.core.binding.source, self._options.count, self.count
        )
        kept = [
            keep_checkpoints(one.member, one.run, checkpoints, residual=one.feedback)
            for one in self._fragments
        ]
        self._keepers = [keeper for keeper in kept if keeper]
        if self._keepers:
            self.steps = max(fragment.group_step for fragment in self._fragments)

    @property
    def epoch(self) -> int:
        """Outer steps that all fragments have made."""
        return min(fragment.member.id.epoch for fragment in self._fragments)

    @property
    def members(self) -> tuple[Member, ...]:
        """This peer's part in each fragment's training."""
        return tuple(fragment.member for fragment in self._fragments)

    @property
    def member(self) -> Member:
        """The member of the only fragment.

        Raises:
            Refused: There are several.
        """
        if len(self._fragments) > 1:
            raise Refused(f"there are {len(self._fragments)} fragments", "look at `members`")
        return self._fragments[0].member

    @property
    def last(self) -> Outcome | None:
        """The outcome of the last round."""
        ended = [fragment for fragment in self._fragments if fragment.member.last is not None]
        return max(ended, key=lambda fragment: fragment.schedule.sent_at).member.last if ended else None

    @property
    def residual(self) -> dict[str, torch.Tensor]:
        """What codecs have left out of this peer's contributions, fp32, by name; empty without `feedback`."""
        kept = [fragment.feedback.residual for fragment in self._fragments if fragment.feedback]
        return {name: one for part in kept for name, one in part.items()}

    def count(self, number: float | torch.Tensor) -> None:
        """Count samples, or tokens without padding, of the next step; call this before it, and alike on all peers.

        Contributions then weigh what was counted since the last exchange, not the number of steps. A contributor counts
        as ten times the lower median at most: join with `weights="any"` if peers differ by more than that.

        Raises:
            ValueError: `number` is not a finite number >= 0.
        """
        number = counted(number)
        for fragment in self._fragments:
            fragment.seen.count(number)

    @property
    def in_step(self) -> bool:
        """True if this peer holds the group's state, as far as it knows."""
        return all(member.in_step for member in self.members)

    @property
    def reason(self) -> str:
        """The reason for `in_step`, one line: of the first fragment that is not in step."""
        return min(self.members, key=lambda member: member.in_step).reason

    def finish(self, timeout: float = FINISH_SECONDS) -> Finished:
        """End together with the others, within `timeout` seconds: apply the mean of an open exchange, catch up, and
        stay while others are not as far. The end of the `with` block calls this, unless it was called before.

        Returns:
            Whether this peer ends with the group's state, and why not: the loop may have made steps of its own since.
        """
        require_same_tensors(self._run.core.binding.source, self._parameters)
        deadline = self.members[0].clock() + timeout
        open_ = self.members
        while open_:
            open_ = tuple(member for member in open_ if not member.ends(deadline))
        self.finished = min((fragment.ended() for fragment in self._fragments), key=lambda end: end.in_step)
        met = self.epoch or any(fragment.run.rounds_ok for fragment in self._fragments)
        if met and not self.finished.in_step:
            log.warning("run %s: it does not end with the group: %s", self._run.name, self.finished.reason)
        return self.finished

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._masters.end()
        if self._batches:
            self._batches.remove()
        super().__exit__(kind, *error)

    def _begins(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if not self._is_over_ours(optimizer):
            return
        if closure and self._options.masters:
            told = "the closure of a step would compute with the masters, in fp32"
            raise Refused(told, "call it before, and then optimizer.step()")
        self._masters.begin(optimizer)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_over_ours(optimizer):
            self._masters.end()
        super()._follow(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1
        self.members[0].show(f"step {self.steps % self._options.every} of {self._options.every}")
        if self.steps % self._options.every == 0:
            require_same_tensors(self._run.core.binding.source, self._parameters)
            if stepped_tensors(self._run.core.binding.source).keys() != self._parameters.keys():
                raise SchemaError("the parameters that require gradients have changed since join; join again")
        for fragment in self._fragments:
            caught_up = fragment.tick(self.steps)
            if caught_up is not None:
                self.steps = caught_up
            if fragment.diverged:
                optimizer.state.clear()  # The optimizer's moments have diverged too.
        for keep in self._keepers:
            keep()


class LocalSGD(DiLoCo):
    """Local steps with plain averaging (Stich 2018, 1805.09767): `DiLoCo` with `Average()`."""

    def __init__(
        self,
        run: JoinedRun,
        every: int = 0,
        *,
        checkpoints: Checkpoints | None = None,
        **options: Unpack[LocalKeywords],
    ) -> None:
        """See `DiLoCo`."""
        super().__init__(run, every, Average(), checkpoints=checkpoints, **options)


class SparseLoCo(DiLoCo):
    """Local steps with error feedback and a plain outer step (Sarfi 2025, 2508.15706), for the codec `sparse`.

    It is `DiLoCo` with `Descent(lr)` and `feedback=beta`.
    """

    def __init__(
        self,
        run: JoinedRun,
        every: int = 0,
        beta: float = 0.95,
        lr: float = 1.0,
        *,
        checkpoints: Checkpoints | None = None,
        **options: Unpack[LocalKeywords],
    ) -> None:
        """See `DiLoCo`; `beta` is its `feedback`, and `lr` the rate of the outer step."""
        options["feedback"] = beta
        super().__init__(run, every, Descent(lr), checkpoints=checkpoints, **options)


class Fragment:
    """Some of the parameters, exchanged together.

    Attributes:
        run: The fragment's run.
        model: Its parameters.
        member: This peer's part in the fragment's training.
        schedule: When it is exchanged.
        seen: What is in the local copy, and in no mean.
        diverged: Whether local steps have just led to NaN or Inf, and were given up.
        offer: What this peer has offered last, until a mean has it, in a run that counts late contributions.
        feedback: The error feedback; None without.
        written: Called after the local copy was written.
    """

    def __init__(
        self, run: JoinedRun, local: Named, buffers: Named, outer: OuterStep, options: LocalOptions, at: int
    ) -> None:
        self.schedule = Schedule(options.every, (at + 1) * options.every // options.fragments)
        self.written: Callable[[], None] = _none
        self.seen = Seen()
        self.run = run
        self._options = options
        self.diverged = self._gave = self._caught_up = self._is_late = False
        self.offer: Offer | None = None
        counters, merges = run.core.binding.counters, options.merge > 0
        self.model = AgreedModel(local, buffers, outer, counters, self._follow_agreed, merges)
        state = image.TrainingState(self.model.part, {"outer": self.model.outer})
        self.feedback = Feedback(run, options.feedback, self.model.values) if options.feedback else None
        self.member = Member(run, state, options, self._update)

    def tick(self, step: int) -> int | None:
        """Note an inner step, the group's `step`-th; return its true number if this peer has just learnt it."""
        epoch, ended = self.member.id.epoch, self.member.outcomes
        self.seen.steps += 1
        self._gave = self._gave and self.member.pending
        self._caught_up = self.diverged = False
        if self.member.in_step and self.member.pending and self._may_collect(step):
            self._collect(step)
        if not self.member.in_step or (self.member.pending and not self._gave):
            # Steps from another state than the group's are in vain; but no fragment delays the rounds of others.
            catches_up = self._counts_late and self.member.behind and self._options.fragments == 1
            waits = step == 1 or catches_up
            self.member.find_group(CATCH_UP_SECONDS if waits else 0.0)
        if step % self.schedule.pause == 0:
            self.member.serve()
        # The end of a round shows at which step the others are; the arrival of a missed mean does not.
        busy = self.member.pending or self._owes(step) or self.member.id.epoch != epoch
        if not busy and self.schedule.is_due(step):
            self._exchange(step)
        if self._owes(step):
            self._exchange(step, self.offer)
        told = self.member.id.epoch != epoch and (self._counts_late or self.member.outcomes != ended)
        return self._place(step) if told or self._caught_up else None

    def ended(self) -> Finished:
        """The end of this fragment's training: with the agreed values, unless there are later steps of its own."""
        end = self.member.ended()
        if self.seen.steps:
            told = f"{pluralize(self.seen.steps, 'step')} of its own since exchange {self.member.id.epoch}"
            return Finished(False, told if end.in_step else f"{told}; {end.reason}")
        self._write()
        self.model.part.restore()
        return end

    def _place(self, step: int) -> int | None:
        """The group's number of this step, by the last outer step; None if it equals this peer's count."""
        if self._caught_up or not self._gave:
            return self.group_step
        # This peer contributed at the same step as the others, but may have counted that step to another round.
        periods, rest = divmod(self.group_step - self.schedule.sent_at, self._options.every)
        return step + periods * self._options.every if periods and not rest else None

    def _may_collect(self, step: int) -> bool:
        """True at the step of the collection, alike on all peers; does not wait for a round that it only attends."""
        return step >= self.schedule.sent_at + self._options.delay if self._gave else self.member.round_done

    def _owes(self, step: int) -> bool:
        """True if a contribution that came too late may count in the next round: this peer holds a later state now."""
        late = self.offer is not None and self.offer.state != self.member.id
        ready = late and self.member.in_step and not self.member.pending
        return ready and step >= (self.schedule.retry_at or 0) and self.member.has_company()

    def _exchange(self, step: int, late: Offer | None = None) -> None:
        """Contribute, and take the mean: what this peer has moved by or, if given, a `late` contribution."""
        before, schedule = self.member.id, self.schedule
        schedule.sent_at, schedule.retry_at = step, None
        self.member.find_group(0.0)  # Without waiting, so that this peer misses no round of another fragment.
        if self.member.id != before:
            return  # No step of this peer has been made from there.
        self.member.drop()
        if late is None:
            self._contribute()
        else:
            moved = late.moved if self.feedback is None else self.feedback.again()
            self.member.accumulate(moved, discounted(late.weight, self.member.id.epoch - late.state.epoch))
        self._gave, self._is_late, rounds = self.member.in_step, False, self.member.outcomes
        self.member.meet(self._options.delay == 0, None if late is None else LATE_SECONDS)
        self._ended(before, rounds, step)

    def _ended(self, before: StateId, rounds: int, step: int) -> None:
        """Note the end of an exchange, if it has ended: it may have failed, or been late."""
        if self.member.outcomes != rounds and self.member.last is not None:
            self._is_late = self.member.last.late > 0
        if self.member.id == before and not self.member.pending:
            self.schedule.retry_at = step + self.schedule.pause

    def _contribute(self) -> None:
        self.seen.give()
        moved, weight = self.model.moved(), self._options.weight * self.seen.weight
        if self._counts_late and self.member.in_step:
            self.offer = Offer(self.member.id, moved if self.feedback is None else {}, weight)
        differences: Named | dict[str, None] = moved
        if self.feedback is not None and self.member.in_step:
            differences = self.feedback.add(moved)
        elif self.feedback is not None:  # These differences are from another state than the group's.
            differences, weight = dict.fromkeys(self.model.local), ATTENDANCE
        try:
            self.member.accumulate(differences, max(weight, ATTENDANCE))
        except SchemaError as error:
            log.warning("its local steps have led nowhere, and are given up: %s", error)
            self.diverged, self.offer = True, None
            if self.feedback is not None:
                self.feedback.withdraw()
            self._write()
            self.model.part.restore()
            self.member.accumulate(dict.fromkeys(self.model.local), ATTENDANCE)

    def _collect(self, step: int) -> None:
        before, rounds = self.member.id, self.member.outcomes
        self.member.collect()
        self._ended(before, rounds, step)

    @property
    def group_step(self) -> int:
        """The step at which the group began its last outer step, by the number of outer steps."""
        return max((self.member.id.epoch - 1) * self.schedule.every + self.schedule.offset, 0)

    @property
    def _counts_late(self) -> bool:
        return self.run.core.strategy.late == "next"

    def _update(self, mean: Named, before: StateId, outcome: Outcome | None) -> None:
        """Make the outer step, and merge its result into the local parameters."""
        if outcome is None or self.run.peer in outcome.givers:
            self.offer = None
        if self.feedback is not None:
            self.feedback.applied(outcome)
        self.model.step(mean)
        self._write(self._options.merge)

    def _follow_agreed(self) -> None:
        """Go on from the agreed parameters, which have come from another peer."""
        self._caught_up = True
        if not self._is_late:
            self.offer = None  # It may have counted: the state does not tell.
        if self.feedback is not None:
            self.feedback.replaced()
        self._write()

    def _write(self, merge: float = 0.0) -> None:
        """Make the local copy the agreed values, but for a share of what it has moved by."""
        self.model.write(merge)
        self.written()
        self.seen.settle(kept=merge > 0)


def dealt(parameters: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Deal parameters to `count` fragments of about the same size: the largest first, each to the smallest fragment.

    Raises:
        ValueError: There are fewer parameters than fragments.
    """
    if count > len(parameters):
        told = f"fragments: expected at most as many as there are parameters, {len(parameters)}, got {count}"
        raise ValueError(told)
    sizes = [0] * count
    fragments: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].numel(), item[0])):
        least = min(range(count), key=lambda at: (sizes[at], len(fragments[at]), at))
        fragments[least][name] = parameter
        sizes[least] += parameter.numel()
    return fragments
