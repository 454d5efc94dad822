"""Real Trainers of Hugging Face with a tiny model, whose peers are fakes. Imports transformers, which takes 5 s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from equipoise.peer.training.adapters.huggingface import SwarmCallback
from fakes.world import World

BATCH = 4
EPOCHS = 6
TOKENS, VOCABULARY = 8, 32

Sample = dict[str, torch.Tensor]


def model() -> GPT2LMHeadModel:
    """Equal each time; its output layer is tied to its embedding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size: dict[str, Any] = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": TOKENS}
        drop: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        ends: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**size, **drop, **ends))


def data(peer: int) -> list[Sample]:
    chance = torch.Generator().manual_seed(peer)
    texts = torch.randint(VOCABULARY, (BATCH * 2 * EPOCHS, TOKENS), generator=chance)
    return [{"input_ids": text, "labels": text} for text in texts]


def trainer(
    folder: Path,
    what: GPT2LMHeadModel,
    samples: Sequence[Sample],
    held_out: Sequence[Sample] | None = None,
    **options: Any,
) -> Trainer:
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        logging_strategy="no",
        train_sampling_strategy="sequential",
        **{
            "max_steps": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "learning_rate": 1e-2,
            **quiet,
            **options,
        },
    )
    return Trainer(what, arguments, train_dataset=list(samples), eval_dataset=held_out)


class Computing(TrainerCallback):
    """What a forward and a backward pass take."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.world.compute(0.5)


class Noting(TrainerCallback):
    """Calls `note` after each step of the optimizer."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.note()


def flat(what: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in what.parameters()])


def swarm_of(
    folder: Path, peers: int, callback: dict[str, Any], **options: Any
) -> list[tuple[Trainer, SwarmCallback]]:
    world = World()

    def work(peer: int) -> tuple[Trainer, SwarmCallback]:
        what = model()
        run = world.join(f"peer{peer}", "text", what)
        one = SwarmCallback(run, **callback)
        training = trainer(folder, what, data(peer), **options)
        training.add_callback(one)
        training.add_callback(Computing(world))
        training.train()
        return training, one

    return world.each(peers, work)
