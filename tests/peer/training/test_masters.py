"""`masters=True`: parameters of half precision train as fp32 ones do. Without, a line says what is lost."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from equipoise.peer import Refused
from equipoise.peer.training import LocalSGD, SwarmState
from fakes.trainers import SAMPLES, Trainer, assert_alike
from fakes.world import World
from oracles.training import Batch, batch_of, difference, loss_of, network


def half(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    return network().to(dtype)


def backward(model: torch.nn.Module, index: int, at: int) -> None:
    kind = next(model.parameters()).dtype
    inputs, targets = batch_of(index, at, SAMPLES)
    loss_of(model, Batch(inputs.to(kind), targets.to(kind))).backward()


class Half(Trainer):
    """A peer that trains with bf16, or another dtype, at a small rate."""

    dtype = torch.bfloat16
    rate = 1e-5

    def join(self) -> None:
        self.make = lambda parameters: torch.optim.AdamW(parameters, lr=self.rate)
        self.model = half().to(self.dtype)
        super().join()

    def backward(self) -> None:
        backward(self.model, self.index, self.calls - 1)


def loss(named: dict[str, torch.Tensor], steps: int) -> float:
    """Of fp32 values, over all batches of the training."""
    model = network()
    model.load_state_dict(named)
    losses = [loss_of(model, batch_of(0, at, SAMPLES)).detach() for at in range(steps)]
    return float(torch.stack(losses).mean())


def plain(steps: int, rate: float) -> dict[str, torch.Tensor]:
    """Trained in fp32 from the values in bf16."""
    model = half().float()
    adamw = torch.optim.AdamW(model.parameters(), lr=rate)
    for at in range(steps):
        adamw.zero_grad()
        backward(model, 0, at)
        adamw.step()
    return {name: one.detach() for name, one in model.named_parameters()}


def by_optimizer(steps: int, rate: float, masters: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    world = World()
    trainer = Half(world, 0, steps, target_batch_size=SAMPLES, patience=0.0, masters=masters)
    trainer.rate = rate
    world.run(trainer)
    return trainer.model, trainer.opt.masters.tensors


def by_local_steps(steps: int, rate: float, masters: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    world, model = World(), half()

    def work(_: int) -> dict[str, torch.Tensor]:
        adamw = torch.optim.AdamW(model.parameters(), lr=rate)
        with LocalSGD(world.join("peer0", "text", model), every=50, patience=0.0, masters=masters) as group:
            for at in range(steps):
                adamw.zero_grad()
                backward(model, 0, at)
                adamw.step()
        return group._masters.tensors

    return model, world.each(1, work)[0]


@pytest.mark.parametrize(
    ("train", "steps", "rate"),
    [
        (by_local_steps, 100, 5e-6),
        (by_optimizer, 50, 1e-5),
        pytest.param(by_local_steps, 500, 1e-6, marks=pytest.mark.slow),
        pytest.param(by_optimizer, 500, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_with_masters_bf16_trains_as_fp32_and_without_a_line_tells_what_is_lost(
    train: Any, steps: int, rate: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, held = train(steps, rate, True)
    before, exact = (
        {name: one.detach() for name, one in half().float().named_parameters()},
        plain(steps, rate),
    )
    assert loss(before, steps) - loss(exact, steps) > 1e-2
    assert abs(loss(held, steps) - loss(exact, steps)) < 1e-3
    assert difference(held, exact) < 0.3 * difference(before, exact)
    assert all(one.dtype == torch.bfloat16 for one in model.parameters())
    assert all(torch.equal(one, held[name].bfloat16()) for name, one in model.named_parameters())
    assert "rounding to half precision" not in caplog.text

    train(4, rate, False)
    (line,) = [one.getMessage() for one in caplog.records if "rounding" in one.getMessage()]
    told = (
        r"run text: rounding to half precision lost \d+ % of the updates of a step: masters=True keeps them"
    )
    assert re.fullmatch(told, line)


def test_peers_with_masters_meet_peers_in_fp32_and_newcomers_and_checkpoints_get_the_masters() -> None:
    world = World()
    peers = [Half(world, index, 12, masters=True) for index in range(4)]
    peers[1].dtype = torch.float32
    peers[3].model = network(seed=7)
    for index, peer in enumerate(peers):
        peer.begin(at=3.0 if index == 3 else 0.0)
    world.run()
    assert_alike(peers)
    first = peers[0].opt
    assert difference(peers[0].opt.masters.tensors, peers[1].named()) == 0
    assert all(
        torch.equal(one, first.masters.tensors[name].bfloat16()) for name, one in peers[0].named().items()
    )
    saved = SwarmState(first).state_dict()
    assert {one.dtype for name, one in saved.items() if isinstance(one, torch.Tensor)} == {torch.float32}

    other = Half(World(), 0, 12, masters=True)
    other.join()
    future = SwarmState(other.opt).state_dict()
    assert {name: one.dtype for name, one in future.items() if isinstance(one, torch.Tensor)} == {
        name: one.dtype for name, one in saved.items() if isinstance(one, torch.Tensor)
    }
    SwarmState(other.opt).load_state_dict(saved)
    assert torch.equal(other.opt.image(), first.image())
    assert difference(other.named(), peers[0].named()) == 0


def test_what_the_script_writes_goes_into_the_masters(world: World) -> None:
    class Loading(Half):
        def join(self) -> None:
            super().join()
            self.model.load_state_dict({**self.model.state_dict(), "4.bias": torch.full((4,), 7.0)})

    peers = [Loading(world, index, 3, masters=True) for index in range(2)]

    def clamp(peer: Half) -> None:
        with torch.no_grad():
            next(peer.model.parameters()).clamp_(-0.125, 0.125)

    for peer in peers:
        peer.options |= {"on_update": partial(clamp, peer), "target_batch_size": 2 * SAMPLES}
    world.run(*peers)
    assert_alike(peers)
    held = next(iter(peers[0].opt.masters.tensors.values()))
    assert float(held.bfloat16().abs().max()) == 0.125
    assert peers[0].opt.masters.tensors["4.bias"].tolist() == pytest.approx([7.0] * 4, abs=1e-3)
    inner = (held.abs() < 0.125) & (held != held.bfloat16())
    assert inner.any(), "what was not clamped keeps its digits"


def test_local_steps_with_masters_end_alike_and_survive_a_step_that_fails(world: World) -> None:
    models = [half(torch.float16) for _ in range(2)]

    def work(index: int) -> dict[str, torch.Tensor]:
        model = models[index]
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)
        failing = adamw.register_step_pre_hook(lambda *_: 1 / 0)
        run = world.join(f"peer{index}", "text", model)
        with LocalSGD(run, every=4, fragments=2, merge=0.5, delay=1, wait_for=1, masters=True) as group:
            for at in range(17):
                world.compute(0.5)
                adamw.zero_grad()
                backward(model, index, at)
                if at == 0:
                    with pytest.raises(ZeroDivisionError):
                        adamw.step()
                    failing.remove()
                    with pytest.raises(Refused, match="a step would compute with the masters, in fp32; call"):
                        adamw.step(lambda: 0.0)
                adamw.step()
        for name, one in model.named_parameters():
            assert one.dtype == torch.float16
            assert torch.equal(one, group._masters.tensors[name].half())
        return group._fragments[0].model.values | group._fragments[1].model.values

    first, second = world.each(2, work)
    assert difference(first, second) == 0
    assert (
        difference(first, {name: one.float() for name, one in half(torch.float16).named_parameters()}) > 1e-5
    )
