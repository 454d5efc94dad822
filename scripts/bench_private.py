"""What a private swarm costs beside an open one.

    .venv/bin/python scripts/bench_private.py --peers 2 4

Daemons of both swarms run at once and take turns, round by round and start by start, so that the machine's other work
falls on both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_daemons import START_SECONDS, start_daemons
from bench_start import cost

from equipoise.dht.admission import Link
from equipoise.dht.membership import Membership
from equipoise.peer import connect
from equipoise.peer.demo.swarm import Family

NAME = "bench"
SEED = bytes([5]) * 32


def join(homes: list[Path]) -> None:
    """Make the homes members of one private swarm, whose daemons need no flag for it."""
    founder = Membership.create(homes[0], NAME)
    line = founder.invite(Link(bytes(32), "trainer", int(time.time()) + 86_400), SEED, ()).line
    for home in homes[1:]:
        Membership.redeem(home, line, time.time())
    for home in homes:
        (home / "config.toml").write_text(f'swarm = "{NAME}"\n')


class Fleet:
    """Daemons of one swarm on loopback, in rounds of one run; ended with the context."""

    def __init__(self, folder: Path, count: int, values: int, private: bool) -> None:
        self.homes = [folder / f"{'private' if private else 'open'}{number}" for number in range(count)]
        if private:
            join(self.homes)
        self._stack = contextlib.ExitStack()
        family = self._stack.enter_context(Family(folder))
        start_daemons(family, self.homes)
        self.clients = [self._stack.enter_context(connect(home)) for home in self.homes]
        self.runs = [client.join("bench", {"w": torch.ones(values)}, codec="fp32") for client in self.clients]
        self._pool = self._stack.enter_context(ThreadPoolExecutor(count))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def round(self) -> list[Any]:
        """Average once; return the outcomes."""
        return list(self._pool.map(lambda run: run.average(timeout=START_SECONDS), self.runs))

    def cpu(self) -> tuple[float, float]:
        """Return the processor seconds that all daemons, and all their p2pds, have used."""
        used = [0.0, 0.0]
        for client in self.clients:
            daemon = psutil.Process(client.status().pid)
            for place, processes in enumerate(([daemon], daemon.children())):
                used[place] += sum(sum(one.cpu_times()[:2]) for one in processes)
        return used[0], used[1]


def compare(count: int, values: int, rounds: int, folder: Path) -> None:
    """Print what rounds cost in both swarms: seconds of all calls, of the search for the group, and of processors."""
    with Fleet(folder, count, values, False) as one, Fleet(folder, count, values, True) as other:
        took: dict[str, dict[str, list[float]]] = {"open": defaultdict(list), "private": defaultdict(list)}
        for number in range(rounds):
            turns = [("open", one), ("private", other)]
            for name, fleet in turns if number % 2 else turns[::-1]:
                used, began = sum(fleet.cpu()), time.perf_counter()
                outcomes = fleet.round()
                lasted = time.perf_counter() - began
                if number > 2 and all(outcome.ok for outcome in outcomes):
                    took[name]["call"].append(lasted)
                    took[name]["matchmaking"].append(min(each.seconds["matchmaking"] for each in outcomes))
                    took[name]["processors"].append(sum(fleet.cpu()) - used)
        for what in ("call", "matchmaking", "processors"):
            for name, found in took.items():
                least, middle, mean = (
                    min(found[what]),
                    statistics.median(found[what]),
                    statistics.fmean(found[what]),
                )
                told = f"{least * 1e3:.1f} / {middle * 1e3:.1f} / {mean * 1e3:.1f} ms"
                print(f"{count} peers, {values} values, {what}, {name}: {told} (min / median / mean)")


def starts(times: int, folder: Path) -> None:
    """Print what it costs to start a daemon of both swarms."""
    homes = {name: folder / f"start {name}" for name in ("open", "private")}
    join([homes["private"]])
    found: dict[str, list[float]] = {name: [] for name in homes}
    for _ in range(times):
        for name, home in homes.items():
            found[name].append(cost(Path(__file__).resolve().parents[1], home)[0])
    for name, seconds in found.items():
        print(
            f"start, {name}: {min(seconds):.2f} / {statistics.median(seconds):.2f} s of processor time (min / median)"
        )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--peers", type=int, nargs="*", default=[2, 4], help="(%(default)s)")
    flags.add_argument("--values", type=int, nargs="*", default=[1000, 2**20], help="(%(default)s)")
    flags.add_argument("--rounds", type=int, default=60, help="(%(default)s)")
    flags.add_argument("--starts", type=int, default=5, help="(%(default)s)")
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        starts(given.starts, Path(folder))
        for count in given.peers:
            for values in given.values:
                with tempfile.TemporaryDirectory() as place:
                    compare(count, values, given.rounds, Path(place))


if __name__ == "__main__":
    main()
