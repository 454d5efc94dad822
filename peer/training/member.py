"""One peer's part in a training whose state all peers hold alike: does what its `Replica` decides."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from equipoise.averaging.outcome import Idle, NoPeers, Outcome
from equipoise.averaging.state import StateId
from equipoise.peer.accumulate import Accumulator
from equipoise.peer.errors import Refused
from equipoise.peer.tensors import Gradients, named_gradients
from equipoise.peer.training import replica as machine
from equipoise.peer.training.image import Image, ModelPart, TrainingState, digest
from equipoise.peer.training.ports import Pending, PendingFetch, TrainingRun
from equipoise.peer.training.replica import Alone, Replica
from equipoise.peer.training.tensorfile import ImageError

CATCH_UP_SECONDS = 5.0
"""Longest time that a step of the training loop waits to find the group's state; then the loop has its turn."""

ATTEND_SECONDS = 60.0
"""For a round to be attended, which comes when the others have made their batch. A group takes one whose time is half
over for a reason to begin: of one that waits for a slow swarm's next round that must not be true."""

POLL_SECONDS = 0.05
"""Between two looks whether a snapshot has come, while waiting for a round."""

HELD_MEMORY = 0.25
"""Share of the memory that is available for means that are kept while a snapshot comes: that takes as much again, and
the loop goes on."""

MEAN_BYTES = 4
"""Of a value of a mean."""

LEAST_HELD = 2
"""Means kept whatever memory there is: with fewer no snapshot, which always is some rounds old, could be used."""

FETCH_SECONDS = 600.0
"""For one download; a gigabyte at 16 Mbit/s. It resumes from other donors within that."""

log = logging.getLogger(__name__)

Update = Callable[[Mapping[str, torch.Tensor]], None]
"""Takes the mean, fp32, by name, and makes the update that all peers make alike."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What this peer decides for itself.

    Attributes:
        alone: What to do where nobody else is known: `train` or `wait`.
        patience: Seconds without company after which it trains alone.
        timeout: Seconds for one round.
        clock: Seconds on a steady clock.
    """

    alone: Alone = "train"
    patience: float = 10.0
    timeout: float = 30.0
    clock: Callable[[], float] = time.monotonic


class Mean(NamedTuple):
    """What one round came to: gradients, or differences, by name, fp32; and averaged buffers."""

    values: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def copy(self) -> Mean:
        """A copy in the machine's memory: an accelerator has less of it."""
        return Mean(_copied(self.values), _copied(self.buffers))


class Subject(NamedTuple):
    """What is trained.

    Attributes:
        tensors: What gradients, or differences, are exchanged of, by name.
        buffers: Those that travel with them.
        model: The part of the state that holds both.
        state: All of it.
        update: Makes an update.
    """

    tensors: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    model: ModelPart
    state: TrainingState
    update: Update


