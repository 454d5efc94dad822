"""Population based training (Jaderberg 2017, 1711.09846): each peer is a member, with hyperparameters of its own.

A report is a row of a table. Members get one table by an attendance round: each row travels in a signed join, whose
state names the member's steps and the digest of its weights. From the table, and chance that the round's digest seeds,
all compute alike who copies whom. Weights come by messages. A thread talks to the others, so that no report waits.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, Self

import msgspec
import torch
from blake3 import blake3

from equipoise.averaging.metrics import LARGEST, values_of
from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.outcome import SHOWN_CHARS, Outcome
from equipoise.averaging.population import EXPLOITS, EXPLORES, Scored, Space, ranked
from equipoise.averaging.population import exploit as copies_of
from equipoise.averaging.population import explore as changed
from equipoise.averaging.replication.follower import ATTENDANCE
from equipoise.averaging.state import StateId
from equipoise.limits import LruDict
from equipoise.peer.client.channels import Message
from equipoise.peer.client.futures import PendingRound
from equipoise.peer.client.interrupts import frees_its_run
from equipoise.peer.client.run import JoinedRun
from equipoise.peer.client.safetensors_io import ImageError
from equipoise.peer.client.tensors import persistent_buffers, stepped_tensors
from equipoise.peer.errors import EquipoiseError
from equipoise.peer.training.image import ModelPart, OptimizerPart, TrainingState, Tree
from equipoise.peer.training.local import LocalTraining

TOPIC = "population"

LOOK_SECONDS = 0.1
"""Longest time between two looks at the open round and the copy."""

ROUND_SECONDS = 60.0
"""Longest time of a round: the other members may have nothing to report for a while."""

SILENT_SECONDS = 10.0
"""Time without a part of its weights after which a member is given up: the thread that sends does nothing else."""

PART_BYTES = 16 * 2**20
"""Most bytes of a part of an image: a receiver has room for 256 MB from all senders."""

KEPT_IMAGES = 3
"""Most images that a member keeps: of the last round, of the open one, and one that a slow member still copies."""

MAX_LINEAGE, MAX_TABLES = 64, 1000
"""Most ancestors and tables that are remembered."""

NO_LINEAGE = "0" * 64
"""The image of a member has no lineage of its own: its digest is its name."""

JOIN_SECONDS = 2.0
"""Longest wait for the thread, which looks for its end every tenth of a second."""

log = logging.getLogger(__name__)


class Note(msgspec.Struct, frozen=True):
    """The fields of a message between two members.

    Attributes:
        digest: Names an image.
        offset: Where the part begins that is asked for, or comes with this.
        size: Bytes of the image: 0 asks for a part, -1 says that the image is not there any more.
        lineage: Its ancestors, the oldest first.
    """

    digest: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    size: Annotated[int, msgspec.Meta(ge=-1, le=2**53)] = 0
    lineage: Annotated[tuple[Scored, ...], msgspec.Meta(max_length=MAX_LINEAGE)] = ()


@dataclass
class Copy:
    """The image of another member, u8 [bytes], of which `got` bytes have come, the last ones at `heard_at`."""

    source: Scored
    heard_at: float
    image: torch.Tensor
    lineage: tuple[Scored, ...] = ()
    got: int = 0

    @property
    def awaits(self) -> tuple[str, str, int]:
        """The sender, the digest and the offset of the next part."""
        return self.source.peer, self.source.state.lineage, self.got


class Moments(OptimizerPart):
    """What an optimizer remembers of the parameters, without its hyperparameters, which each member's script sets."""

    def tree(self) -> Tree:
        """See `Part`."""
        self._terms = [{} for _ in self._terms]
        tree = super().tree()
        return {**tree, "groups": [{"params": group["params"]} for group in tree["groups"]]}


