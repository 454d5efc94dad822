"""One peer of `bench_overlap.py`: trains in several ways, in turns, and counts what its steps take."""

from __future__ import annotations

import contextlib
import sys
import time

import msgspec
import psutil
import torch
from bench_load import cpu_seconds
from text_data import Batch, Windows, piece, read_text
from text_model import TextModel

from equipoise.peer import Client, Run, connect
from equipoise.peer.training import DiLoCo, SwarmOptimizer

WITHOUT, WAITING, DELAYED, LOCAL = WAYS = "without", "waiting", "delayed", "local"

DEFAULT_WAYS = WITHOUT, WAITING, DELAYED

LOCAL_STEPS = 20
"""Steps between two exchanges of `LOCAL`."""

WARM_STEPS = 2
"""Dropped of each turn: caches are cold, and peers may be half a step apart."""

LEARNING_RATE = 1e-3


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What all peers do.

    Attributes:
        peers: Number of peers.
        steps: Steps that are timed, in each turn.
        turns: Turns of the ways of training.
        ways: The ways of training, of `WAYS`.
        device: Where the models are.
        width: Of the transformer: its size grows with the square.
        samples: Windows in a batch: what a step computes grows with it, what a round sends does not.
        codec: How values travel.
        accelerator: Seconds that a step waits for, as for a device that computes meanwhile; 0: it computes itself.
    """

    peers: int = 2
    steps: int = 10
    turns: int = 3
    ways: tuple[str, ...] = DEFAULT_WAYS
    device: str = "cpu"
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

    def __init__(self, peer: Client, name: str, work: Work, index: int, stack: contextlib.ExitStack) -> None:
        """`stack` ends it."""
        self.name = name
        self.steps: list[float] = []
        self.rounds: list[float] = []
        self.uses: list[Use] = []
        self.device = torch.device(work.device)
        self.model = TextModel(width=work.width, layers=4).to(self.device)
        self._meter = Meter(peer.status().pid)
        self._waited = work.accelerator
        computed = 1 if work.accelerator else work.samples
        self._batches = Windows(piece(read_text().training, index, work.peers), computed, 64, index)
        plain = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._optimizer: torch.optim.Optimizer = plain
        self.group: DiLoCo | None = None
        if name == WITHOUT:
            return
        run: Run = peer.join(name, self.model, codec=work.codec)
        if name == LOCAL:
            self.group = stack.enter_context(DiLoCo(run, every=LOCAL_STEPS, wait_for=work.peers - 1))
        else:
            self._optimizer = run.optimizer(
                plain,
                target_batch_size=work.samples * work.peers,
                batch_size=work.samples,
                delay=name == DELAYED,
                wait_for=work.peers - 1,
            )

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
        self.model(Batch(*(one.to(self.device) for one in next(self._batches)))).backward()
        time.sleep(max(0.0, until - time.perf_counter()))
        self._optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # The step was only queued.

    def _note_round(self) -> None:
        follows = self.group or self._optimizer
        last = follows.last if isinstance(follows, (SwarmOptimizer, DiLoCo)) else None
        if last is not None and last.ok:
            self.rounds.append(last.seconds["total"])


def main() -> None:
    """Do as HOME INDEX WORK say, print `Times` as a line of JSON, stay until standard input ends."""
    home, index, work = sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Work)
    torch.set_num_threads(1)
    with connect(home) as peer, contextlib.ExitStack() as stack:
        ways = [Way(peer, name, work, index, stack) for name in work.ways]
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
