"""`torch.distributed.checkpoint` saves and loads the swarm's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.peer.training import ImageError, SwarmOptimizer
from equipoise.peer.training.dcp import SwarmState
from fakes.world import World
from oracles.training import batch_of, loss_of, network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


def halving(inner: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)


def trained(make: Make, steps: int, model: nn.Module | None = None) -> SwarmOptimizer:
    """An optimizer that has made some steps alone."""
    world, made = World(), []

    def work() -> None:
        own = model or network()
        run = world.join("peer0", "text", own)
        options: dict[str, Any] = {
            "target_batch_size": 8,
            "batch_size": 8,
            "patience": 0,
        }
        made.append(run.optimizer(make(own.parameters()), scheduler=halving, **options))
        for step in range(steps):
            made[0].zero_grad()
            loss_of(own, batch_of(0, step, 8)).backward()
            made[0].step()

    world.peer("peer0", work)
    world.run()
    return made[0]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_what_was_saved_is_loaded_into_one_that_has_not_begun(tmp_path: Path, make: Make, steps: int) -> None:
    # Two seconds, for one of the workers.
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    saved, fresh = trained(make, steps), trained(make, 0)
    save({"swarm": SwarmState(saved)}, checkpoint_id=tmp_path)
    load({"swarm": SwarmState(fresh)}, checkpoint_id=tmp_path)
    assert fresh.id == saved.id
    assert fresh.epoch == steps
    assert torch.equal(fresh.image(), saved.image())
    assert fresh.param_groups[0]["lr"] == saved.param_groups[0]["lr"]


def test_looking_at_a_state_does_not_change_it() -> None:
    opt = trained(OPTIMIZERS["adamw"], 0)
    before = opt.image()
    SwarmState(opt).state_dict()
    assert torch.equal(opt.image(), before)
    assert not opt.inner.state


def test_it_is_a_stateful_with_the_names_of_the_parameters() -> None:
    from torch.distributed.checkpoint.stateful import Stateful

    state = SwarmState(trained(OPTIMIZERS["adamw"], 1))
    assert isinstance(state, Stateful)
    assert {"model/0.weight", "optimizer/state/0.weight/exp_avg"} <= set(state.state_dict())


def test_another_model_is_refused_and_nothing_is_loaded() -> None:
    wide = SwarmState(trained(OPTIMIZERS["adamw"], 1, network(64)))
    opt = trained(OPTIMIZERS["adamw"], 2)
    before = opt.image()
    with pytest.raises(ImageError, match="has shape"):
        SwarmState(opt).load_state_dict(wide.state_dict())
    with pytest.raises(ImageError, match=r"expected what SwarmState\.state_dict returned"):
        SwarmState(opt).load_state_dict({"model": network().state_dict()})
    assert torch.equal(opt.image(), before)