class Exchange:
    """What a member's thread does: it makes rounds, sends this member's images, and copies that of another.

    Attributes:
        run: The run of the rounds.
        offered: This member's row in the next round, its image and the ancestors of that; the script sets it.
        whole: A copy with its true digest; the script takes it.
        tables: The members of each round, the best first.
    """

    def __init__(self, run: JoinedRun, space: Mapping[str, Space], how: str, limit: int) -> None:
        """`how` is the way to exploit; an image has at most `limit` bytes."""
        self.offered: tuple[Scored, torch.Tensor, tuple[Scored, ...]] | None = None
        self.whole: Copy | None = None
        self.tables: deque[tuple[Scored, ...]] = deque(maxlen=MAX_TABLES)
        self.run, self._space, self._how, self._limit = run, space, how, limit
        self._images: LruDict[str, tuple[torch.Tensor, tuple[Scored, ...]]] = LruDict(KEPT_IMAGES)
        self._pending: PendingRound | None = None
        self._copy: Copy | None = None

    @property
    def wants(self) -> bool:
        """Whether the next round may have a new row of this member."""
        return self.offered is None and self._pending is None

    def turn(self) -> None:
        """Wait a moment for a message, and look at the open copy and round."""
        message = self.run.core.channels.receive(TOPIC, LOOK_SECONDS)
        now = self.run.core.clock()
        if message is not None:
            self.hear(message, now)
        if self._copy is not None and now - self._copy.heard_at > SILENT_SECONDS:
            self._give_up("is silent")
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            self.ended(pending.result(), now)
        if self._pending is None and self.offered is not None:
            self._begin(*self.offered)

    def _begin(self, row: Scored, image: torch.Tensor, lineage: tuple[Scored, ...]) -> None:
        self._images[row.state.lineage] = image, lineage
        self.run.take()
        self.run.accumulate(self.run.core.binding.tensors(), ATTENDANCE)
        scores = {"score": row.score, "parent": _mark(lineage[-1].peer) if lineage else 0.0}
        told: dict[str, Any] = {"state": row.state, "metrics": row.values, "evaluation": (0.0, scores)}
        self._pending = self.run.step(ROUND_SECONDS, wait=False, **told)
        self.offered = None

    def ended(self, outcome: Outcome, now: float) -> None:
        """Decide by a round, as all its members do. A peer that has not its mean does not know its table."""
        if not outcome.ok:
            return
        table = self._table(outcome)
        self.tables.append(tuple(ranked(table, Random(outcome.digest))))
        chosen = copies_of(table, Random(outcome.digest), self._how).get(self.run.peer)
        source = next((one for one in table if one.peer == chosen), None)
        if source is not None and self._copy is None and self.whole is None:
            self._copy = Copy(source, now, torch.empty(0, dtype=torch.uint8, device="cpu"))
            self._send(source.peer, Note(source.state.lineage))

    def _table(self, outcome: Outcome) -> list[Scored]:
        """The rows of a round that make sense."""
        peers, rows = {_mark(peer): peer for peer in outcome.group}, []
        for peer, (values, scores) in outcome.reports.items():
            held = values.keys() == self._space.keys() and all(
                one.holds(values[name]) for name, one in self._space.items()
            )
            if held and "score" in scores and peer in outcome.states:
                parent = peers.get(scores.get("parent", 0))
                rows.append(Scored(peer, outcome.states[peer], scores["score"], values, parent))
        return rows

    def hear(self, message: Message, now: float) -> None:
        """Send another member a part of an image, or take one; all else is dropped."""
        try:
            note = msgspec.convert(message.fields, Note)
        except msgspec.ValidationError as error:
            log.debug("run %s: dropped a message of %s: %s", self.run.name, message.sender, error)
            return
        if note.size == 0:
            image, lineage = self._images.get(note.digest) or (None, ())
            if image is None:
                self._send(message.sender, Note(note.digest, note.offset, -1))
                return
            self._images[note.digest] = image, lineage  # It is used: others go before it.
            part = image[note.offset : note.offset + PART_BYTES]
            self._send(message.sender, Note(note.digest, note.offset, len(image), lineage), part)
        elif self._copy is not None and self._copy.awaits == (message.sender, note.digest, note.offset):
            self._take(self._copy, note, message.tensors.get("part"), now)

    def _take(self, copy: Copy, note: Note, part: torch.Tensor | None, now: float) -> None:
        if not copy.got and 0 < note.size <= self._limit:
            copy.image, copy.lineage = copy.image.new_empty(note.size), note.lineage
        end = copy.got + (len(part) if part is not None and part.dim() == 1 else 0)
        if part is None or part.dtype != torch.uint8 or not copy.got < end <= len(copy.image):
            self._give_up(
                "has not these weights any more" if note.size < 0 else "sent no part of its weights"
            )
            return
        copy.image[copy.got : end], copy.got, copy.heard_at = part, end, now
        if end < len(copy.image):
            self._send(copy.source.peer, Note(note.digest, end))
        elif _digest(copy.image) == note.digest:
            self.whole, self._copy = copy, None
        else:
            self._give_up("sent weights of another digest")

    def _send(self, peer: str, note: Note, part: torch.Tensor | None = None) -> None:
        tensors = {} if part is None else {"part": part}
        self.run.core.channels.send(peer, TOPIC, tensors, "raw", msgspec.to_builtins(note))

    def _give_up(self, why: str) -> None:
        assert self._copy is not None, "a copy goes on"
        told = "run %s: this member keeps its own weights: ..%s %s"
        log.warning(told, self.run.name, self._copy.source.peer[-SHOWN_CHARS:], why)
        self._copy = None


