"""One trainer of `train_text.py`, a process of its own: it runs one of the loops and says what came of it.

The loops know nothing of being measured. What is known of them is learnt from outside: their batches are counted as
they are taken, their optimizers' steps through torch's hooks, and rounds through a second connection to the daemon.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from text_data import Batch, Text, Windows, evaluation_batches, joined, piece, read_text
from text_loops import diloco, plain, target_batch
from text_model import TextModel, held_out_loss
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from equipoise.peer import Client, Outcome, connect

ALONE, WHOLE, SYNC, DILOCO = "alone", "whole", "sync", "diloco"

METHODS = {
    ALONE: "one peer alone, with its own batches",
    WHOLE: "one process, with the batches of all",
    SYNC: "peers, target batches",
    DILOCO: "peers, DiLoCo",
}

EVALUATION_BATCHES, EVALUATION_SAMPLES = 16, 32
"""Of 64 characters each: a standard error of about .01 nats, and the same windows for all."""

MEET_SECONDS = 60.0
"""The others are starting; sixteen processes that import torch on two cores take half of it."""

SEEDS = 1000
"""Apart, so that no two peers of any two runs draw alike."""

LOOK_SECONDS = 0.1

ROUNDS_IN_A_STEP = 8
"""More than can end between two steps of a loop."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, alike for all trainers.

    Attributes:
        peers: Number of peers, each with its own piece of the text.
        steps: Steps of AdamW that each model makes.
        samples: Windows in a peer's batch.
        length: Characters in a window.
        every: Steps between two of DiLoCo's rounds.
        seed: Which windows are drawn.
    """

    peers: int = 4
    steps: int = 400
    samples: int = 8
    length: int = 64
    every: int = 50
    seed: int = 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer does: which of `METHODS`, and which peer it is."""

    options: TextOptions
    method: str
    index: int = 0


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of it.

    Attributes:
        loss: On the held-out text, nats per character.
        tokens: Characters that it has computed gradients of.
        seconds: From the first batch to the end of the last step.
        waiting: Seconds of those that the loop waited for averaging.
        rounds: Rounds that succeeded.
        failed: Rounds that did not.
        bytes_sent: By its daemon in all of them.
        values: Number of parameters.
        digest: SHA-256 in hex of the parameters.
    """

    loss: float
    tokens: int
    seconds: float
    waiting: float
    rounds: int
    failed: int
    bytes_sent: int
    values: int
    digest: str


class Clock:
    """Times the steps of optimizers through torch's hooks for all of them, then calls `after`."""

    def __init__(self, after: Callable[[], None]) -> None:
        self.stepping = 0.0
        self.last = 0.0
        self._after = after
        self._updates: list[float] = []
        self._starts: list[float] = []

    def start(self) -> None:
        """Begin; torch calls hooks in the order of their coming, and what a step ends with is to count as well."""
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._end)

    @property
    def waiting(self) -> float:
        """Seconds in `optimizer.step()` beyond AdamW's arithmetic, which takes what it takes in the median step."""
        own = statistics.median(self._updates) * len(self._updates) if self._updates else 0.0
        return max(0.0, self.stepping - own)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._starts.append(time.perf_counter())

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.last = time.perf_counter()
        seconds = self.last - self._starts.pop()
        if isinstance(optimizer, torch.optim.AdamW):
            self._updates.append(seconds)
        if not self._starts:
            self.stepping += seconds
            self._after()


class Watcher:
    """Sees, through a connection of its own, who else is there and what rounds come to."""

    def __init__(self, peer: Client) -> None:
        self._peer = peer
        self._began = time.time()
        self._outcomes: dict[tuple[str, int, float], Outcome] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        """What the rounds seen so far came to."""
        return list(self._outcomes.values())

    def meet(self, others: int) -> None:
        """Wait until `others` have joined the run.

        Raises:
            TimeoutError: They have not.
        """
        deadline = time.monotonic() + MEET_SECONDS
        while len({row.peer for row in self._peer.peers() if not row.me and row.same_spec}) < others:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the other {others} peers were not there in {MEET_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Take note of the rounds that have ended; the daemon also remembers those of the scripts before."""
        for outcome in self._peer.rounds(ROUNDS_IN_A_STEP):
            if outcome.started >= self._began:
                self._outcomes[outcome.run, outcome.round, outcome.started] = outcome


class Measured(Iterator[Batch]):
    """The batches of a loop, which begins when all are there."""

    def __init__(self, batches: Iterator[Batch], watcher: Watcher | None, others: int) -> None:
        self.clock = Clock(watcher.look if watcher else lambda: None)
        self.taken = 0
        self._batches = batches
        self._watcher = watcher
        self._others = others
        self._began = 0.0

    @property
    def seconds(self) -> float:
        """From the first batch to the end of the last step."""
        return self.clock.last - self._began

    def __next__(self) -> Batch:
        if self.taken == 0:
            if self._watcher is not None:
                self._watcher.meet(self._others)
            self.clock.start()
            self._began = time.perf_counter()
        self.taken += 1
        return next(self._batches)


def train(job: Job, text: Text, model: TextModel, watcher: Watcher | None) -> Measured:
    """Run the loop that `job` names, on the batches that are its."""
    options = job.options
    pieces = range(options.peers) if job.method == WHOLE else [job.index]
    streams = [
        Windows(
            piece(text.training, index, options.peers),
            options.samples,
            options.length,
            SEEDS * options.seed + index,
        )
        for index in pieces
    ]
    batches = (joined([next(stream) for stream in streams]) for _ in itertools.count())
    measured = Measured(batches, watcher, options.peers - 1)
    if job.method == SYNC:
        target_batch(model, measured, options.steps, options.samples, options.samples * options.peers)
    elif job.method == DILOCO:
        diloco(model, measured, options.steps, options.every)
    else:
        plain(model, measured, options.steps)
    return measured


def main() -> None:
    """Do as told by the arguments HOME JOB, the job in JSON, and print what came of it as one line of JSON."""
    os.environ["EQUIPOISE_HOME"], job = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Job)
    torch.set_num_threads(1)
    options, text = job.options, read_text()
    model = TextModel(length=options.length)
    with contextlib.ExitStack() as stack:
        watcher = Watcher(stack.enter_context(connect())) if job.method in (SYNC, DILOCO) else None
        measured = train(job, text, model, watcher)
    judges = evaluation_batches(text, EVALUATION_BATCHES, EVALUATION_SAMPLES, options.length)
    outcomes = watcher.outcomes if watcher is not None else []
    trained = Trained(
        loss=held_out_loss(model, judges),
        tokens=measured.taken
        * options.samples
        * options.length
        * (options.peers if job.method == WHOLE else 1),
        seconds=measured.seconds,
        waiting=measured.clock.waiting,
        rounds=sum(outcome.ok for outcome in outcomes),
        failed=sum(not outcome.ok for outcome in outcomes),
        bytes_sent=sum(outcome.bytes_sent for outcome in outcomes),
        values=sum(parameter.numel() for parameter in model.parameters()),
        digest=hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest(),
    )
    print(msgspec.json.encode(trained).decode(), flush=True)


if __name__ == "__main__":
    main()
