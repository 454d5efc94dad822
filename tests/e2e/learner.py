"""A training script of the end-to-end tests, as a user would write it: `python learner.py HOME TASK`.

It says, one line of JSON each, which of its batches went into which update, and what it came to.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from e2e.swarm import eventually
from equipoise.peer import Client, Idle, Run, connect
from equipoise.peer.training import DiLoCo, StateId, SwarmOptimizer
from oracles.training import MakeOptimizer, batch_of, loss_of, network

MEET_SECONDS = 60.0
"""The others start their interpreters meanwhile."""

ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner does.

    Attributes:
        index: Which peer it is: its batches are its own.
        peers: How many peers must have joined before it begins.
        samples: In a batch of its own.
        target: Samples of an update.
        runs: By codec, one after another: the epoch at which the run ends.
        hidden: Width of the network.
        every: Steps of its own between two exchanges, as DiLoCo makes them; 0: target batches.
        patience: Seconds without others after which it trains alone.
        save: Folder for the parameters that it ends with, `CODEC-INDEX.safetensors` each; empty: not saved.
    """

    index: int
    runs: dict[str, int]
    peers: int = 1
    samples: int = 8
    target: float = 32
    hidden: int = 32
    every: int = 0
    patience: float = 30.0
    save: str = ""


class Updated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The epoch has changed.

    Attributes:
        run: The run's name.
        epoch: The epoch now.
        before: The epoch before.
        lineage: Of the state now.
        batches: Numbers of its own batches that are in the mean that was applied; empty if it did not count.
        contributors: Number of those with samples in that mean; 0 if the update was made alone.
        at: When, on the system's steady clock, which all processes share.
    """

    run: str
    epoch: int
    before: int
    lineage: str
    batches: tuple[int, ...]
    contributors: int
    at: float


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It has come to its last update of one run.

    Attributes:
        run: The run's name.
        epoch: The epoch that it ends with.
        lineage: Of the state it ends with.
        digest: SHA-256 in hex of its parameters.
    """

    run: str
    epoch: int
    lineage: str
    digest: str


Report = Updated | Ended


def learn(peer: Client, task: Task, codec: str, updates: int, say: Callable[[Report], None]) -> None:
    """Train one run to its end, and `say` what comes of it."""
    name = f"learn-{codec}"
    model = network(task.hidden)
    with peer.join(name, model, codec=codec) as run:
        optimizer = run.optimizer(
            ADAMW(model.parameters()),
            target_batch_size=task.target,
            batch_size=task.samples,
            patience=task.patience,
        )
        meet(run, task.peers - 1)
        train(peer, run, optimizer, task, updates, say)
        say(end(task, codec, model, optimizer.id))


def learn_locally(peer: Client, task: Task, codec: str, steps: int, say: Callable[[Report], None]) -> None:
    """Train one run to its end with DiLoCo, and `say` what comes of it."""
    name = f"learn-{codec}"
    model = network(task.hidden)
    optimizer = ADAMW(model.parameters())
    with peer.join(name, model, codec=codec) as run, DiLoCo(run, every=task.every) as group:
        meet(run, task.peers - 1)
        for number in range(steps):
            optimizer.zero_grad()
            loss_of(model, batch_of(task.index, number, task.samples)).backward()
            optimizer.step()
        say(end(task, codec, model, group.member.id))


def end(task: Task, codec: str, model: nn.Module, state: StateId) -> Ended:
    """Save the parameters, if asked to; returns what to say of the end."""
    if task.save:
        save_file(model.state_dict(), Path(task.save) / f"{codec}-{task.index}.safetensors")
    return Ended(
        run=f"learn-{codec}",
        epoch=state.epoch,
        lineage=state.lineage,
        digest=digest(model),
    )


def train(
    peer: Client,
    run: Run,
    optimizer: SwarmOptimizer,
    task: Task,
    updates: int,
    say: Callable[[Report], None],
) -> None:
    """Make all updates and `say` each."""
    pending: list[int] = []
    number = 0
    model = run.source
    assert isinstance(model, nn.Module)
    while optimizer.epoch < updates:
        optimizer.zero_grad()
        loss_of(model, batch_of(task.index, number, task.samples)).backward()
        pending.append(number)
        number += 1
        before = optimizer.epoch
        optimizer.step()
        if optimizer.epoch != before:
            weights = optimizer.last.contributors if optimizer.last is not None else {}
            count = round(weights.get(peer.peer_id, 0.0) / task.samples)
            say(
                Updated(
                    run=run.name,
                    epoch=optimizer.epoch,
                    before=before,
                    lineage=optimizer.id.lineage,
                    batches=tuple(pending[-count:]) if count else (),
                    contributors=sum(weight >= 1 for weight in weights.values()),
                    at=time.monotonic(),
                )
            )
            if count:
                pending.clear()


def meet(run: Run, others: int) -> None:
    """Wait until so many others have joined on the same terms."""
    eventually(lambda: others == 0 or run.state == Idle(peers=others), f"{others} others", MEET_SECONDS)


def digest(model: nn.Module) -> str:
    """SHA-256 in hex of all parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def print_report(report: Report) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # What it decides, and why.
    torch.set_num_threads(1)
    task = msgspec.json.decode(sys.argv[2], type=Task)
    with connect(sys.argv[1]) as peer:
        for codec, updates in task.runs.items():
            (learn_locally if task.every else learn)(peer, task, codec, updates, print_report)


if __name__ == "__main__":
    main()