class Population(LocalTraining[None]):
    """This peer as a member of a population, from its construction until `finish`, or until the run is left.

    `member["lr"]` is a hyperparameter of the space, which the script gives to its optimizer.

    Attributes:
        steps: Optimizer steps behind the weights, with those of the members from which they were copied.
        lineage: Those members, the oldest first, each as it was when it was copied.
        values: The hyperparameters as numbers, by name.
        tables: The members of each round that this one attended, the best first; all of a round have one table.
    """

    @frees_its_run
    def __init__(
        self,
        run: JoinedRun,
        space: Mapping[str, Space],
        exploit: str = "truncation:fraction=0.25",
        explore: str = "perturb:factor=0.2",
    ) -> None:
        """Begin with hyperparameters drawn from the space. All members give the same arguments.

        Args:
            run: Joined with the model, and used for nothing else.
            space: 1 to 8 hyperparameters by name.
            exploit: `truncation:fraction=0.25`, or `binary:threshold=0`.
            explore: `perturb:factor=0.2`, or `resample:chance=0.25`.

        Raises:
            ValueError: The space, or a spec, is not valid.
            Refused: Another loop trains with the run already, or peers that have a say give other arguments.
        """
        specs = EXPLOITS.parse(exploit).spec, EXPLORES.parse(explore).spec
        self._random, self._space, self._explore = Random(), dict(space), specs[1]
        self.values = values_of({name: one.draw(self._random) for name, one in space.items()})
        self.lineage: tuple[Scored, ...] = ()
        super().__init__(run, stepped_tensors(run.core.binding.source).values())
        run.core.begin_training(type(self).__name__)
        model = blake3(msgspec.json.encode(run.core.binding.gradients)).hexdigest()
        # Peers meet where the names of their tensors are the same.
        terms = (f"model {model[:16]}", *specs, *(f"{name}: {one}" for name, one in sorted(space.items())))
        rounds = {"strategy": "allreduce", "rule": "mean", "codec": "fp32", "group_size": MAX_GROUP_SIZE}
        branch = run.core.branch(f"{run.name}/{TOPIC}", {one: torch.zeros(1) for one in terms}, **rounds)
        branch.agree({})
        self._exchange = Exchange(branch, self._space, specs[0], self._state().model.limit)
        self.tables = self._exchange.tables
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=branch.name, daemon=True)
        super().__enter__()
        run.core.loop.finishing.append(self.finish)
        self._thread.start()

    def __getitem__(self, name: str) -> Any:
        return self._space[name].value(self.values[name])

    def report(self, score: float) -> bool:
        """Tell a score where the weights may be copied and replaced; waits for nobody.

        Args:
            score: More is better. What is not finite is less than any other.

        Returns:
            Whether this member has now the weights of another, with optimizer state, and new hyperparameters.

        Raises:
            ImageError: The optimizer's state cannot be copied.
        """
        score = float(score) if math.isfinite(score) else -LARGEST
        adopted, copy = False, self._exchange.whole
        if copy is not None:
            self._exchange.whole = None
            adopted = copy.source.score >= score and self._adopt(copy)
        if not adopted and self._exchange.wants:
            image = self._state().image(StateId(self.steps, NO_LINEAGE))
            row = Scored(self._run.peer, StateId(self.steps, _digest(image)), score, self.values)
            self._exchange.offered = row, image, self.lineage
        self._tell(copy.source.score if copy is not None and adopted else score)
        return adopted

    def finish(self) -> None:
        """Leave the population; idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            super().__exit__(None)
            self._thread.join(JOIN_SECONDS)
            self._exchange.run.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1

    def _state(self) -> TrainingState:
        source, optimizer = self._run.core.binding.source, self._counted()
        tensors = stepped_tensors(source)
        buffers = persistent_buffers(source) if isinstance(source, torch.nn.Module) else {}
        parts = {} if optimizer is None else {"optimizer": Moments(optimizer, tensors)}
        return TrainingState(ModelPart(tensors, buffers), parts)

    def _adopt(self, copy: Copy) -> bool:
        try:
            self._state().read(copy.image, foreign=True).load()
        except ImageError as error:
            log.warning("run %s: this member keeps its own weights: %s", self._run.name, error)
            return False
        self.steps, self.lineage = copy.source.state.epoch, (*copy.lineage, copy.source)[-MAX_LINEAGE:]
        self.values = changed(copy.source.values, self._random, self._space, self._explore)
        return True

    def _tell(self, score: float) -> None:
        table = [one.peer for one in self.tables[-1]] if self.tables else []
        ranks = {peer: f"rank {place} of {len(table)}" for place, peer in enumerate(table, 1)}
        held = (f"{name}={self[name]!r:.8}" for name in self._space)
        told = ", ".join([ranks.get(self._run.peer, "no rank yet"), f"score {score:.6g}", *held])
        come = (f"..{one.peer[-SHOWN_CHARS:]} at step {one.state.epoch}" for one in self.lineage[::-1])
        line = "; copied from " + " < ".join(come) if self.lineage else ""
        self._run.core.tell("training", told + line)

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                self._exchange.turn()
            except (EquipoiseError, ValueError) as error:
                log.debug("run %s: %s", self._run.name, error)
                self._ended.wait(LOOK_SECONDS)


def _digest(image: torch.Tensor) -> str:
    return blake3(image.numpy().data, max_threads=blake3.AUTO).hexdigest()


def _mark(peer: str) -> float:
    """48 bits of a hash of a PeerID: a join's metrics are numbers alone."""
    return float(int.from_bytes(blake3(peer.encode()).digest()[:6]))
