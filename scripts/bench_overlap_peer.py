"""One peer of `bench_overlap.py`: trains in three ways, in turns, and counts what its steps take."""

from __future__ import annotations

import sys
import time

import msgspec
import psutil
import torch
from bench_load import cpu_seconds
from text_data import Windows, piece, read_text
from text_model import TextModel

from equipoise.peer import Client, Run, connect
from equipoise.peer.training import SwarmOptimizer

WITHOUT, WAITING, DELAYED = "without", "waiting", "delayed"

WARM_STEPS = 2
"""Dropped of each turn: caches are cold, and peers may be half a step apart."""

LEARNING_RATE = 1e-3
MEET_SECONDS = 60.0
LOOK_SECONDS = 0.1


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What all peers do.

    Attributes:
        peers: Number of peers.
        steps: Steps that are timed, in each turn.
        turns: Turns of the three ways of training.
        width: Of the transformer: its size grows with the square.
        samples: Windows in a batch: what a step computes grows with it, what a round sends does not.
        codec: How values travel.
        accelerator: Seconds that a step waits for, as for a device that computes meanwhile; 0: it computes itself.
    """

    peers: int = 2
    steps: int = 10
    turns: int = 3
    width: int = 256
    samples: int = 16
    codec: str = "int8"
    accelerator: float = 0.0


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a processor that a step takes.

    Attributes:
        trainer: By the thread that trains.
        daemon: By this peer's daemon, without p2pd.
        p2pd: By that.
        kernel: By the kernel on behalf of nobody, as for packets that come in: of the whole machine, for all peers.
    """

    trainer: float
    daemon: float
    p2pd: float
    kernel: float


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer measured.

    Attributes:
        steps: By way of training, seconds of each step.
        rounds: By way of training, seconds of each round, matchmaking included.
        uses: By way of training, what a step takes, of each turn.
        values: Number of parameters.
    """

    steps: dict[str, list[float]]
    rounds: dict[str, list[float]]
    uses: dict[str, list[Use]]
    values: int


class Meter:
    """Counts what this peer uses of the processor."""

    def __init__(self, daemon: int) -> None:
        self._daemon = psutil.Process(daemon)

    def read(self) -> dict[str, float]:
        """Seconds so far, by the fields of `Use`."""
        return {
            "trainer": time.thread_time(),
            "daemon": cpu_seconds([self._daemon]),
            "p2pd": cpu_seconds(self._daemon.children(recursive=True)),
            "kernel": float(psutil.cpu_times().softirq),
        }


class Way:
    """One way of training, with a model of its own."""

    def __init__(self, peer: Client, name: str, work: Work, index: int) -> None:
        self.name = name
        self.steps: list[float] = []
        self.rounds: list[float] = []
        self.uses: list[Use] = []
        self.model = TextModel(width=work.width, layers=4)
        self._meter = Meter(peer.status().pid)
        self._waited = work.accelerator
        computed = 1 if work.accelerator else work.samples
        self._batches = Windows(piece(read_text().training, index, work.peers), computed, 64, index)
        plain = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._optimizer: torch.optim.Optimizer = plain
        if name != WITHOUT:
            run: Run = peer.join(name, self.model, codec=work.codec)
            self._optimizer = run.optimizer(
                plain,
                target_batch_size=work.samples * work.peers,
                batch_size=work.samples,
                delay=name == DELAYED,
            )
            meet(peer, name, work.peers - 1)

    def train(self, steps: int) -> None:
        """Make steps and time them."""
        for _ in range(WARM_STEPS):
            self._step()
        before = self._meter.read()
        for _ in range(steps):
            began = time.perf_counter()
            self._step()
            self.steps.append(time.perf_counter() - began)
            self._note_round()
        after = self._meter.read()
        self.uses.append(Use(**{name: (after[name] - before[name]) / steps for name in after}))

    def _step(self) -> None:
        until = time.perf_counter() + self._waited
        self._optimizer.zero_grad()
        self.model(next(self._batches)).backward()
        time.sleep(max(0.0, until - time.perf_counter()))
        self._optimizer.step()

    def _note_round(self) -> None:
        last = self._optimizer.last if isinstance(self._optimizer, SwarmOptimizer) else None
        if last is not None and last.ok:
            self.rounds.append(last.seconds["total"])


def meet(peer: Client, run: str, others: int) -> None:
    """Wait until `others` have joined.

    Raises:
        TimeoutError: They have not.
    """
    deadline = time.monotonic() + MEET_SECONDS
    while len({row.peer for row in peer.peers() if row.run == run and not row.me}) < others:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other {others} peers were not there in {MEET_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)


def main() -> None:
    """Do as HOME INDEX WORK say, print `Times` as a line of JSON, stay until standard input ends."""
    home, index, work = sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Work)
    torch.set_num_threads(1)
    with connect(home) as peer:
        ways = [Way(peer, name, work, index) for name in (WITHOUT, WAITING, DELAYED)]
        for _ in range(work.turns):
            for way in ways:
                way.train(work.steps)
    times = Times(
        steps={way.name: way.steps for way in ways},
        rounds={way.name: way.rounds for way in ways},
        uses={way.name: way.uses for way in ways},
        values=sum(parameter.numel() for parameter in ways[0].model.parameters()),
    )
    print(msgspec.json.encode(times).decode(), flush=True)
    sys.stdin.read()  # What it has used of the processor is still to be asked for.


if __name__ == "__main__":
    main()
