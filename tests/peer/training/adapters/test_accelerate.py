"""`step_with_swarm`, with what Accelerate has prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="needs the extra `adapters`")

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from equipoise.peer.training import SwarmOptimizer
from equipoise.peer.training.adapters.accelerate import step_with_swarm
from equipoise.peer.training.adapters.sharing import EndlessShares, sampling_of
from fakes.world import World
from oracles.training import batch_of, loss_of, network

BATCH = 4
EPOCHS = 5
RATE = 1e-2


def test_prepared_loaders_that_shuffle_draw_shares(world: World) -> None:
    accelerator = Accelerator(cpu=True)
    rows = TensorDataset(torch.arange(40))
    model = network()
    prepared = (
        model,
        torch.optim.AdamW(model.parameters()),
        DataLoader(rows, 4, shuffle=True),
        DataLoader(rows, 4),
    )
    model, optimizer, loader, held_out = accelerator.prepare(*prepared)
    run = world.join("peer0", "text", model)
    step_with_swarm(accelerator, run, optimizer, batch_size=4, target_batch_size=8)
    assert isinstance(sampling_of(loader).sampler, EndlessShares)
    assert not isinstance(sampling_of(held_out).sampler, EndlessShares)
    assert sorted(number for (numbers,) in loader for number in numbers.tolist()) == list(range(40))


class Loop:
    """As Accelerate's users write it."""

    def __init__(self, world: World, peer: int, accumulate: int = 1) -> None:
        self.world, self.peer = world, peer
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        run = world.join(f"peer{peer}", "text", model)
        self.swarm: SwarmOptimizer = step_with_swarm(
            self.accelerator,
            run,
            self.optimizer,
            self.scheduler,
            batch_size=BATCH,
            target_batch_size=2 * BATCH * accumulate,
        )

    def train(self) -> Loop:
        count = 0
        while self.swarm.epoch < EPOCHS:
            self.world.compute(0.5)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(loss_of(self.model, batch_of(self.peer, count, BATCH)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            count += 1
        return self

    def flat(self) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_loops_stay_alike_and_the_learning_rate_follows_the_swarm(accumulate: int) -> None:
    world = World()
    first, second = world.each(2, lambda peer: Loop(world, peer, accumulate).train())
    assert first.swarm.id == second.swarm.id
    assert torch.equal(first.flat(), second.flat())
    assert first.optimizer.optimizer is first.swarm
    assert first.swarm.batch_size == BATCH * accumulate
    assert first.scheduler.get_last_lr() == pytest.approx([RATE * 0.5**EPOCHS])
    assert not torch.equal(
        first.flat(), torch.cat([one.detach().flatten() for one in network().parameters()])
    )


def test_a_loss_scaler_steps_the_swarm_with_gradients_that_are_not_scaled() -> None:
    world, model = World(), network()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    accelerator = Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    plain = network()

    def work() -> None:
        run = world.join("peer0", "text", model)
        options: dict[str, Any] = {"target_batch_size": BATCH, "patience": 0}
        swarm = step_with_swarm(accelerator, run, optimizer, batch_size=BATCH, **options)
        scaler.scale(loss_of(model, batch_of(0, 0, BATCH))).backward()
        optimizer.step()
        assert swarm.epoch == 1
        next(model.parameters()).grad = torch.full_like(next(model.parameters()), torch.inf)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert swarm.epoch == 1

    world.peer("peer0", work)
    world.run()
    loss_of(plain, batch_of(0, 0, BATCH)).backward()
    for one, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(one, expected - expected.grad)


@pytest.mark.parametrize(
    "make",
    [
        lambda made: torch.optim.lr_scheduler.ReduceLROnPlateau(made),
        lambda made: "none",
    ],
)
def test_what_is_no_scheduler_by_epochs_is_refused(make: Any) -> None:
    accelerator, model = Accelerator(cpu=True), network()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = accelerator.prepare(inner)
    scheduler = make(inner)
    run = World().join("peer0", "text", model)
    with pytest.raises(TypeError, match="expected"):
        step_with_swarm(
            accelerator,
            run,
            optimizer,
            accelerator.prepare(scheduler),
            batch_size=1,
            target_batch_size=1,
        )


def test_an_optimizer_that_was_not_prepared_is_refused() -> None:
    model: nn.Module = network()
    run = World().join("peer0", "text", model)
    inner: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(TypeError, match=r"expected what accelerator\.prepare returns, got SGD"):
        step_with_swarm(Accelerator(cpu=True), run, inner, batch_size=1, target_batch_size=1)
