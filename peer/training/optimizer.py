"""`SwarmOptimizer`: any torch optimizer, stepped by the whole swarm at once.

As with torchft's OptimizerWrapper, the loop stays as it is. `step` adds this micro-batch's gradients to this peer's
next contribution. When the swarm has the target batch, one round averages them, and all peers step alike.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from blake3 import blake3
from torch._compile import _disable_dynamo
from torch.linalg import vector_norm

from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import PLACES
from equipoise.averaging.state import StateId
from equipoise.peer.client.accumulate import NotFinite
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.tensors import stepped_tensors
from equipoise.peer.errors import Refused
from equipoise.peer.training import image
from equipoise.peer.training.batch_quota import BatchQuota
from equipoise.peer.training.checkpoint import Checkpoints, keep_checkpoints
from equipoise.peer.training.counting import counted
from equipoise.peer.training.guard import Guard, is_probe
from equipoise.peer.training.masters import Masters
from equipoise.peer.training.member import FINISH_SECONDS, Finished, Member, require_places, wait_for
from equipoise.peer.training.options import OptionKeywords, Options, from_keywords, number, short

log = logging.getLogger(__name__)

CLIP_BITS = 20
"""Bits kept of the clip factor. Peers with other hardware, or another number of threads, sum a norm in another order
and get another last bit. With this rounding, they clip alike; it changes the factor by a millionth."""

MAX_WRITES = 3
"""Times that a script may write to the state without an update in between before `step` raises an error."""

MAX_GROUPS = 16
"""Most parameter groups with a term of their own, of 32 terms; peers compare a digest of those behind them."""

MAX_PLACES = 128
"""Most characters for the places of parameters: of a model with more, each stands for several in a row."""

_runs: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[JoinedRun]] = weakref.WeakKeyDictionary()
"""The run that steps an optimizer."""


class SwarmOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose steps are the swarm's; made by `Run.optimizer`.

    `param_groups`, `state`, `zero_grad` and `state_dict` are the wrapped optimizer's, so that schedulers, GradScaler
    and frameworks take it for one. A run has one state, and so one group with `group_size` places. Of more peers, the
    others wait for a place: their gradients count nowhere, they follow the state, and `reason` says so.

    A parameter whose averaged gradient is exactly zero is skipped, weight decay and moments included, as torch skips a
    parameter whose `.grad` is None: an average does not tell the two cases apart. LoRA's A is skipped while B is zero.

    The next mean overwrites the wrapped optimizer's gradients: an optimizer that keeps some of them must keep copies.

    Only updates, and `Options.on_update`, may change parameters and hyperparameters. `step` takes changed
    hyperparameters, and a scheduler that the loop stepped too, back, with a warning. If the script has written to a
    parameter, this peer says so, and takes on the group's state again. Writes to `state` are not noticed. A step
    whose gradients are exact zeros at a rate of 0 is a probe, as torch.distributed.checkpoint makes it: it does
    nothing.

    Attributes:
        inner: The optimizer that makes the steps.
        batch_size: Samples in the next call of `step`.
        dropped: Number of calls of `step` whose gradients were not finite, and so were not added.
        skipped: Number of epochs without a step, because the averaged gradient was not finite.
        scheduler: The scheduler that `Options.scheduler` made.
        parameters: The run's parameters, by name.
        masters: What the wrapped optimizer steps; see `Options.masters`.
    """

    def __init__(self, run: JoinedRun, inner: torch.optim.Optimizer, options: Options) -> None:
        """Wrap `inner`.

        Raises:
            TypeError: `inner` is no torch optimizer, or a wrapped one; or the scheduler wants a metric.
            Refused: It holds other parameters than the run, or the run has been used already.
        """
        parameters = _check_inner(run, inner)
        require_places(run, options.wait_for)
        self.inner = inner
        self.batch_size = options.batch_size
        self._counted: float | None = None
        self.dropped = self.skipped = 0
        self.scheduler = options.scheduler(inner) if options.scheduler else None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            told = "expected a scheduler that counts epochs, got ReduceLROnPlateau, which wants a metric"
            raise TypeError(told)
        self.__setstate__({})  # The hooks of torch.optim.Optimizer, without parameters of its own.
        self._options = options
        self._run = run
        self.parameters = parameters
        binding = run.core.binding
        buffers = image.averaged_buffers(run, options.buffers)
        self.masters = Masters(run.name, parameters, options.masters)
        held = self.masters.tensors
        self._guard = Guard(binding.source, parameters, inner, self.scheduler, options.extra)
        model = image.ModelPart(held, buffers, self._loaded, binding.counters)
        parts: dict[str, image.Part] = {}
        if self.scheduler is not None:
            parts["scheduler"] = image.SchedulerPart(self.scheduler)
        parts["optimizer"] = image.OptimizerPart(inner, parameters, self.scheduler is not None, held)
        run.core.loop.dtypes = tuple(one.dtype for one in Schema.of(held).tensors)
        run.agree(self._terms(), options.buffers, frozen=image.frozen_of(binding.source, run.options.base))
        state, target = image.TrainingState(model, parts, options.extra), options.target_batch_size
        self.member = Member(run, state, options, self._update, target)
        self._pace = BatchQuota(options.target_batch_size)
        self._updating: int | None = None
        self._told: set[str] = set()
        _runs[inner] = weakref.ref(run)
        wait_for([run], options.wait_for)

    # ---- what is the wrapped optimizer's ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's; the swarm's whole state is `image`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's, but for hyperparameters, which `step` takes back. All peers must load the same:
        this peer meets the group anew."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the run was joined with a fixed set of parameters."""
        hint = "join again with all of them"
        raise Refused("expected the parameters that the run was joined with, got more", hint)

    # ---- what is the swarm's ----

    @property
    def epoch(self) -> int:
        """Updates applied to the state that this peer holds."""
        return self.member.id.epoch if self._updating is None else self._updating

    @property
    def id(self) -> StateId:
        """Id of the state that this peer holds: equal on all peers that are in step."""
        return self.member.id

    @property
    def last(self) -> Outcome | None:
        """The last round's outcome; if the last update was made alone, an outcome that is not ok and says why."""
        return self.member.last

    @property
    def in_step(self) -> bool:
        """True if this peer holds the group's state, as far as it knows."""
        return self.member.in_step

    @property
    def reason(self) -> str:
        """The reason for `in_step`, and this peer's way back into step if it is not, one line."""
        return self.member.reason

    def image(self) -> torch.Tensor:
        """The state as safetensors, u8 [bytes]; `load` takes it."""
        return self.member.image()

    def load(self, image: torch.Tensor) -> StateId:
        """Take on the state of an image: all of it or, with an ImageError, nothing."""
        read = self.member.read(image)
        read.load()
        return read.id

    def count(self, number: float | torch.Tensor) -> None:
        """Count samples, or tokens without padding, towards the next call of `step` that says no number itself.

        Raises:
            ValueError: `number` is not a finite number >= 0.
        """
        self._counted = (self._counted or 0.0) + counted(number)

    @_disable_dynamo
    def step(
        self, closure: Callable[[], Any] | None = None, *, samples: float | torch.Tensor | None = None
    ) -> Any:
        """Add this micro-batch's gradients; if the swarm then has its target batch, make the step.

        After a failed round, the accumulated gradients are kept, and the next call tries again.

        Args:
            closure: Called once, first, as by most torch optimizers: computes the gradients, and returns the loss.
            samples: Samples, or tokens without padding, of this micro-batch, in the unit of `target_batch_size`; by
                default what `count` has counted, or else `batch_size`.

        Returns:
            The closure's result.

        Raises:
            ValueError: `samples` is not a finite number >= 0.
            SchemaError: A parameter has another dtype or device than at the start, or is another tensor.
            Refused: The script has written to the parameters again and again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_probe(self.inner):
            return loss
        size = self._counted if samples is None else counted(samples)
        size, self._counted = self.batch_size if size is None else size, None
        self._guard.require_same_tensors()
        self._notice_writes()
        if self._guard.writes >= MAX_WRITES:
            told = f"the script has written to its parameters {self._guard.writes} times without an update"
            raise Refused(told, "write in on_update= alone, alike on all peers")
        self._pace.computed(self.member.clock(), size or self.batch_size)
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        try:
            if any(gradient is not None for gradient in gradients.values()):  # Else nothing was computed.
                self.member.accumulate(gradients, size)
        except NotFinite:
            self.dropped += 1
        before = self.id
        self.member.find_group()
        # If this step's update has come by a download, no round is needed.
        if self.id == before and self._may_collect():
            self.member.collect()
            if self._is_due():
                self._pace.given = self.member.accumulated
                self.member.meet(wait=not self._options.delay)
        if self.id != before and self.in_step and self.member.gave:
            self._guard.writes = 0
        self._pace.returned(self.member.clock())
        return loss

    def finish(self, timeout: float = FINISH_SECONDS) -> Finished:
        """End together with the others, after the last step and within `timeout` seconds: apply the mean of an open
        round, catch up, and stay while others are not as far. Leaving the run calls this, unless it was called before
        or an error was raised.

        Returns:
            Whether this peer ends with the group's state, and why not.
        """
        self._notice_writes()
        finished, loop = self.member.finish(timeout), self._run.core.loop
        loop.finishing = [one for one in loop.finishing if one != self.leave]
        return finished.without(self.member.accumulated)

    def leave(self) -> None:
        """Finish; the run calls this when it is left."""
        if sys.exc_info()[0] is None:  # After an error it does not linger.
            self.finish()

    def _notice_writes(self) -> None:
        """Take back hyperparameters, and meet the group anew if the script has written to the rest of the state.

        Before the first step, a script may still load what it begins with.
        """
        for changed in self._guard.take_back():
            self._warn_once(
                changed.rpartition(": ")[0],
                f"the script changed a hyperparameter, {changed}, and it is taken back: peers would drift apart. "
                "a scheduler may do so, if it is given as scheduler= and not stepped by the loop, and on_update= may",
            )
        frozen = self._guard.written_frozen()
        if frozen:
            told = f"the script has written to frozen tensors, first to {frozen[0]!r}"
            self._warn_once("frozen", f"{told}: snapshots leave those out, so write alike on all peers")
        written = self._guard.written()
        if not written:
            return
        self.masters.take()
        self._guard.note()
        told = f"the script has written to {written}"
        if self.epoch or self.in_step:
            self._warn_once(
                written,
                f"{told} since the last update, so this state is nobody else's: it takes on the group's. Causes are "
                "clamp_, load_state_dict, decay by hand, max_norm: write in on_update=, alike on all peers",
            )
        self._guard.writes += self.in_step
        self.member.written(f"{told} since the last update")

    def _warn_once(self, what: str, line: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("run %s: %s", self._run.name, line)

    def _may_collect(self) -> bool:
        """Return whether to wait for the open round, if any: a round that is only attended must not block the loop."""
        enough = self.member.in_step and self.member.accumulated >= self._pace.given
        return enough or self.member.round_done

    def _is_due(self) -> bool:
        last = self.member.last
        if self._pace.ended(last, self._run.peer) and last is not None:
            self._look_at_target(last.contributors)
        swarm, local = self.member.serve(), self.member.accumulated
        if self.member.waits:
            return True  # It follows the others, at their pace.
        swarm = swarm if self.in_step else local
        self.member.show(f"{swarm / self._options.target_batch_size:.0%} of the batch")
        if swarm <= local and not self.member.has_company():
            before = self.id
            self.member.look_back()
            if self.id != before:
                return False
            self._pace.alone()
        return self._pace.reached(local, swarm)

    def _look_at_target(self, contributors: Mapping[str, float]) -> None:
        """Warn if the others reach the target without this peer, which has made one micro-batch, as all have."""
        target, least = self._options.target_batch_size, min(contributors.values())
        one = contributors.get(self._run.peer, math.inf) <= self._pace.batch
        if one and least * (len(contributors) - 1) >= target:
            self._warn_once(
                "target_batch_size",
                f"target_batch_size is {target:g}, less than one micro-batch of each of {len(contributors)} peers, so "
                f"rounds have {sum(contributors.values()):g} samples: raise it, or make smaller batches",
            )

    def _loaded(self) -> None:
        self.masters.write()
        self._guard.note()

    def _update(self, mean: Mapping[str, torch.Tensor], before: StateId, outcome: Outcome | None) -> None:
        """Make the step from the mean in fp32, alike on all peers, and all that the script lets follow from it."""
        for name in self._guard.changed_extras():
            self._warn_once(
                f"extra {name}",
                f"extra state {name!r} has changed outside of on_update=: newcomers, and peers that catch up with "
                "several updates at once, get another one",
            )
        self._updating = before.epoch + 1
        try:
            self._make_step(mean)
            if self._options.on_update is not None:
                self._options.on_update()
                self.masters.take()
        finally:
            self._updating = None
            self._guard.note()  # What an interrupted update leaves behind is no write of the script.

    def _make_step(self, mean: Mapping[str, torch.Tensor]) -> None:
        # In double precision, a norm is 0 only if all values are 0, and finite only if all values are.
        norms = {name: float(vector_norm(one, dtype=torch.float64)) for name, one in mean.items()}
        norm = math.hypot(*norms.values())
        if math.isfinite(norm):
            held = {name: one for name, one in mean.items() if norms[name]}
            self.masters.begin(self.inner)
            try:
                self._hand_over(held, _clip_factor(norm, self._options.clip))
                self.inner.step()
            finally:
                self.masters.end()
        else:
            self.skipped += 1
        self.inner.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def _hand_over(self, mean: Mapping[str, torch.Tensor], factor: float) -> None:
        """Make the mean the parameters' `.grad`, without a copy if possible: a copy takes as long as all else here. A
        mean of zeros becomes None, so that the optimizer skips the parameter: most likely no peer had a gradient."""
        binding, all_sparse = self._run.core.binding, isinstance(self.inner, torch.optim.SparseAdam)
        for name, parameter in self.parameters.items():
            if name not in mean:
                parameter.grad = None
                continue
            gradient = mean[name].to(parameter.device)
            scaled = gradient if factor == 1 else gradient * factor
            if all_sparse or name in binding.sparse:
                parameter.grad = scaled.to_sparse(1).to(parameter.dtype)
            elif scaled.stride() == parameter.stride():
                parameter.grad = scaled.to(parameter.dtype)
            else:  # Fused optimizers read it by the strides of the parameter.
                parameter.grad = torch.empty_like(parameter).copy_(scaled)

    def _hyperparameters(self) -> dict[str, str]:
        left_out = ("params", "initial_lr")
        groups = [sorted(group.items()) for group in self.inner.param_groups]
        told = [", ".join(f"{key}={value}" for key, value in one if key not in left_out) for one in groups]
        if len(told) == 1:
            return {"hyperparameters": short(told[0])}
        named = {f"group {at}": short(one) for at, one in enumerate(told[:MAX_GROUPS])}
        return {**named, "further groups": short("; ".join(told[MAX_GROUPS:])) or "none"}

    def _terms(self) -> dict[str, str]:
        """The terms of the run, which must be alike on all peers."""
        options = self._options
        return {
            "optimizer": type(self.inner).__name__,
            **self._hyperparameters(),
            PLACES: _grouped(self.inner, self.parameters),
            "target batch size": number(options.target_batch_size),
            "clip": "none" if options.clip is None else number(options.clip),
            "scheduler": "none" if self.scheduler is None else _schedule(self.scheduler),
            "buffers": "averaged" if options.buffers else "each peer's own",
            "extra state": short(", ".join(sorted(options.extra))) or "none",
        }


def _grouped(inner: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> str:
    """The number of parameter groups, a digest of what each holds, and the parameters' places in them; see `PLACES`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names.get(id(one), "") for one in group["params"]] for group in inner.param_groups]
    places = {name: (at, place) for at, group in enumerate(groups) for place, name in enumerate(group)}
    several = math.ceil(len(parameters) / MAX_PLACES)
    ordered = [places.get(name) for name in parameters]
    digests = (blake3(repr(ordered[at : at + several]).encode()) for at in range(0, len(ordered), several))
    marks = "".join(chr(33 + digest.digest()[0] % 94) for digest in digests)
    return f"{len(groups)}: {blake3(repr(groups).encode()).hexdigest()[:16]} {marks}"


