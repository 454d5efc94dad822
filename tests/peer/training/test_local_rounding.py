"""Parameters of half precision: what rounding takes from a local copy is no movement, in all ways of local training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equipoise.peer.training import Federated, LocalSGD
from equipoise.peer.training.federated import Task
from fakes.world import World

HALF = [torch.bfloat16, torch.float16]


def ulp(dtype: torch.dtype) -> float:
    """Distance of the values from 1 to 2; that of bf16 also for fp32, so that both make equal moves."""
    return torch.finfo(torch.bfloat16 if dtype is torch.float32 else dtype).eps


def ones(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.ones(150, dtype=dtype)) for name in "ab"}


def local(dtype: torch.dtype, by: float, steps: int, **options: Any) -> tuple[list[float], list[float]]:
    """The agreed values and the parameters of two peers, of which one moves by `by` in each step."""
    swarm = World()

    def work(index: int) -> tuple[float, float]:
        own = ones(dtype)
        sgd = torch.optim.SGD(own.values(), lr=1.0)
        with LocalSGD(swarm.join(f"peer{index}", "halves", own), **options) as group:
            for _ in range(steps):
                swarm.compute(0.5)
                for one in own.values():
                    one.grad = torch.full_like(one, -by if index == 0 else 0.0)
                sgd.step()
        agreed = [float(one.mean()) for part in group._fragments for one in part.model.values.values()]
        return sum(agreed) / 2, float(own["a"].detach().mean())

    agreed, own = zip(*swarm.each(2, work), strict=True)
    return list(agreed), list(own)


@pytest.mark.parametrize("dtype", HALF)
def test_small_movements_add_up_over_exchanges(dtype: torch.dtype) -> None:
    expected = [1 + 8 * ulp(dtype)] * 2
    assert local(dtype, ulp(dtype), 16, every=1) == (expected, expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "options",
    [
        {"every": 4, "delay": 2},
        {"every": 4, "delay": 2, "merge": 0.5},
        {"every": 4, "fragments": 2, "delay": 1, "merge": 0.25},
    ],
    ids=str,
)
def test_streams_of_half_precision_agree_on_what_those_of_fp32_do(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    exact, _ = local(torch.float32, ulp(dtype), 32, **options)
    assert local(dtype, ulp(dtype), 32, **options)[0] == pytest.approx(exact, abs=1e-6)
    assert exact[0] > 1 + 4 * ulp(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_small_movements_add_up_over_federated_rounds_and_fedprox_begins_at_zero(dtype: torch.dtype) -> None:
    swarm, proximal = World(strategy="federated"), list[float]()

    def work(index: int) -> list[float]:
        own = ones(dtype)

        def fit(task: Task) -> tuple[float, dict[str, float]]:
            proximal.append(float(task.proximal()))
            swarm.compute(1.0)
            with torch.no_grad():
                for one in own.values():
                    one.add_(ulp(dtype) if index == 0 else 0.0)
            return 1.0, {}

        run = swarm.join(f"peer{index}", "halves", own)
        trained = Federated(run, fit, rounds=16, proximal=1.0)
        trained.run()
        return [float(one.mean()) for one in (*own.values(), *trained.model.values.values())]

    assert swarm.each(2, work) == [[1 + 8 * ulp(dtype)] * 4] * 2
    assert proximal == [0.0] * 32


@pytest.mark.parametrize("dtype", HALF)
def test_small_movements_add_up_over_exchanges_of_pairs(dtype: torch.dtype) -> None:
    world, own = World(), [torch.ones(300, dtype=dtype) for _ in range(2)]

    def work(index: int) -> None:
        run = world.join(f"peer{index}", "halves", [own[index]], strategy="gossip")
        for _ in range(16):
            own[index].add_(ulp(dtype) * (1 - index))
            shift = run.shift(1.0)
            own[index].add_(ulp(dtype) * (1 - 2 * index))  # While the exchange goes on.
            assert shift.result().ok

    world.each(2, work)
    assert [float(values.mean()) for values in own] == [1 + 9 * ulp(dtype), 1 + 7 * ulp(dtype)]
