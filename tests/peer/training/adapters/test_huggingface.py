"""`SwarmCallback` for Hugging Face's Trainer, in real Trainers with a tiny model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.world import World

NEAR = 1e-4
"""AdamW makes steps of the size of the rate, 1e-2, also of gradients that are all rounding."""


@pytest.fixture
def real() -> Any:
    """`fakes.huggingface`, loaded only where its tests run: every worker of pytest collects all tests."""
    pytest.importorskip("transformers", reason="needs the extra `adapters`")
    return importlib.import_module("fakes.huggingface")


def test_two_trainers_equal_one_trainer_with_both_batches(tmp_path: Path, real: Any) -> None:
    tokens = {
        "target_batch_size": 2 * real.BATCH * real.TOKENS,
        "count": lambda batch: batch["labels"].ge(0).sum(),
    }
    made = real.swarm_of(tmp_path, 2, tokens)
    batches = zip(
        *(torch.utils.data.DataLoader(real.data(peer), real.BATCH) for peer in range(2)), strict=True
    )
    both = [
        {name: values[at] for name, values in batch.items()}
        for pair in batches
        for batch in pair
        for at in range(real.BATCH)
    ]
    alone = real.trainer(tmp_path, real.model(), both, per_device_train_batch_size=2 * real.BATCH)
    alone.train()
    first, second = (real.flat(training.model) for training, _ in made)
    assert [one.optimizer and one.optimizer.epoch for _, one in made] == [real.EPOCHS, real.EPOCHS]
    assert torch.equal(first, second)
    assert (first - real.flat(alone.model)).abs().max() < NEAR
    assert not torch.equal(first, real.flat(real.model()))


def test_the_learning_rate_follows_the_swarms_epochs_and_training_stops_at_the_last(
    tmp_path: Path, real: Any
) -> None:
    callback = {"target_batch_size": 4 * real.BATCH, "epochs": 3}
    for training, one in real.swarm_of(tmp_path, 2, callback, max_steps=12, warmup_steps=0):
        assert one.optimizer is not None
        assert one.optimizer.epoch == 3
        assert training.state.global_step < 12
        assert training.lr_scheduler.get_last_lr() == pytest.approx([1e-2 * (1 - 3 / 12)] * 2)
        assert training.lr_scheduler.state_dict()["last_epoch"] == 3
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (1 - 3 / 12))


@pytest.mark.parametrize("plan", [{"max_steps": 12}, {"max_steps": -1, "num_train_epochs": 1}])
def test_the_end_and_the_scheduler_count_the_swarms_epochs(
    tmp_path: Path, real: Any, plan: dict[str, Any]
) -> None:
    """A peer's data has 12 micro-batches, and 12 epochs take 48 of both peers together."""
    made = real.swarm_of(tmp_path, 2, {"target_batch_size": 4 * real.BATCH}, warmup_steps=0, **plan)
    for training, one in made:
        assert one.optimizer.epoch == 12
        assert training.lr_scheduler.get_last_lr() == pytest.approx([0.0, 0.0])
        assert training.state.max_steps == 12
    (first, one), (second, other) = made
    assert first.state.global_step + second.state.global_step >= 48
    assert one.optimizer.id == other.optimizer.id
    assert torch.equal(real.flat(first.model), real.flat(second.model))


def test_peers_with_schedulers_of_other_lengths_differ_in_a_term(tmp_path: Path, real: Any) -> None:
    terms = []
    for steps in (1, 2):
        world, what = World(), real.model()
        one = real.SwarmCallback(world.join("peer0", "text", what), target_batch_size=1, patience=0)
        training = real.trainer(tmp_path, what, real.data(0), max_steps=steps)
        training.add_callback(one)
        world.peer("peer0", training.train)
        world.run()
        terms.append(one._run.terms["scheduler"])
    assert "steps=1" in terms[0]
    assert "steps=2" in terms[1]


def test_a_short_last_batch_counts_for_its_samples(tmp_path: Path, real: Any) -> None:
    world, what, sizes = World(), real.model(), []
    run = world.join("peer0", "text", what)
    one = real.SwarmCallback(run, target_batch_size=1, patience=0)
    training = real.trainer(tmp_path, what, real.data(0)[: real.BATCH + 1], max_steps=4)
    training.add_callback(one)
    training.add_callback(real.Noting(lambda: sizes.append(one.optimizer.batch_size)))
    world.peer("peer0", training.train)
    world.run()
    assert sizes == [real.BATCH, 1, real.BATCH, 1]


def test_the_options_of_the_trainer_become_the_swarms(
    tmp_path: Path, real: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world, what = World(), real.model()
    one = real.SwarmCallback(world.join("peer0", "text", what), target_batch_size=1, patience=0)
    training = real.trainer(
        tmp_path, what, real.data(0), max_steps=1, gradient_accumulation_steps=2, max_grad_norm=0.5
    )
    training.add_callback(one)
    world.peer("peer0", training.train)
    world.run()
    assert one.optimizer is not None
    assert one.optimizer.batch_size == 2 * real.BATCH
    assert one._run.terms["clip"] == "0.5"
    assert training.args.max_grad_norm == 0
    assert (
        "not shared, since the loader does not shuffle them (SequentialSampler): give each peer"
        in caplog.text
    )
