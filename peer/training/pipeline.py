"""A model cut into stages, each held by one peer or several: micro-batches pass through it, and their gradients back.

`equipoise.averaging.pipeline` decides. This module computes, sends, and averages the gradients of a stage by rounds of
a run of its own, within `step`, in the thread of the script.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from equipoise.averaging import pipeline
from equipoise.averaging.counts import count
from equipoise.averaging.pipeline import MAX_STAGES, Mark, Stage
from equipoise.averaging.weights import ANY
from equipoise.peer.client.channels import Delivery, Message
from equipoise.peer.client.interrupts import frees_its_run
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import DTYPES, NAMES
from equipoise.peer.errors import Lost, Refused
from equipoise.peer.training.optimizer import swarm_optimizer
from equipoise.tasks import Driver

TOPIC = "pipeline"

ROUND_SECONDS = 10.0
"""Longest time of a stage's round, whose peers are all ready when it begins."""

LOOK_SECONDS = 0.1
"""Time between two looks at the live peers, the round, and what became of messages."""

WAIT_SECONDS = 0.02
"""Longest wait for a message, where there is nothing to compute."""

SETTLE_SECONDS = 1.0
"""Time without another peer, after which a peer takes a stage, or begins with its own parameters beside no sibling."""

FINISH_SECONDS = 10.0
"""Longest time that a peer stays for the next stage's last update."""

TARGET = "target "
"""What the name of a target begins with, before its dtype."""

log = logging.getLogger(__name__)


