"""`SwarmCallback` for Lightning, in real Trainers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="needs the extra `adapters`")

from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from equipoise.peer.errors import Refused
from equipoise.peer.training.adapters.lightning import SwarmCallback
from fakes.training import FakeSwarm
from oracles.training import Batch, batch_of, loss_of, network

BATCH = 4
EPOCHS = 6
RATE = 1e-2

NEAR = 1e-4
"""AdamW makes steps of the size of the rate, also of gradients that are all rounding."""


class Regression(LightningModule):
    """As its users write them."""

    def __init__(self, optimizers: int = 1, compute: Callable[[float], None] = lambda seconds: None) -> None:
        super().__init__()
        self.compute = compute
        self.network = network()
        self.count = optimizers
        self.automatic_optimization = optimizers == 1

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.compute(0.5)
        return loss_of(self.network, Batch(*batch))

    def configure_optimizers(self) -> Any:
        made = [torch.optim.AdamW(self.parameters(), lr=RATE) for _ in range(self.count)]
        schedulers = [torch.optim.lr_scheduler.LinearLR(one, 1.0, 0.0, 12) for one in made]
        return made, [{"scheduler": one, "interval": "step"} for one in schedulers]


def trainer(folder: Path, **options: Any) -> Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        **{"max_steps": EPOCHS, **dict.fromkeys(quiet, False), **options},
    )


def batches(*peers: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    each = [batch_of(peer, at, BATCH) for at in range(40) for peer in peers]
    tensors = (torch.cat(parts) for parts in zip(*each, strict=True))
    return DataLoader(TensorDataset(*tensors), BATCH * len(peers))


def flat(what: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in what.parameters()])


def swarm_of(
    folder: Path, callback: dict[str, Any], **options: Any
) -> list[tuple[Regression, SwarmCallback, Trainer]]:
    fake, made = FakeSwarm(), []

    def work(peer: int) -> None:
        module = Regression(compute=fake.compute)
        one = SwarmCallback(
            fake.join(f"peer{peer}", "text", module), batch_size=BATCH, clock=fake.clock, **callback
        )
        training = trainer(folder, callbacks=[one], **options)
        made.append((module, one, training))
        training.fit(module, batches(peer))

    for peer in range(2):
        fake.peer(f"peer{peer}", lambda peer=peer: work(peer))
    fake.run()
    return made


def test_two_trainers_come_to_what_one_comes_to_with_both_batches(tmp_path: Path) -> None:
    (first, one, _), (second, _, _) = swarm_of(
        tmp_path, {"target_batch_size": 2 * BATCH}, gradient_clip_val=0.5
    )
    alone = Regression()
    trainer(tmp_path, gradient_clip_val=0.5).fit(alone, batches(0, 1))
    assert one.optimizer is not None
    assert one.optimizer.epoch == EPOCHS
    assert torch.equal(flat(first), flat(second))
    assert (flat(first) - flat(alone)).abs().max() < NEAR
    assert not torch.equal(flat(first), flat(Regression()))


def test_the_learning_rate_follows_the_swarms_epochs_and_training_stops_at_the_last(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 20, "accumulate_grad_batches": 2}
    for _, one, training in swarm_of(tmp_path, {"target_batch_size": 8 * BATCH, "epochs": 3}, **options):
        assert one.optimizer is not None
        assert one.optimizer.batch_size == 2 * BATCH
        assert one.optimizer.epoch == 3
        assert training.global_step < 20
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(RATE * (1 - 3 / 12))


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (lambda: Regression(2), {}, "automatic optimization with one optimizer, got 2"),
        (
            Regression,
            {"gradient_clip_val": 1, "gradient_clip_algorithm": "value"},
            "clipping by norm, got clipping by value",
        ),
    ],
)
def test_what_peers_could_not_do_alike_is_refused(
    tmp_path: Path, module: Any, options: dict[str, Any], expected: str
) -> None:
    what = module()
    one = SwarmCallback(FakeSwarm().join("peer0", "text", what), batch_size=1, target_batch_size=1)
    with pytest.raises(Refused, match=expected):
        trainer(tmp_path, callbacks=[one], **options).fit(what, batches(0))
