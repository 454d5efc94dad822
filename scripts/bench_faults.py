"""Time what SIGKILL or SIGSTOP of one of four real daemons in mid-round costs the survivors, and check their mean.

The figure is from the fault to the last survivor's outcome; every outcome is checked against float64 truth.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from e2e.fleet import Fleet, normal
from e2e.swarm import Swarm, eventually

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]

BOUND = 0.010
"""NRMSE of int8 over a group, on N(0, 1)."""


def trial(fault: str, members: int, values: int, victim: int, delay: float) -> tuple[float, int]:
    """Seconds from the fault to the last survivor's outcome, and how many contributors it names."""
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            with Fleet(swarm.daemons(members, args=LISTEN), normal(members, values), codec="int8") as fleet:
                warm = fleet.start([1.0] * members)
                assert all(pending.result().ok for pending in warm)
                for tensor, value in zip(fleet.tensors, fleet.values, strict=True):
                    tensor.copy_(value)
                pending = fleet.start([1.0 + index for index in range(members)])
                eventually(lambda: fleet.exchanging(victim), "the round to begin")
                time.sleep(delay)
                getattr(fleet.daemons[victim], fault)()
                began = time.monotonic()
                survivors = [member for member in range(members) if member != victim]
                with ThreadPoolExecutor(members) as pool:
                    outcomes = dict(
                        zip(survivors, pool.map(lambda m: pending[m].result(), survivors), strict=True)
                    )
                took = time.monotonic() - began
                fleet.check(outcomes, BOUND)
                fleet.daemons[victim].resume()
                return took, len(outcomes[survivors[0]].contributors)
        finally:
            swarm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5, help="of each fault")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--values", type=int, default=16_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    rows = []
    for fault in ("kill", "pause"):
        results = [
            trial(
                fault,
                options.members,
                options.values,
                chance.randrange(options.members),
                chance.uniform(0, 0.15),
            )
            for _ in range(options.trials)
        ]
        seconds = [took for took, _ in results]
        rows.append(
            {
                "fault": "SIGKILL" if fault == "kill" else "SIGSTOP",
                "trials": len(results),
                "min_s": min(seconds),
                "median_s": statistics.median(seconds),
                "max_s": max(seconds),
                "contributors": sorted(counted for _, counted in results),
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        figures = (
            f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print("  ".join(figures))


if __name__ == "__main__":
    main()
