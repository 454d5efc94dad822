"""How many steps a second the fast trainers of a swarm take, where two are slow: alone, with gossip, with all-reduce.

Real daemons on loopback, a trainer in a thread for each. A step computes the gradient of a small model and then sleeps,
as a trainer does whose GPU computes: so what averaging costs the loop is seen, not that daemons share the cores.

    scripts/bench_gossip.py                  # 8 trainers, two of them 5 times slower, 10 s of each
    scripts/bench_gossip.py --peers 4 --seconds 5 --json

Printed are steps a second of the fast trainers, the least and the median over turns, and the ratio to those alone. The
exit status is 1 if trainers that gossip take less than 95 % of the steps of those alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bench_load import end_cleanly_when_terminated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from e2e.learners import daemons
from e2e.swarm import DaemonProcess, Swarm
from equipoise.peer import Run, connect
from equipoise.peer.training import Gossip, LocalSGD

SLOW = 2
SLOWER = 5.0
START_SECONDS = 60.0

LEAST_RATIO = 0.95
"""Least steps a second of trainers that gossip, as a share of those alone."""

Averaging = Callable[[Run], contextlib.AbstractContextManager[object]]


def allreduce(run: Run, every: int, company: int) -> contextlib.AbstractContextManager[object]:
    """Local steps, and a round of all every so many."""
    return LocalSGD(run, every=every, wait_for=company)


def gossip(run: Run, every: int, company: int) -> contextlib.AbstractContextManager[object]:
    """Local steps, and an exchange with some other peer every so many."""
    return Gossip(run, every=every, wait_for=company)


WAYS = {"alone": None, "gossip": gossip, "allreduce": allreduce}


def train(args: argparse.Namespace, way: str, places: list[DaemonProcess], turn: int) -> list[float]:
    """Steps a second of the fast trainers."""
    together, over = threading.Barrier(args.peers), threading.Event()

    def one(index: int) -> float:
        torch.manual_seed(index)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        sgd, steps = torch.optim.SGD(model.parameters(), lr=0.01), 0
        sleep = args.step_ms / 1000 * (SLOWER if index < SLOW else 1.0)
        with contextlib.ExitStack() as stack:
            make = WAYS[way]
            if make is not None:
                peer = stack.enter_context(connect(places[index].home))
                run = stack.enter_context(peer.join(f"{way}{turn}", model, strategy=way, codec="fp16"))
                stack.enter_context(make(run, args.every, args.peers - 1))
            together.wait(START_SECONDS)
            began = time.monotonic()
            while time.monotonic() < began + args.seconds:
                sgd.zero_grad()
                model(torch.randn(32, 64)).square().mean().backward()
                sgd.step()
                steps += 1
                over.wait(sleep)
            return steps / (time.monotonic() - began)

    with ThreadPoolExecutor(args.peers) as pool:
        return list(pool.map(one, range(args.peers)))[SLOW:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=8, help="trainers, two of them slow (8)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each way and turn (10)")
    parser.add_argument("--turns", type=int, default=3, help="(3)")
    parser.add_argument("--every", type=int, default=10, help="steps between exchanges (10)")
    parser.add_argument("--step-ms", type=float, default=40.0, help="a fast trainer's step sleeps (40)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.peers <= SLOW:
        parser.error(f"expected more than {SLOW} peers, got {args.peers}")
    end_cleanly_when_terminated()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-gossip-") as folder:
        swarm = Swarm(Path(folder))
        try:
            places = daemons(swarm, args.peers)
            found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for turn in range(args.turns):
                for way, turns in found.items():
                    turns.append(train(args, way, places, turn))
        finally:
            swarm.close()
    alone = statistics.median(rate for turn in found["alone"] for rate in turn)
    figures = {
        way: {
            "least": round(min(min(turn) for turn in turns), 2),
            "median": round(median := statistics.median(rate for turn in turns for rate in turn), 2),
            "x": round(median / alone, 3),
        }
        for way, turns in found.items()
    }
    if args.json:
        print(json.dumps(figures))
    else:
        for way, one in figures.items():
            print(f"{way:10} {one['least']:8.2f} least {one['median']:8.2f} median  {one['x']:.3f} x alone")
    if figures["gossip"]["x"] < LEAST_RATIO:
        print(f"expected gossip to take at least {LEAST_RATIO} x the steps of those alone", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
