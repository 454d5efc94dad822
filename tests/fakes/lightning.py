"""Real Trainers of Lightning with a small network, whose peers are fakes. Imports lightning, which takes 6 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise.peer.training.adapters.lightning import SwarmCallback
from fakes.world import World
from oracles.training import Batch, batch_of, loss_of, network

BATCH = 4
EPOCHS = 6
RATE = 1e-2


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
    return torch.cat([parameter.detach().flatten() for parameter in what.parameters()])


def swarm_of(
    folder: Path, callback: dict[str, Any], **options: Any
) -> list[tuple[Regression, SwarmCallback, Trainer]]:
    world = World()

    def work(peer: int) -> tuple[Regression, SwarmCallback, Trainer]:
        module = Regression(compute=world.compute)
        one = SwarmCallback(world.join(f"peer{peer}", "text", module), batch_size=BATCH, **callback)
        training = trainer(folder, callbacks=[one], **options)
        training.fit(module, batches(peer))
        return module, one, training

    return world.each(2, work)
