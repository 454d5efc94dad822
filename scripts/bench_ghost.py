"""What the record of a peer that never answers costs one trainer, and two: epochs with and without it.

    scripts/bench_ghost.py --seconds 15 --times 3

A ghost is a daemon that has joined the run, renews its record in the directory, and says nothing to anybody. Trainers
train in turn without one and beside one, each time in a run of its own, so that neither has warmer daemons or a busier
machine. Exits 1 if the median of the epochs beside it is less than 90 % of the median without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import e2e.swarm  # noqa: E402 - of the folder that was just added
from e2e.swarm import DaemonProcess, Swarm  # noqa: E402

LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0"]

LEAST = 0.9
"""Least part of the epochs of before."""

WARM_SECONDS = 3.0
"""Before epochs are counted: time in which trainers meet, or find that nobody is there."""

BATCH = 32

GHOST = """
import sys, time, torch
from equipoise.peer import connect
model = torch.nn.Linear(64, 10)
with connect(sys.argv[1]) as peer, peer.join(sys.argv[3], model) as run:
    run.optimizer(torch.optim.AdamW(model.parameters()), target_batch_size=float(sys.argv[2]), batch_size=32)
    time.sleep(600)
"""


def silent(swarm: Swarm, address: str) -> DaemonProcess:
    """A daemon that says nothing to anybody."""
    plain = e2e.swarm.CLI
    e2e.swarm.CLI = (*plain[:-1], "from e2e.ghost import main; main()")
    os.environ["PYTHONPATH"] = f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    try:
        home = swarm.folder / "ghost"
        home.mkdir(mode=0o700)
        (home / "silent").touch()
        return swarm.daemon("ghost", join=[address], args=LISTEN)
    finally:
        e2e.swarm.CLI = plain


def epochs(home: Path, name: str, peers: int, seconds: float) -> int:
    """Epochs of that run that a trainer makes in some seconds, with as many others as there are beside the ghost."""
    import torch

    from equipoise.peer import connect

    model = torch.nn.Linear(64, 10)
    with connect(home) as peer, peer.join(name, model) as run:
        optimizer = run.optimizer(
            torch.optim.AdamW(model.parameters()),
            target_batch_size=BATCH * peers,
            batch_size=BATCH,
            patience=0.0 if peers == 1 else 60.0,
            wait_for=peers - 1,
        )

        def step_until(end: float) -> None:
            while time.monotonic() < end:
                optimizer.zero_grad()
                model(torch.randn(BATCH, 64)).square().mean().backward()
                optimizer.step()

        step_until(time.monotonic() + WARM_SECONDS)
        before = optimizer.epoch
        step_until(time.monotonic() + seconds)
        return optimizer.epoch - before


def measured(peers: int, seconds: float, times: int) -> tuple[list[int], list[int]]:
    """The fewest epochs of any trainer, without the ghost and beside it, each so many times."""
    swarm = Swarm(Path(tempfile.mkdtemp(prefix="bench-ghost-")))
    try:
        daemons = swarm.daemons(peers, args=LISTEN)
        ghost = silent(swarm, daemons[0].address)

        def train(name: str) -> int:
            with ThreadPoolExecutor(peers) as pool:
                return min(pool.map(lambda daemon: epochs(daemon.home, name, peers, seconds), daemons))

        def beside(name: str) -> int:
            script = swarm.script(GHOST, str(ghost.home), str(BATCH * peers), name)
            listed = f"{name}/step"
            e2e.swarm.eventually(lambda: listed in ghost_runs(ghost) or not script.running, "the ghost", 60)
            if not script.running:
                raise SystemExit(f"the ghost ended: {script.errors[-1000:]}")
            found = train(name)
            script.kill()
            return found

        pairs = [(train(f"plain{index}"), beside(f"ghost{index}")) for index in range(times)]
        return [plain for plain, _ in pairs], [found for _, found in pairs]
    finally:
        swarm.close()
        subprocess.run(["rm", "-rf", str(swarm.folder)], check=False)


def ghost_runs(ghost: DaemonProcess) -> str:
    """The rows of runs that the ghost takes part in, as text."""
    return str(ghost.json("peers"))


def main() -> int:
    """Measure one trainer, then two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="that are counted, each time")
    parser.add_argument("--times", type=int, default=3, help="without and with the ghost, in turn")
    asked = parser.parse_args()
    worst = 1.0
    for peers in (1, 2):
        plain, haunted = measured(peers, asked.seconds, asked.times)
        before, beside = statistics.median(plain), statistics.median(haunted)
        part = beside / max(before, 1)
        worst = min(worst, part)
        print(
            f"{peers} trainers: {before:g} epochs in {asked.seconds:g} s {plain}, "
            f"{beside:g} beside a ghost {haunted}: {part:.0%}"
        )
    return 0 if worst >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