class Pipeline:
    """This peer's stage of a model that no peer trains whole, from its construction until `finish`.

    Peers of stage 0 have the data: an update is one batch of each of them. The parameters of all stages become what one
    process would make of the whole batch, but for rounding, with any number of replicas. Peers that die cost time: see
    `equipoise.averaging.pipeline`. A stage passes one tensor on, whose first dimension is that of the batch. Buffers,
    as BatchNorm's statistics, are each peer's own.

    Attributes:
        module: Its part of the model.
        optimizer: What makes its updates, with the other peers of the stage.
    """

    @frees_its_run
    def __init__(
        self,
        run: JoinedRun,
        stages: Sequence[torch.nn.Module | Callable[[], torch.nn.Module]],
        micro_batches: int = 8,
        codec: str = "fp16",
        schedule: Literal["gpipe", "1f1b"] = "gpipe",
        stage: Literal["auto"] | int = "auto",
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        """Take a stage.

        Args:
            run: Joined with any tensors, alike on all peers, as the whole model's; its codec is that of gradients
                between the peers of one stage.
            stages: The parts of the model in order, alike on all peers; or functions that make them, of which only this
                peer's is called.
            micro_batches: Parts of a batch of this peer.
            codec: The encoding of what passes between stages; `raw` for exact values.
            schedule: `gpipe`, passes forward before passes back, or `1f1b`, passes back first, which holds fewer
                activations. Both give the same gradients.
            stage: The stage, from 0; `auto` for the one with the least throughput, or first with the fewest peers.
            optimizer: Makes the optimizer of this stage's parameters, alike on all its peers.

        Raises:
            ValueError: An argument is out of range.
            Refused: Another loop trains with the run already.
        """
        of = len(stages)
        if not 2 <= of <= MAX_STAGES or not (stage == "auto" or stage in range(of)):
            raise ValueError(
                f"expected 2 to {MAX_STAGES} stages, and one of them or 'auto', got {of} and {stage!r}"
            )
        if schedule not in ("gpipe", "1f1b") or not 1 <= micro_batches <= MAX_STAGES:
            told = f"expected 'gpipe' or '1f1b', and 1 to {MAX_STAGES} micro-batches"
            raise ValueError(f"{told}, got {schedule!r} and {micro_batches!r}")
        run.core.begin_training(type(self).__name__)
        self._run, self._codec, self._pieces = run, codec, micro_batches
        self._held: dict[Mark, dict[str, torch.Tensor]] = {}
        self._message: dict[str, torch.Tensor] = {}
        self._sent: list[tuple[Delivery, pipeline.Send]] = []
        self._seen: tuple[float, object] = 0.0, None
        self._end: pipeline.Finish | pipeline.Fail | None = None
        self._given: float | None = None
        life = int.from_bytes(os.urandom(4))
        self._machine = Stage(run.peer, -1 if stage == "auto" else int(stage), of, life, schedule == "1f1b")
        self._driver = Driver[pipeline.Event, pipeline.Action](
            self._machine, self._perform, clock=run.core.clock
        )
        self._looked_at = run.core.clock()
        if stage == "auto":
            self._machine.at = self._choose(of)
        part = stages[self.stage]
        self.module = part if isinstance(part, torch.nn.Module) else part()
        changes = {"strategy": "allreduce:total=1", "rule": "mean", "weights": ANY, "norms": ANY}
        branch = run.core.branch(f"{run.name}/stage-{self.stage}", self.module, **changes)
        inner = optimizer(self.module.parameters())
        self.optimizer = swarm_optimizer(branch, inner, target_batch_size=1.0, patience=0.0)
        self._branch = branch
        run.core.loop.finishing.append(self.finish)

    @property
    def stage(self) -> int:
        """The stage that this peer holds."""
        return self._machine.at

    def step(
        self,
        inputs: torch.Tensor | None,
        targets: torch.Tensor | None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> float:
        """Take part in one update, from its first micro-batch to the new parameters.

        Args:
            inputs: At stage 0, a batch [samples, ...]; else ignored.
            targets: At stage 0, its targets [samples, ...]; they travel to the last stage, exactly.
            loss: At the last stage, makes the mean loss of a micro-batch from the model's output and the targets.

        Returns:
            The mean loss of the micro-batches that this peer has computed; NaN if those were none.

        Raises:
            Refused: A stage has no peer; names it. The next call goes on, with the batch of this one.
            ValueError: Stage 0 has no batch, or the loss of a micro-batch is not finite.
            equipoise.compression.CodecError: A value between stages is not finite.
        """
        self._end = None
        while self._end is None:
            if not self._machine.update.begun and self._is_ready:
                self._begin(inputs, targets)
            if (job := self._machine.job) is not None:
                since = self._run.core.clock()
                mean = self._compute(job, loss)
                self._driver.tell(pipeline.Computed(job, mean, self._run.core.clock() - since))
            self._turn(0.0 if self._machine.job else WAIT_SECONDS)
        if isinstance(self._end, pipeline.Fail):
            raise Refused(
                f"run {self._run.name!r}: {self._end.reason}", "start one, with stage= or by 'auto'"
            )
        self._tell(self._end)
        return self._end.loss

    def finish(self) -> None:
        """Leave the pipeline when the next stage has made the last update too, or after some seconds; idempotent."""
        clock = self._run.core.clock
        deadline = clock() + FINISH_SECONDS
        if self._branch.core.left:
            return
        lingers = sys.exc_info()[0] is None
        while lingers and not self._machine.passed_on and clock() < deadline:
            self._turn()
        self._branch.leave()
        self._run.core.loop.by = ""
        self._run.core.loop.branches.remove(self._branch)

    # ---- how it takes a stage ----

    def _choose(self, of: int) -> int:
        """Take a stage: beside other peers that have none, by a round of them all, so that no two choose alike."""
        held = torch.zeros(of + 1)
        changes = {"strategy": "allreduce", "rule": "mean", "codec": "fp32", "weights": ANY, "norms": ANY}
        branch = self._run.core.branch(f"{self._run.name}/stages", {"held": held}, **changes)
        try:
            while True:
                self._turn()
                if not self._settled:
                    continue
                held.copy_(torch.tensor(pipeline.throughputs(self._machine.stands, of)))
                if not self._has_rivals:
                    return pipeline.vacancy(held.tolist(), 0)
                pending = branch.average(timeout=ROUND_SECONDS, wait=False)
                while not pending.done():
                    self._turn()
                    if not self._has_rivals:
                        pending.stop_search("the others have taken their stages")
                if (outcome := pending.result()).ok:
                    return pipeline.vacancy(held.tolist(), outcome.group.index(self._run.peer))
        finally:
            branch.leave()
            self._run.core.loop.branches.remove(branch)

    @property
    def _has_rivals(self) -> bool:
        """Whether other peers have no stage."""
        return any(stand.stage < 0 for stand in self._machine.stands.values())

    # ---- what goes on within `step` ----

    @property
    def _settled(self) -> bool:
        """Whether nothing has changed for a while: other peers, and their stages."""
        return self._seen[1] is not None and self._run.core.clock() >= self._seen[0] + SETTLE_SECONDS

    @property
    def _is_ready(self) -> bool:
        """Whether this peer holds the stage's parameters: those of its siblings, or its own if it has none."""
        alone = self._settled and not self._has_rivals
        alone = alone and not self._machine.siblings and not self.optimizer.member.has_company()
        return self._machine.update.epoch >= 0 or self.optimizer.member.in_step or alone

    def _begin(self, inputs: torch.Tensor | None, targets: torch.Tensor | None) -> None:
        epoch, parts = self.optimizer.epoch, list[tuple[torch.Tensor, torch.Tensor]]()
        if self.stage == 0:
            if inputs is None or targets is None or not 0 < len(inputs) == len(targets):
                raise ValueError("expected inputs and targets of as many samples at stage 0")
            pieces = min(self._pieces, len(inputs))
            parts = list(zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True))
        for index, (one, target) in enumerate(parts):
            self._held[epoch, f"{self._run.peer}/{index}"] = {"in": one, "target": target}
        self._driver.tell(pipeline.Began(epoch, tuple(len(one) for one, _ in parts)))

    def _compute(
        self, job: pipeline.Job, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> float:
        """Make a pass; returns the loss, at the last stage after the pass forward."""
        held = self._held[job.mark]
        if job.forward:
            device = next(self.module.parameters()).device
            given = held["in"] = held["in"].to(device)
            made = self.module(given.requires_grad_() if self.stage else given)
            if not self._machine.is_last:
                held["graph"], held["out"] = made, made.detach()
                return 0.0
            mean = held["graph"] = loss(made, held["target"].to(device))
            if not math.isfinite(mean.detach()):
                raise ValueError(f"expected a finite loss of each micro-batch, got {float(mean.detach())}")
            return float(mean.detach())
        graph, given = held.pop("graph"), held.pop("in")
        back = held.pop("back") if "back" in held else graph.new_tensor(float(len(given)))
        torch.autograd.backward([graph], [back.to(graph)])
        if given.grad is not None:
            held["gradient"] = given.grad
        return 0.0

    def _turn(self, wait: float = WAIT_SECONDS) -> None:
        """Take the messages that are there, waiting for the first one; now and then look at all else."""
        while (message := self._run.core.channels.receive(TOPIC, wait)) is not None:
            self._hear(message)
            wait = 0.0
        now = self._run.core.clock()
        if now >= self._looked_at + LOOK_SECONDS or self._machine.update.share is not None:
            self._looked_at = now
            members = frozenset(self._run.members) - {self._run.peer}
            self._driver.tell(pipeline.Looked(members))
            seen = members, {peer: stand.stage for peer, stand in self._machine.stands.items()}
            self._seen = self._seen if self._seen[1] == seen else (now, seen)
            sent, self._sent = self._sent, []
            for delivery, send in sent:
                if not delivery.done():
                    self._sent.append((delivery, send))
                elif isinstance(delivery.ended.exception(), Refused | Lost):
                    self._driver.tell(pipeline.Failed(send))
            if self._machine.at >= 0:
                self._turn_round()

    def _hear(self, message: Message) -> None:
        try:
            note = msgspec.convert(message.fields, pipeline.Note)
        except msgspec.ValidationError as error:
            log.debug("run %s: dropped a message of %s: %s", self._run.name, message.sender, error)
            return
        self._message, tensors = {}, message.tensors
        match note:
            case pipeline.Forward(size=size) if "out" in tensors:
                self._message = _micro_batch(tensors, size)
            case pipeline.Backward(epoch, id) if "gradient" in tensors:
                sent = self._held.get((epoch, id), {}).get("out")
                if sent is not None and sent.shape == tensors["gradient"].shape:
                    exponent = tensors.get("exponent", torch.zeros(1))
                    self._message = {"back": torch.ldexp(tensors["gradient"], exponent)}
        self._driver.tell(pipeline.Heard(message.sender, note, bool(self._message)))

    def _perform(self, action: pipeline.Action) -> None:
        match action:
            case pipeline.Send(peer, note, mark):
                tensors = {} if mark is None else _content(note, self._held[mark])
                fields, channels = msgspec.to_builtins(note), self._run.core.channels
                self._sent.append((channels.send(peer, TOPIC, tensors, self._codec, fields), action))
            case pipeline.Keep(mark):
                self._held.setdefault(mark, {}).update(self._message)
            case pipeline.Forget(mark):
                self._held.pop(mark, None)
            case pipeline.Drop():
                self.optimizer.zero_grad()
                told = "another peer has counted the same, or one of stage 0 has gone: it begins this update again"
                log.warning("run %s, stage %d: %s", self._run.name, self.stage, told)
            case pipeline.Finish() | pipeline.Fail():
                self._end = action

    def _turn_round(self) -> None:
        """Let the stage's round be what the machine wants, and tell it of an update."""
        member, share = self.optimizer.member, self._machine.update.share
        company = member.has_company()
        member.serve()
        if not member.in_step and company:
            member.find_group(WAIT_SECONDS)
        elif member.pending and (share != self._given or not company):
            member.withdraw("its stage has other micro-batches now")
        elif member.pending:
            member.wait(WAIT_SECONDS)
        elif share is not None and (company or not self._machine.siblings):
            self._give(share)
        if self.optimizer.epoch != self._machine.update.epoch >= 0:
            self.optimizer.zero_grad()
            self._driver.tell(pipeline.Updated(self.optimizer.epoch))

    def _give(self, share: float) -> None:
        """Begin a round with this peer's gradients, or make the update, if it has no company."""
        samples, self._given = self._machine.samples, share
        self.optimizer.member.drop()
        if share:
            parameters = self.optimizer.parameters.items()
            means = {name: None if one.grad is None else one.grad / samples for name, one in parameters}
            self.optimizer.member.accumulate(means, share)
        self.optimizer.member.meet(wait=False, seconds=ROUND_SECONDS, whole=share == 1)

    def _tell(self, end: pipeline.Finish) -> None:
        if end.told:
            log.warning(
                "run %s, stage %d: update %d: %s", self._run.name, self.stage, self.optimizer.epoch, end.told
            )
        held = f"held by {count(1 + len(self._machine.siblings), 'peer')}"
        self._run.core.tell(
            "training", f"stage {self.stage}, {held}: update {self.optimizer.epoch}, loss {end.loss:.6g}"
        )


def _micro_batch(tensors: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The tensors of a message forward; none if they are no micro-batch of `size` samples."""
    name = next((one for one in tensors if one.startswith(TARGET)), "")
    dtype, target = DTYPES.get(name.removeprefix(TARGET)), tensors.get(name)
    if dtype is None or target is None or target.dtype != torch.uint8 or not target.dim():
        return {}
    if target.shape[-1] % dtype.itemsize:
        return {}
    found = {"in": tensors["out"], "target": target.view(dtype)}
    return found if all(one.dim() and len(one) == size for one in found.values()) else {}


def _content(note: pipeline.Note, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a message. A codec rounds floating-point ones: so targets travel as bytes, and gradients, which
    fp16 may not hold, without their exponent."""
    if isinstance(note, pipeline.Backward):
        gradient = held["gradient"]
        exponent = torch.frexp(gradient.abs().max()).exponent
        return {"gradient": torch.ldexp(gradient, -exponent), "exponent": exponent}
    target = held["target"].contiguous()
    return {"out": held["out"], TARGET + NAMES[target.dtype]: target.view(torch.uint8)}
