"""Time federated rounds of real daemons beside `run.average`, when all drawn peers end their training at once.

Both run on the same daemons, in turns, with the same values and codec, so that whatever else the machine does hits both
alike. A federated round is timed from the end of the last training until the slowest peer holds the new model. `step`
is the time until all calls of `step` have returned. `closed` is the time until the group has closed, however long the
grace. `begin` is the time from the calls of `step` until the last training begins: each peer first offers the state to
newcomers. An average is timed from the last call to the last return.

    scripts/bench_federated.py                          # 8 daemons, 1M values, int8
    scripts/bench_federated.py --peers 4 --values 100000 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from bench_load import Bystanders, end_cleanly_when_terminated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from e2e.learners import daemons
from e2e.swarm import DaemonProcess, Swarm
from equipoise.averaging.outcome import Outcome
from equipoise.peer import connect
from equipoise.peer.training import Federated, Record, Task

START_SECONDS = 60.0

WARM = 2
"""Turns that are dropped: connections are opened, and memory is touched for the first time."""

MEASURED = {
    "average": "average began",
    "begin": "step began",
    "closed": "round began",
    "round": "round began",
    "step": "round began",
}
"""Each measured span, by its end, and its beginning: from the last peer's to the last peer's."""


class Bench:
    """Threads that train on daemons, and what they measure.

    Attributes:
        times: Seconds by what was measured, of each turn.
    """

    def __init__(self, places: list[DaemonProcess], values: int, turns: int, strategy: str) -> None:
        self._places, self._values, self._turns = places, values, turns + WARM
        self._strategy = f"federated:available={len(places)},{strategy}"
        self._together = threading.Barrier(len(places))
        self._measured: list[list[dict[str, float]]] = [[] for _ in places]
        self.times: dict[str, list[float]] = {}

    def run(self) -> None:
        """Make all turns.

        Raises:
            SystemExit: A round failed, or had not all peers.
        """
        with ThreadPoolExecutor(len(self._places)) as pool:
            for end in [pool.submit(self._work, index) for index in range(len(self._places))]:
                end.result()
        for rows in list(zip(*self._measured, strict=True))[WARM:]:
            for name, since in MEASURED.items():
                took = max(row[name] for row in rows) - max(row[since] for row in rows)
                self.times.setdefault(name, []).append(took)

    def _work(self, index: int) -> None:
        try:
            with connect(self._places[index].home) as peer:
                noise = torch.randn(self._values, generator=torch.Generator().manual_seed(index))
                plain, model = {"values": torch.zeros(self._values)}, {"values": torch.zeros(self._values)}
                averaged = peer.join("average", plain, codec="int8")
                with peer.join("federated", model, strategy=self._strategy, codec="int8") as run:
                    row: dict[str, float] = {}

                    def fit(task: Task) -> tuple[float, dict[str, float]]:
                        row["begin"] = time.time()
                        model["values"].add_(noise, alpha=0.01)
                        self._together.wait(START_SECONDS)
                        row["round began"] = time.time()
                        return 1.0, {"loss": 0.0}

                    averaged.wait_for(len(self._places) - 1)
                    trained = Federated(run, fit, wait_for=len(self._places) - 1, rounds=self._turns)
                    for _ in range(self._turns):
                        plain["values"].copy_(noise)
                        self._together.wait(START_SECONDS)
                        row["average began"] = time.time()
                        outcome = averaged.average(timeout=START_SECONDS)
                        row["average"] = time.time()
                        self._require(outcome)
                        self._together.wait(START_SECONDS)
                        row["step began"] = time.time()
                        record = trained.step()
                        row["step"] = time.time()
                        row["round"] = row["step began"] + record.seconds
                        self._require(record)
                        last = trained.member.last
                        assert last is not None, "the round has just ended"
                        row["closed"] = last.started + last.seconds["matchmaking"]
                        self._measured[index].append(dict(row))
        except BaseException:
            self._together.abort()
            raise

    def _require(self, ended: Outcome | Record) -> None:
        if not ended.ok or len(ended.contributors) < len(self._places):
            raise SystemExit(f"expected a round of all {len(self._places)}, got {ended}")


@contextmanager
def swarm_of(peers: int) -> Iterator[list[DaemonProcess]]:
    with tempfile.TemporaryDirectory(prefix="bench-federated-") as folder:
        swarm = Swarm(Path(folder))
        try:
            yield daemons(swarm, peers)
        finally:
            swarm.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=8, help="daemons (%(default)s)")
    parser.add_argument("--values", type=int, default=1_000_000, help="fp32 values (%(default)s)")
    parser.add_argument("--turns", type=int, default=20, help="rounds of each kind (%(default)s)")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    end_cleanly_when_terminated()
    torch.set_num_threads(1)
    with swarm_of(args.peers) as places:
        bench = Bench(places, args.values, args.turns, f"grace={args.grace}")
        others = Bystanders()
        bench.run()
        cores = others.cores()
    figures: dict[str, dict[str, float]] = {}
    for name, times in bench.times.items():
        figures[name] = {
            "min": round(1e3 * min(times), 1),
            "median": round(1e3 * statistics.median(times), 1),
        }
    for name in ("round", "step"):
        figures[name]["x"] = round(figures[name]["median"] / figures["average"]["median"], 2)
        figures[name]["x_min"] = round(figures[name]["min"] / figures["average"]["min"], 2)
    if args.json:
        print(json.dumps({**figures, "bystanders": round(cores, 2)}))
        return 0
    print(f"{args.peers} daemons, {args.values} values, int8; others kept {cores:.1f} cores busy")
    for name, one in figures.items():
        ratio = f"  {one['x']:.2f}x run.average ({one['x_min']:.2f}x of the least)" if "x" in one else ""
        print(f"{name:8} {one['min']:8.1f} ms least {one['median']:8.1f} ms median{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
