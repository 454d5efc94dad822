"""`equipoise launch --resume`: everything is killed at a random moment, started again, and training goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from e2e.swarm import Swarm, eventually
from equipoise.peer.training.checkpoint_files import IMAGE_FILE

pytestmark = pytest.mark.slow

EVERY = 4

SCRIPT = """
import json, logging, sys, time
import torch
from equipoise.peer import connect
from equipoise.peer.training import Checkpoints

logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
width, batch = int(sys.argv[1]), float(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))
with connect() as peer:
    run = peer.join("resumed", model, codec="fp32")
    optimizer = run.optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        target_batch_size=batch,
        batch_size=8,
        patience=60.0,
        checkpoints=Checkpoints(every=4, keep=3),
    )
    print(json.dumps([optimizer.epoch, optimizer.id.lineage]), flush=True)
    while True:
        optimizer.zero_grad()
        inputs = torch.randn(8, 8)
        torch.nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        before = optimizer.epoch
        optimizer.step()
        if optimizer.epoch != before:
            print(json.dumps([optimizer.epoch, optimizer.id.lineage]), flush=True)
"""


class Peer:
    """A daemon and a training script, launched together on a home of their own."""

    def __init__(
        self, swarm: Swarm, home: Path, join: Sequence[str] = (), width: int = 16, resume: bool = False
    ) -> None:
        words = ["--listen", "/ip4/127.0.0.1/tcp/0", *(word for one in join for word in ("--join", one))]
        script = [sys.executable, "-c", SCRIPT, str(width), "16"]
        flags = ["--resume"] if resume else []
        self.home = home
        self.process = swarm.command("launch", *flags, "--home", str(home), *words, "--", *script)

    @property
    def address(self) -> str:
        """One that others can join; once it is there."""
        return next((line for line in self.process.errors.splitlines() if "/127.0.0.1/" in line), "").strip()

    @property
    def states(self) -> dict[int, str]:
        """Lineages by epoch, the one it began with included."""
        lines = self.process.output.splitlines(keepends=True)
        return dict(msgspec.json.decode(line, type=tuple[int, str]) for line in lines if line.endswith("\n"))

    def kill(self) -> None:
        """SIGKILL to the daemon, to p2pd and to the script."""
        family = [self.process.pid, *(one.pid for one in self.process.descendants())]
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        eventually(lambda: not any(map(psutil.pid_exists, family)), "the end of all of them")


def start(swarm: Swarm, homes: Sequence[Path], resume: bool = False) -> list[Peer]:
    first = Peer(swarm, homes[0], resume=resume)
    address = eventually(lambda: first.address, "the first daemon's address", 60)
    return [first, *(Peer(swarm, home, [address], resume=resume) for home in homes[1:])]


def shared(peers: Sequence[Peer]) -> dict[int, set[str]]:
    """The lineages of the epochs that all have been in."""
    states = [peer.states for peer in peers]
    return {epoch: {state[epoch] for state in states} for epoch in set.intersection(*map(set, states))}


def damage_newest(home: Path) -> None:
    """Truncate the checkpoint that got furthest."""
    newest = max((home / "checkpoints" / "resumed").glob("epoch-*"))
    os.truncate(newest / IMAGE_FILE, 1000)


def test_all_are_killed_and_go_on_from_their_checkpoints(swarm: Swarm) -> None:
    homes = [swarm.folder / "first", swarm.folder / "second"]
    moment = 2 * EVERY + random.Random(0).randrange(EVERY)
    peers = start(swarm, homes)
    eventually(lambda: all(max(one.states, default=0) >= moment for one in peers), f"epoch {moment}", 90)
    for peer in peers:
        peer.kill()
    reached = max(max(peer.states) for peer in peers)

    damage_newest(homes[1])
    again = start(swarm, homes, resume=True)
    eventually(lambda: max(shared(again), default=0) >= reached + 3, "all to go on together", 90)
    began = [min(peer.states) for peer in again]
    print(f"killed at epoch {reached}, resumed from {began}")
    assert began[0] >= reached - EVERY - 1  # That one more was being written.
    assert began[0] - 2 * EVERY <= began[1] <= began[0]  # One of them may have written one more.
    assert all(len(lineages) == 1 for lineages in shared(again).values())
    assert "is truncated: state.safetensors has 1000 bytes of" in again[1].process.errors
    told = json.loads(eventually(lambda: status(swarm, homes[0]), "the status"))["runs"][0]["told"]
    assert told["checkpoints"].startswith(("resumed from", "epoch "))
    assert told["training"]
    for peer in again:
        peer.kill()

    wider = Peer(swarm, homes[0], width=17, resume=True)
    assert wider.process.wait(60) == 1
    assert "was written with another model: '4 tensors," in wider.process.errors


def status(swarm: Swarm, home: Path) -> str:
    asked = swarm.command("status", "--json", "--home", str(home))
    return asked.output if asked.wait(60) == 0 else ""
