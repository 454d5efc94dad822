"""A federated training script of the end-to-end tests: `python federated_learner.py HOME TASK`.

It prints the rounds for which it trains, and its end, as one line of JSON each.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import msgspec
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from equipoise.peer import Client, connect
from equipoise.peer.training import Checkpoints, Federated
from equipoise.peer.training import Task as Call
from equipoise.peer.training.safetensors_io import unpack

VALUES = 1000


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner does.

    Attributes:
        index: Which peer it is: what it learns is its own.
        name: Of the run.
        peers: How many make the first round.
        outer: The outer step.
        rounds: After which the training ends.
        hold: The round for which its training never ends; 0: none.
        checkpoints: Whether it writes one after each round.
        resume: Whether it goes on from the newest.
    """

    index: int
    name: str
    peers: int
    outer: str = "fedadam"
    rounds: int = 10
    hold: int = 0
    checkpoints: bool = False
    resume: bool = False


class Trains(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A training begins, for a round."""

    number: int


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What all hold alike of a round, but for its digest, which has the signatures of its members."""

    number: int
    contributors: dict[str, float]
    metrics: dict[str, float]
    evaluation: dict[str, float]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a training.

    Attributes:
        reason: Why it ended.
        rounds: Its history.
        digests: Of the history's rounds.
        parts: The state at the end; see `parts_of`.
    """

    reason: str
    rounds: list[Round]
    digests: list[str]
    parts: dict[str, str]


Report = Trains | Ended


def learn(peer: Client, task: Task, say: Callable[[Report], None]) -> None:
    """Train one run to its end, and `say` what comes of it."""
    model = {"w": torch.zeros(VALUES), "v": torch.ones(3, VALUES)}

    def fit(call: Call) -> tuple[float, dict[str, float]]:
        say(Trains(number=call.number))
        if call.number == task.hold:
            threading.Event().wait()
        chance = torch.Generator().manual_seed(100 * call.number + task.index)
        for one in model.values():
            one += 0.1 * torch.randn(one.shape, generator=chance)
        return 10.0 + 7 * task.index, {"loss": float(model["w"].square().mean())}

    def evaluate(call: Call) -> tuple[float, dict[str, float]]:
        mean = float(model["v"].mean())
        return 1.0 + task.index, {"mean": mean, "score": call.number / 10 + task.index / 100}

    strategy = f"federated:available={task.peers},quorum={task.peers},grace=60"
    checkpoints = Checkpoints(every=1, resume=task.resume) if task.checkpoints else None
    with peer.join(task.name, model, strategy=strategy, codec="fp32") as run:
        trained = Federated(
            run,
            fit,
            evaluate,
            task.outer,
            checkpoints=checkpoints,
            rounds=task.rounds,
        )
        history = trained.run()
        parts = parts_of(trained.member.image())
    say(
        Ended(
            reason=trained.reason,
            rounds=[
                Round(**{name: getattr(one, name) for name in Round.__struct_fields__}) for one in history
            ],
            digests=[one.digest for one in history],
            parts=parts,
        )
    )


def parts_of(image: torch.Tensor) -> dict[str, str]:
    """SHA-256 in hex of each tensor of a state, the history's excepted, and the outer step's other values."""
    tensors, metadata = unpack(image)
    found = {name: sha256(one.numpy().tobytes()).hexdigest() for name, one in tensors.items()}
    kept = {name: one for name, one in found.items() if not name.startswith("history")}
    return {**kept, "outer step": json.dumps(json.loads(metadata["equipoise"])["plain"]["outer"])}


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    task = msgspec.json.decode(sys.argv[2], type=Task)
    with connect(sys.argv[1]) as peer:
        learn(peer, task, lambda report: print(msgspec.json.encode(report).decode(), flush=True))


if __name__ == "__main__":
    main()