def _schedule(scheduler: torch.optim.lr_scheduler.LRScheduler) -> str:
    """The scheduler and its settings without its progress; functions are not compared."""
    settings = [
        f"{key}={json.dumps(value, default=lambda one: type(one).__name__)}"
        for key, value in sorted(scheduler.state_dict().items())
        if not key.startswith("_") and key not in ("last_epoch", "verbose")
    ]
    return ", ".join([type(scheduler).__name__, short(", ".join(settings))])


def swarm_optimizer(
    run: JoinedRun,
    inner: torch.optim.Optimizer,
    checkpoints: Checkpoints | None = None,
    **options: Unpack[OptionKeywords],
) -> SwarmOptimizer:
    """Make the optimizer of a run; see `Run.optimizer`."""
    with run.core.loop.undone_on_failure():
        optimizer = SwarmOptimizer(
            run, inner, from_keywords("run.optimizer", Options, options, ("checkpoints",))
        )
        keeper = keep_checkpoints(optimizer.member, run, checkpoints)
        if keeper:
            optimizer.register_step_post_hook(keeper)
    run.core.loop.finishing.append(optimizer.leave)  # Before the keeper, which records the final state.
    return optimizer


def _check_inner(run: JoinedRun, inner: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    if isinstance(inner, SwarmOptimizer):
        told = "expected a torch optimizer, got one that a run steps already: one run takes one optimizer"
        raise TypeError(told)
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(inner).__name__}")
    if isinstance(inner, torch.optim.LBFGS):
        told = "expected an optimizer that makes a step from gradients, got LBFGS, which computes them several times"
        raise TypeError(f"{told}: `DiLoCo` takes it")
    run.core.begin_training("an optimizer")
    if run.core.strategy.late != "drop":
        told = f"expected a strategy that drops late gradients, {run.name!r} has {run.core.strategy.spec!r}"
        raise Refused(told, "leave out late=, or train with local steps, as DiLoCo(run, every)")
    other = _runs[inner]() if inner in _runs else None
    if other not in (None, run) and not other.core.left:
        told = f"expected an optimizer of its own, got the one that steps run {other.name!r}"
        raise Refused(told, "make another optimizer, over parameters that no other run steps")
    _refuse_writing_modules(run.core.binding.source)
    parameters = stepped_tensors(run.core.binding.source)
    held = [parameter for group in inner.param_groups for parameter in group["params"]]
    ours = {id(parameter) for parameter in parameters.values()}
    foreign = sum(id(parameter) not in ours for parameter in held if parameter.requires_grad)
    if foreign:
        hint = "join the run with all of them, or a run for each optimizer with its parameters alone"
        raise Refused(f"{foreign} of the optimizer's parameters are not those of run {run.name!r}", hint)
    known = {id(parameter) for parameter in held}
    missing = [name for name, one in parameters.items() if id(one) not in known]
    if missing:
        told = f"{len(missing)} parameters of run {run.name!r} are not the optimizer's, as {missing[0]!r}"
        hint = (
            "give it all of them, or freeze those with requires_grad_(False) before join; where another optimizer "
            "has those, join a run for each, with a mapping of names to its parameters"
        )
        raise Refused(told, hint)
    return parameters


def _refuse_writing_modules(source: object) -> None:
    """Refuse modules whose forward pass writes their parameters, by this peer's own batch."""
    for path, part in source.named_modules() if isinstance(source, torch.nn.Module) else ():
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.max_norm is not None:
            told = f"{path or 'the module'!r} has max_norm: its forward pass writes its weight by this peer's own batch"
            raise Refused(told, "make it without max_norm, and scale its rows in on_update=")


def _clip_factor(norm: float, clip: float | None) -> float:
    """As torch's clip_grad_norm_: min(1, clip / (norm + 1e-6)), rounded to `CLIP_BITS` so that all peers agree."""
    if clip is None or norm <= clip:
        return 1.0
    mantissa, exponent = math.frexp(clip / (norm + 1e-6))
    return math.ldexp(round(math.ldexp(mantissa, CLIP_BITS)), exponent - CLIP_BITS)
