"""Time how long real daemons on loopback take from the last one ready to the group closed, and how full groups are.

Each peer measures by its own clock how long it waited from ready to its group; the shortest wait in a group is that of
its last member to become ready, which is the figure. Rounds average one small tensor, so little else is going on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bench_daemons import START_SECONDS, start_daemons

from equipoise.averaging.outcome import Idle, Outcome
from equipoise.peer import connect
from equipoise.peer.demo.swarm import Family

ROUND_SECONDS = 30.0
STAGGER_SECONDS = 0.05
"""Peers become ready spread over this long, as trainers in step do."""

MIXING_ROUNDS = 2
"""After this many rounds the values are set apart again."""

Group = tuple[int, tuple[str, ...]]


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {START_SECONDS:g} s for {what}")
        time.sleep(0.1)


class Bench:
    """Daemons that average round after round in one run, and what their outcomes say."""

    def __init__(self, peers: int, group_size: int, rounds: int, seed: int) -> None:
        self._peers, self._group_size, self._rounds = peers, group_size, rounds
        self._random = random.Random(seed)
        self._barrier = threading.Barrier(peers)
        self._values = [torch.zeros(256) for _ in range(peers)]
        self._outcomes: list[list[Outcome]] = [[] for _ in range(peers)]
        self._spreads: list[float] = []
        self._ready = 0.0

    def run(self) -> dict[str, object]:
        """Start everything, average, end everything, and sum up."""
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, Family(Path(folder)) as family:
            began = time.monotonic()
            homes = [Path(folder) / f"peer{index}" for index in range(self._peers)]
            start_daemons(family, homes)
            self._ready = time.monotonic() - began
            with ThreadPoolExecutor(self._peers) as pool:
                for done in [pool.submit(self._average, index, home) for index, home in enumerate(homes)]:
                    done.result()
        return self._summary()

    def _average(self, index: int, home: Path) -> None:
        try:
            with connect(home=home) as peer:
                values = self._values[index]
                run = peer.join("bench", {"values": values}, group_size=self._group_size, codec="fp32")
                wait_for(lambda: run.state == Idle(self._peers - 1), "the daemons to have met")
                for number in range(self._rounds):
                    if number % MIXING_ROUNDS == 0:
                        values.fill_(float(index))
                    self._barrier.wait(START_SECONDS)
                    time.sleep(self._random.uniform(0, STAGGER_SECONDS))
                    self._outcomes[index].append(run.average(weight=1, timeout=ROUND_SECONDS))
                    self._barrier.wait(START_SECONDS)
                    if index == 0 and (number + 1) % MIXING_ROUNDS == 0:
                        self._spreads.append(self._spread())
                    self._barrier.wait(START_SECONDS)
        except BaseException:
            self._barrier.abort()
            raise

    def _spread(self) -> float:
        apart = statistics.pvariance(range(self._peers))
        return statistics.pvariance([float(values[0]) for values in self._values]) / apart

    def _summary(self) -> dict[str, object]:
        waits: dict[Group, list[float]] = defaultdict(list)
        failures = []
        for outcome in (outcome for outcomes in self._outcomes for outcome in outcomes):
            if outcome.group:
                waits[outcome.round, outcome.group].append(outcome.seconds["matchmaking"])
            if not outcome.ok:
                failures.append(outcome.reason)
        closing = [1e3 * min(each) for each in waits.values()] or [float("nan")]
        full = min(self._group_size, self._peers)
        return {
            "peers": self._peers,
            "group_size": self._group_size,
            "ready_s": round(self._ready, 1),
            "groups": len(waits),
            "median_ms": round(statistics.median(closing), 1),
            "min_ms": round(min(closing), 1),
            "max_ms": round(max(closing), 1),
            "full": round(sum(len(group) == full for _, group in waits) / max(len(waits), 1), 4),
            f"variance_left_after_{MIXING_ROUNDS}_rounds": round(statistics.median(self._spreads), 6),
            "failed": len(failures),
            "reasons": sorted(set(failures))[:5],
        }


def table(rows: list[dict[str, object]]) -> str:
    names = [name for name in rows[0] if name != "reasons"]
    lines = ["  ".join(names)]
    lines += ["  ".join(f"{row[name]!s:>{len(name)}}" for name in names) for row in rows]
    lines += [f"{row['peers']} peers: {reason}" for row in rows for reason in list(row["reasons"])]  # type: ignore[call-overload]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, nargs="*", default=[4, 8, 16], help="daemons (%(default)s)")
    parser.add_argument("--group-size", type=int, help="default: 4 for 16 peers, else all in one group")
    parser.add_argument("--rounds", type=int, default=40, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    options = parser.parse_args()
    rows = []
    for peers in options.peers:
        group_size = options.group_size or (4 if peers >= 16 else peers)
        rows.append(Bench(peers, group_size, options.rounds, options.seed).run())
    print(json.dumps(rows) if options.json else table(rows))


if __name__ == "__main__":
    main()
