"""`SwarmCallback` for Hugging Face's Trainer, in real Trainers with a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `adapters`")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from equipoise.peer.training.adapters.huggingface import SwarmCallback
from fakes.training import FakeSwarm

BATCH = 4
EPOCHS = 6
TOKENS, VOCABULARY = 8, 32

NEAR = 1e-4
"""AdamW makes steps of the size of the rate, 1e-2, also of gradients that are all rounding."""

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


def trainer(folder: Path, what: GPT2LMHeadModel, samples: Sequence[Sample], **options: Any) -> Trainer:
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
    return Trainer(what, arguments, train_dataset=list(samples))


class Computing(TrainerCallback):
    """What a forward and a backward pass take."""

    def __init__(self, fake: FakeSwarm) -> None:
        self.fake = fake

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.fake.compute(0.5)


def flat(what: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in what.parameters()])


def swarm_of(
    folder: Path, peers: int, callback: dict[str, Any], **options: Any
) -> list[tuple[Trainer, SwarmCallback]]:
    fake, made = FakeSwarm(), []

    def work(peer: int) -> None:
        what = model()
        run = fake.join(f"peer{peer}", "text", what)
        one = SwarmCallback(run, clock=fake.clock, **callback)
        training = trainer(folder, what, data(peer), **options)
        training.add_callback(one)
        training.add_callback(Computing(fake))
        made.append((training, one))
        training.train()

    for peer in range(peers):
        fake.peer(f"peer{peer}", lambda peer=peer: work(peer))
    fake.run()
    return made


def test_two_trainers_come_to_what_one_comes_to_with_both_batches(tmp_path: Path) -> None:
    made = swarm_of(tmp_path, 2, {"target_batch_size": 2 * BATCH})
    batches = zip(*(torch.utils.data.DataLoader(data(peer), BATCH) for peer in range(2)), strict=True)
    both = [
        {name: values[at] for name, values in batch.items()}
        for pair in batches
        for batch in pair
        for at in range(BATCH)
    ]
    alone = trainer(tmp_path, model(), both, per_device_train_batch_size=2 * BATCH)
    alone.train()
    first, second = (flat(training.model) for training, _ in made)
    assert [one.optimizer and one.optimizer.epoch for _, one in made] == [EPOCHS, EPOCHS]
    assert torch.equal(first, second)
    assert (first - flat(alone.model)).abs().max() < NEAR
    assert not torch.equal(first, flat(model()))


def test_the_learning_rate_follows_the_swarms_epochs_and_training_stops_at_the_last(tmp_path: Path) -> None:
    callback = {"target_batch_size": 4 * BATCH, "epochs": 3}
    for training, one in swarm_of(tmp_path, 2, callback, max_steps=12, warmup_steps=0):
        assert one.optimizer is not None
        assert one.optimizer.epoch == 3
        assert training.state.global_step < 12
        assert training.lr_scheduler.get_last_lr() == pytest.approx([1e-2 * (1 - 3 / 12)] * 2)
        assert training.lr_scheduler.state_dict()["last_epoch"] == 3
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (1 - 3 / 12))


def test_the_options_of_the_trainer_become_the_swarms(tmp_path: Path) -> None:
    fake, what = FakeSwarm(), model()
    one = SwarmCallback(fake.join("peer0", "text", what), target_batch_size=1e6, clock=fake.clock)
    training = trainer(tmp_path, what, data(0), max_steps=1, gradient_accumulation_steps=2, max_grad_norm=0.5)
    training.add_callback(one)
    fake.peer("peer0", training.train)
    fake.run()
    assert one.optimizer is not None
    assert one.optimizer.batch_size == 2 * BATCH
    assert one._run.terms["clip"] == "0.5"
    assert training.args.max_grad_norm == 0
