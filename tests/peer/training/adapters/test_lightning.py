"""`SwarmCallback` for Lightning, in real Trainers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.peer.errors import Refused
from fakes.world import World

NEAR = 1e-4
"""AdamW makes steps of the size of the rate, also of gradients that are all rounding."""


@pytest.fixture
def real() -> Any:
    """`fakes.lightning`, loaded only where its tests run: every worker of pytest collects all tests."""
    pytest.importorskip("lightning", reason="needs the extra `adapters`")
    return importlib.import_module("fakes.lightning")


def test_two_trainers_equal_one_trainer_with_both_batches(tmp_path: Path, real: Any) -> None:
    tenths = {"target_batch_size": 20 * real.BATCH, "count": lambda batch: 10 * len(batch[0])}
    (first, one, _), (second, _, _) = real.swarm_of(tmp_path, tenths, gradient_clip_val=0.5)
    alone = real.Regression()
    real.trainer(tmp_path, gradient_clip_val=0.5).fit(alone, real.batches(0, 1))
    assert one.optimizer is not None
    assert one.optimizer.epoch == real.EPOCHS
    assert torch.equal(real.flat(first), real.flat(second))
    assert (real.flat(first) - real.flat(alone)).abs().max() < NEAR
    assert not torch.equal(real.flat(first), real.flat(real.Regression()))


def test_the_learning_rate_follows_the_swarms_epochs_and_training_stops_at_the_last(
    tmp_path: Path, real: Any
) -> None:
    options: dict[str, Any] = {"max_steps": 20, "accumulate_grad_batches": 2}
    for _, one, training in real.swarm_of(
        tmp_path, {"target_batch_size": 8 * real.BATCH, "epochs": 3}, **options
    ):
        assert one.optimizer is not None
        assert one.optimizer.batch_size == 2 * real.BATCH
        assert one.optimizer.epoch == 3
        assert training.global_step < 20
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(real.RATE * (1 - 3 / 12))


@pytest.mark.parametrize(
    "plan", [{"max_steps": 12}, {"max_steps": -1, "max_epochs": 1, "limit_train_batches": 12}]
)
def test_the_end_and_the_scheduler_count_the_swarms_epochs(
    tmp_path: Path, real: Any, plan: dict[str, Any]
) -> None:
    (first, one, training), (second, other, _) = real.swarm_of(
        tmp_path, {"target_batch_size": 3 * real.BATCH}, **plan
    )
    assert one.optimizer.epoch == other.optimizer.epoch == 12
    assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    assert training.global_step > 12
    assert torch.equal(real.flat(first), real.flat(second))


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (lambda real: real.Regression(2), {}, "automatic optimization with one optimizer, got 2"),
        (
            lambda real: real.Regression(),
            {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"},
            "clipping by norm, got clipping by value",
        ),
    ],
)
def test_what_peers_could_not_do_alike_is_refused(
    tmp_path: Path, real: Any, module: Any, options: dict[str, Any], expected: str
) -> None:
    what = module(real)
    one = real.SwarmCallback(World().join("peer0", "text", what), batch_size=1, target_batch_size=1)
    with pytest.raises(Refused, match=expected):
        real.trainer(tmp_path, callbacks=[one], **options).fit(what, real.batches(0))


def test_a_short_batch_counts_for_its_samples(real: Any) -> None:
    run = World().join("peer0", "text", real.Regression())
    one = real.SwarmCallback(run, batch_size=4, target_batch_size=1)
    short, images = torch.zeros(2, 3), torch.zeros(9, 3)
    batches = (short, {"text": ["a", "b"], "x": [short]}, images, "text", torch.tensor(1.0))
    assert [one._size(batch) for batch in batches] == [2, 2, 4, 4, 4]
