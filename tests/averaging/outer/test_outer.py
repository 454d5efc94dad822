"""Outer steps: their specs, their references, and that all peers and devices come to the same bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from equipoise.averaging.outer import Nesterov, OuterStep, _power, parse_outer
from equipoise.averaging.rules import parse_rule
from oracles.federated import OUTER, RULES

STEPS = 6

SPECS = [
    "average",
    "descent:lr=1",
    "nesterov:lr=0.7,momentum=0.9",
    "fedavgm:lr=1,momentum=0.9",
    "fedadagrad:eta=0.1,tau=0.001",
    "fedadam:eta=0.1,beta1=0.9,beta2=0.99,tau=0.001",
    "fedyogi:eta=0.01,beta1=0.9,beta2=0.99,tau=0.001",
]

every_step = pytest.mark.parametrize("spec", SPECS, ids=[spec.partition(":")[0] for spec in SPECS])


def means() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randn(7, generator=chance) for _ in range(STEPS)]


@every_step
def test_its_text_is_its_spec_with_every_option(spec: str) -> None:
    assert str(parse_outer(spec)) == spec
    assert str(parse_outer(spec.partition(":")[0])) == spec
    makes: Callable[[], OuterStep] = type(parse_outer(spec))  # type: ignore[assignment]
    assert str(makes()) == spec


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("fedadm", "unknown outer step 'fedadm'; .*did you mean 'fedadam'"),
        ("average:lr=1", "average takes no options"),
        ("nesterov:lr=0", "lr: expected a finite number above 0, got 0.0"),
        ("fedavgm:momentum=1", "momentum: expected a number from 0 to below 1, got 1.0"),
        ("fedadam:beta1=1", "beta1: expected a number from 0 to below 1"),
        ("fedyogi:beta2=7", "beta2: expected a number from 0 to below 1"),
        ("fedadagrad:tau=0", "tau: expected a finite number above 0"),
        ("fedadam:eta=0", "eta: expected a finite number above 0"),
        ("fedyogi:eta=nan", "eta is a decimal number"),
    ],
)
def test_a_wrong_spec_is_an_error_of_one_line(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"\A.*{said}.*\Z"):
        parse_outer(spec)


OTHER = [
    "descent:lr=0.3",
    "nesterov:lr=0.3,momentum=0.5",
    "fedavgm:lr=0.5,momentum=0",
    "fedadagrad:eta=1,tau=1e-9",
    "fedadam:eta=0.03,beta1=0,beta2=0.5,tau=0.1",
    "fedyogi:eta=0.1,beta1=0.5,beta2=0.9,tau=1e-5",
]


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed:beta=0.2"])
@pytest.mark.parametrize("spec", [*SPECS, *OTHER])
def test_four_rounds_of_two_layers_are_those_of_the_reference(rule: str, spec: str) -> None:
    """In float64, with 5 to 11 clients of other weights in every round: within 1e-9."""
    chance = torch.Generator().manual_seed(3)
    agreed = {
        "weight": torch.randn(4, 3, generator=chance, dtype=torch.float64),
        "bias": torch.zeros(4, dtype=torch.float64),
    }
    name, _, options = spec.partition(":")
    given = {key: float(value) for key, _, value in (one.partition("=") for one in options.split(",") if one)}
    servers = {
        key: [OUTER[name](value, **given) for value in one.flatten().tolist()] for key, one in agreed.items()
    }
    outer = parse_outer(spec)
    for clients in (5, 8, 11, 6):
        weights = torch.randint(1, 100, (clients,), generator=chance).double()
        mean = {}
        for key, value in agreed.items():
            moved = torch.randn(clients, value.numel(), generator=chance, dtype=torch.float64) * 0.1
            mean[key] = parse_rule(rule).reduce(-moved, weights).values.view_as(value)
            for server, column in zip(servers[key], moved.T.tolist(), strict=True):
                server.go(reference_rule(rule, column, weights.tolist()))
        outer.step(agreed, mean)
        for key, value in agreed.items():
            expected = torch.tensor([server.w for server in servers[key]], dtype=torch.float64)
            assert value.dtype == torch.float64
            assert float((value.flatten() - expected).abs().max()) <= 1e-9


def reference_rule(spec: str, column: list[float], weights: list[float]) -> float:
    name, _, beta = spec.partition(":beta=")
    return RULES[name](column, weights, *([float(beta)] if beta else []))


@every_step
def test_an_outer_step_goes_on_from_a_state(spec: str) -> None:
    first, whole = parse_outer(spec), parse_outer(spec)
    agreed, other = {"w": torch.ones(7)}, {"w": torch.ones(7)}
    for at, mean in enumerate(means()):
        if at == 3:
            second = parse_outer(spec)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            first = second
        first.step(agreed, {"w": mean})
        whole.step(other, {"w": mean})
    assert torch.equal(agreed["w"], other["w"])
    assert str(first.state_dict()) == str(whole.state_dict())


@every_step
def test_threads_and_the_place_of_a_value_change_no_bit(spec: str) -> None:
    size = 200_003
    chance = torch.Generator().manual_seed(1)
    given = [torch.randn(size, generator=chance) * 0.01 for _ in range(3)]
    start = torch.randn(size, generator=chance)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ended(parse_outer(spec), start, given)
        torch.set_num_threads(4)
        assert torch.equal(ended(parse_outer(spec), start, given), alone)
    finally:
        torch.set_num_threads(threads)
    part = slice(1, 14)  # Vectorised elsewhere, one by one here.
    assert torch.equal(ended(parse_outer(spec), start[part], [mean[part] for mean in given]), alone[part])


def ended(outer: OuterStep, start: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    agreed = {"w": start.clone()}
    for mean in given:
        outer.step(agreed, {"w": mean})
    return agreed["w"]


def in_numpy(
    name: str, w: np.ndarray, mean: np.ndarray, m: np.ndarray, v: np.ndarray, step: int
) -> np.ndarray:
    """One step in float32 by numpy, which rounds every operation; `m` and `v` are changed."""
    f32 = np.float32
    b1, b2, tau = f32(0.9), f32(0.99), f32(0.001)
    if name in ("average", "descent"):
        return w - mean
    if name in ("nesterov", "fedavgm"):
        m[:] = m * b1 + mean
        return w - (m * b1 + mean) * f32(0.7) if name == "nesterov" else w - m
    if name == "fedadagrad":
        v[:] = v + mean * mean
        return w - mean * f32(0.1) / (np.sqrt(v) + tau)
    m[:] = m * b1 - mean * f32(1 - 0.9)
    square, rest = mean * mean, f32(1 - 0.99)
    if name == "fedyogi":
        v[:] = v - np.sign(v - square) * square * rest
        return w + m * f32(0.01) / (np.sqrt(v) + tau)
    v[:] = v * b2 + square * rest
    eta = 0.1 * (math.sqrt(1 - _power(0.99, step + 1)) / (1 - _power(0.9, step + 1)))
    return w + m * f32(eta) / (np.sqrt(v) + tau)


@every_step
def test_every_operation_is_rounded_on_its_own(spec: str) -> None:
    chance = torch.Generator().manual_seed(2)
    agreed, outer = {"w": torch.randn(5000, generator=chance)}, parse_outer(spec)
    w, m, v = agreed["w"].numpy().copy(), np.zeros(5000, np.float32), np.zeros(5000, np.float32)
    for step in range(1, 5):
        mean = torch.randn(5000, generator=chance) * 0.1
        outer.step(agreed, {"w": mean})
        w = in_numpy(spec.partition(":")[0], w, mean.numpy(), m, v, step)
        assert np.array_equal(agreed["w"].numpy(), w)


@pytest.mark.parametrize("base", [0.0, 0.9, 0.99, 0.999999])
def test_powers_are_those_of_the_platform_but_for_the_last_bits(base: float) -> None:
    assert all(math.isclose(_power(base, one), base**one, rel_tol=1e-13) for one in range(1, 200))


@pytest.mark.parametrize("nesterov", [True, False])
def test_nesterov_is_torchs_and_not_heavy_ball(nesterov: bool) -> None:
    agreed = {"w": torch.ones(7)}
    outer = Nesterov(lr=0.1, momentum=0.9)
    parameter = torch.ones(7, requires_grad=True)
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, nesterov=nesterov)
    for mean in means():
        outer.step(agreed, {"w": mean})
        parameter.grad = mean.clone()
        sgd.step()
    assert torch.allclose(agreed["w"], parameter.detach(), atol=1e-6) == nesterov


def test_moments_follow_the_parameters_to_their_device() -> None:
    step = Nesterov()
    step.load_state_dict({"moments": {"w": torch.ones(2)}})
    agreed = {"w": torch.ones(2, device="meta")}
    step.step(agreed, {"w": torch.ones(2, device="meta")})
    assert step.state_dict()["moments"]["w"].is_meta


@pytest.mark.parametrize("spec", ["nesterov", "fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_one_huge_mean_leaves_no_infinity_behind(spec: str) -> None:
    outer, agreed = parse_outer(spec), {"w": torch.zeros(3)}
    for value in (1.0, 1e20, -1e20, 3e38, 3e38, 3e38, 1.0):
        outer.step(agreed, {"w": torch.full((3,), value)})
    kept = [moments["w"] for moments in outer.state_dict().values() if isinstance(moments, dict)]
    assert kept
    assert all(bool(torch.isfinite(moment).all()) for moment in kept)