class Member:
    """Accumulates, meets, applies, fetches and offers.

    Attributes:
        last: The last outcome; of an update made alone one that is not ok and says so.
        outcomes: How many rounds have ended.
    """

    def __init__(self, run: TrainingRun, subject: Subject, policy: Policy) -> None:
        self.last: Outcome | None = None
        self.outcomes = 0
        subject.state.require_writable()
        self._run = run
        self._subject = subject
        self._policy = policy
        start = machine.beginning(subject.model.digest())
        self._replica = self._replica_at(start)
        self._whole: StateId | None = start
        self._own: Accumulator | None = None
        self._pending: Pending | None = None
        self._fetch: PendingFetch | None = None
        self._image: Image | None = None
        self._held: dict[StateId, Mean] = {}
        self._offered = -1
        self._told = ""
        self._crowd = ""

    @property
    def id(self) -> StateId:
        """Which state this peer holds."""
        return self._replica.state

    @property
    def in_step(self) -> bool:
        """Whether it is the group's, as far as this peer knows."""
        return self._replica.contributes

    @property
    def reason(self) -> str:
        """Why this peer does what it does, one line."""
        return "; ".join(filter(None, (self._replica.reason, self._crowd)))

    @property
    def pending(self) -> bool:
        """Whether a round goes on."""
        return self._pending is not None

    @property
    def round_done(self) -> bool:
        """Whether no round goes on that would have to be waited for."""
        return self._pending is None or self._pending.done()

    @property
    def accumulated(self) -> float:
        """Weight accumulated here towards the next update."""
        return self._run.accumulated if self.in_step else (self._own.weight if self._own else 0.0)

    def accumulate(self, gradients: Gradients, weight: float) -> None:
        """Add weight * gradient to what this peer has to give, or keeps until it is known to fit.

        Raises:
            SchemaError: A gradient has a wrong shape, or holds NaN or Inf; nothing was added.
        """
        if self.in_step:
            self._run.accumulate(gradients, weight)
            return
        if self._own is None:
            self._own = Accumulator(self._subject.tensors)
        self._own.add(named_gradients(gradients), weight)

    def swarm_accumulated(self) -> float:
        """Weight accumulated towards the next update, by all who will contribute; offers a snapshot if one is
        wanted."""
        swarm = self.serve()
        return swarm if self.in_step else self.accumulated

    def serve(self) -> float:
        """Offer a snapshot if one is wanted; returns the weight that the swarm has accumulated."""
        progress = self._run.progress()
        self._offer(progress.wanted)
        return progress.swarm

    def drop(self) -> None:
        """Forget what was accumulated."""
        self._own = None
        self._run.take()

    def find_group(self, seconds: float = CATCH_UP_SECONDS) -> None:
        """Where this peer does not hold the group's state, or does not know, find out and catch up, for some
        seconds."""
        deadline = self._policy.clock() + seconds
        while not self.in_step and self.has_company():
            if self._pending is None:
                self._attend()
            assert self._pending is not None, "just started"
            if self._pending.wait(min(POLL_SECONDS, max(deadline - self._policy.clock(), 0.0))):
                self.collect()
            self._look_for_image()
            if self._policy.clock() >= deadline or (self._replica.gives_up and not self.pending):
                break

    def meet(self, wait: bool = True) -> None:
        """Make the update that is due: with the group, or alone, or not yet; `wait=False` only starts the round."""
        self._do(self._replica.handle(machine.Due(self.has_company()), self._policy.clock()), wait)

    def collect(self) -> None:
        """Wait for the round that goes on, and do what follows from it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        outcome = self.last = pending.result()
        self.outcomes += 1
        was_in_step = self.in_step
        if outcome.ok:
            self._look_for_crowd(outcome)
            event: machine.Event = machine.RoundSucceeded(
                outcome.state,
                outcome.states,
                outcome.digest,
                outcome.contributors,
                outcome.group,
                self._missing(outcome),
            )
        else:
            event = machine.RoundFailed(outcome.reason)
        self._do(self._replica.handle(event, self._policy.clock()))
        if was_in_step != self.in_step:
            self._move_accumulated()
        if self.in_step:
            self._stop_fetching()

    def load(self, image: torch.Tensor) -> StateId:
        """Become what an image holds, as from a checkpoint; the next round tells whether it is the group's.

        Raises:
            ImageError: It is damaged or does not fit; nothing has changed.
        """
        read = self.read(image)
        read.load()
        return read.id

    def read(self, image: torch.Tensor) -> Image:
        """Check all of an image; its `load` has this peer become what it holds.

        Raises:
            ImageError: It is damaged or does not fit.
        """
        read = self._subject.state.read(image)

        def load() -> None:
            with self._changing():
                read.load()
            self._replica = self._replica_at(read.id)
            self._own, self._whole = None, read.id
            self._run.take()

        return Image(read.id, load)

    @property
    def limit(self) -> int:
        """Most bytes that an image of this state takes."""
        return self._subject.model.limit

    @property
    def whole(self) -> bool:
        """Whether what is in memory is what `id` says; not so where an update was interrupted."""
        return self._whole == self.id

    def image(self) -> torch.Tensor:
        """The state that this peer holds, u8 [bytes]: one copy in memory."""
        return self._subject.state.image(self.id)

    def has_company(self) -> bool:
        """Whether any other peer of the run is known."""
        return not isinstance(self._run.state, NoPeers)

    def _replica_at(self, state: StateId) -> Replica:
        policy, subject = self._policy, self._subject
        values = sum(tensor.numel() for tensor in (*subject.tensors.values(), *subject.buffers.values()))
        held = affordable(values * MEAN_BYTES, psutil.virtual_memory().available)
        return Replica(self._run.peer, state, policy.clock(), policy.alone, policy.patience, held)

    def _missing(self, outcome: Outcome) -> int:
        state = self._run.state
        return max(state.peers + 1 - len(outcome.group), 0) if isinstance(state, Idle) else 0

    def _look_for_crowd(self, outcome: Outcome) -> None:
        """Say it where some cannot have been in the group: those who are make another state of it, and so on."""
        missing = self._missing(outcome)
        full = len(outcome.group) >= self._run.group_size
        told = crowd_told(len(outcome.group) + missing, self._run.group_size) if full and missing else ""
        if told and not self._crowd:
            log.warning("run %s: %s", self._run.name, told)
        self._crowd = told

    def _attend(self) -> None:
        """Take part in a round with nothing, to learn which state the group holds, or what its mean is."""
        self._run.take()
        weight = self._replica.attendance(self._others_give())
        if weight:
            self._run.accumulate(dict.fromkeys(self._subject.tensors), weight)
        self._start(ATTEND_SECONDS)

    def _others_give(self) -> bool:
        state = self._run.state
        return (
            isinstance(state, Idle)
            and state.peers > 1
            and self._run.progress().swarm > machine.MEETING_WEIGHT
        )

    def _start(self, seconds: float) -> None:
        if not all(bool(torch.isfinite(buffer).all()) for buffer in self._subject.buffers.values()):
            log.warning(
                "run %s: its averaged buffers hold NaN or Inf: it takes the group's, and adds nothing",
                self._run.name,
            )
            self._run.take()
        self._pending = self._run.step(seconds, wait=False, state=self._replica.claim)

    def _move_accumulated(self) -> None:
        """Into the run what fits the group's state; out of it what does not."""
        if not self.in_step:
            self._run.take()
            return
        own, self._own = self._own, None
        if own is not None and own.weight > 0:
            self._run.accumulate(_mean_of(own, self._subject.tensors), own.weight)

    def _do(self, actions: list[machine.Action], wait: bool = True) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case machine.Apply(before):
                    self._apply(self._held.pop(before) if before in self._held else self._mean())
                case machine.Hold(before):
                    self._held[before] = self._mean().copy()
                case machine.Forget(before):
                    self._held.pop(before, None)
                case machine.Check():
                    checked = machine.Checked(self._subject.model.digest())
                    todo.extendleft(reversed(self._replica.handle(checked, self._policy.clock())))
                case machine.Fetch(at_least):
                    self._stop_fetching()
                    self._fetch = self._run.fetch(at_least, self.limit, FETCH_SECONDS, wait=False)
                case machine.Load():
                    self._load()
                case machine.Meet():
                    self._meet(wait)
                case machine.StepAlone():
                    self._step_alone()
        self._whole = self.id
        if self.reason != self._told:
            self._told = self.reason
            log.info("run %s: %s", self._run.name, self.reason)
            self._run.tell("training", self.reason)

    def _meet(self, wait: bool) -> None:
        if self.in_step and self._pending is None:
            if not self._run.accumulated:
                # Just come into step it misses no mean for that; beside a single giver it has to weigh something.
                self._run.accumulate(dict.fromkeys(self._subject.tensors), machine.ATTENDANCE)
            self._start(self._policy.timeout)
            if wait:
                self.collect()

    def _mean(self) -> Mean:
        return Mean(self._run.mean, dict(self._subject.buffers))

    def _apply(self, mean: Mean) -> None:
        self._own = None  # Gradients of what it held before.
        with self._changing():
            with torch.no_grad():
                for name, buffer in self._subject.buffers.items():
                    buffer.copy_(mean.buffers[name])
            self._subject.update(mean.values)
            self._subject.model.settle()

    def _step_alone(self) -> None:
        self.collect()
        own, self._own = self._run.take(), self._own
        if own is not None and self._own is not None:
            own.merge(self._own)
        own, self._own = own or self._own, None
        if own is None or own.weight == 0:
            return
        mean = _mean_of(own, self._subject.tensors)
        with self._changing():
            self._subject.update(mean)
            self._subject.model.settle()
        self._do(self._replica.handle(machine.SteppedAlone(digest(mean)), self._policy.clock()))
        self.last = Outcome(ok=False, reason=self.reason, run=self._run.name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """What is in memory is no state at all until it is done; whoever catches an error and goes on must not claim
        one."""
        self._whole = None
        try:
            yield
        except BaseException:
            self._replica.handle(machine.Interrupted(), self._policy.clock())
            self._held.clear()
            raise

    def _offer(self, wanted: int | None) -> None:
        """Serve the state that is wanted: two copies of it in memory, the image and what the daemon shares of it; the
        first is dropped at once."""
        if wanted is None or self._offered >= wanted or self.id.epoch < wanted or self._replica.claim is None:
            return
        self._offered = self.id.epoch
        try:
            self._run.offer(self.id, self.image().numpy().data)
        except (ImageError, Refused) as error:  # Others may have the memory for it.
            log.warning("run %s: no snapshot is offered: %s", self._run.name, error)

    def _stop_fetching(self) -> None:
        fetching, self._fetch = self._fetch, None
        if fetching is not None:
            fetching.cancel()

    def _look_for_image(self) -> None:
        if self._fetch is None or not self._fetch.done():
            return
        fetching, self._fetch = self._fetch, None
        try:
            fetched = fetching.result()
            event: machine.Event = machine.FetchFailed(fetched.reason)
            if fetched.ok and fetched.image is not None:
                self._image = self._subject.state.read(_bytes(fetched.image))
                if self._image.id != fetched.state:
                    raise ImageError(f"donors offered {fetched.state}, the image says {self._image.id}")
                event = machine.ImageFetched(self._image.id)
        except (ImageError, Refused) as error:  # Another donor, or another moment, may have a better one.
            event = machine.FetchFailed(str(error))
        self._do(self._replica.handle(event, self._policy.clock()))
        self._image = None
        if self.in_step:
            self._own = None  # Gradients of what it held before.

    def _load(self) -> None:
        assert self._image is not None, "it was fetched"
        with self._changing():
            self._image.load()


def affordable(size: int, available: int) -> int:
    """How many means of `size` bytes to keep at most where so many bytes are available."""
    return max(min(int(available * HELD_MEMORY) // max(size, 1), machine.HELD_MEANS), LEAST_HELD)


def crowd_told(peers: int, most: int) -> str:
    """What is wrong with so many, one line."""
    return (
        f"this run has {peers} peers and groups of at most {most}: they cannot hold one state; "
        f"join with group_size >= {peers}"
    )


def _mean_of(accumulator: Accumulator, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mean = {
        name: torch.empty(one.shape, dtype=torch.float32, device=one.device) for name, one in like.items()
    }
    accumulator.mean_into(mean)
    return mean


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _bytes(image: torch.Tensor | memoryview) -> torch.Tensor:
    return image if isinstance(image, torch.Tensor) else torch.frombuffer(image, dtype=torch.uint8)
