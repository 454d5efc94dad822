"""Outer steps, against slow references."""

from __future__ import annotations

import pytest
import torch

from equipoise.averaging.outer import Average, Nesterov

STEPS = 6


def means() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [torch.randn(7, generator=chance) for _ in range(STEPS)]


def test_nesterov_is_what_the_paper_says() -> None:
    agreed = {"w": torch.ones(7)}
    outer = Nesterov(lr=0.7, momentum=0.9)
    value, moment = [1.0] * 7, [0.0] * 7
    for mean in means():
        outer.step(agreed, {"w": mean})
        for at, difference in enumerate(mean.tolist()):
            moment[at] = 0.9 * moment[at] + difference
            value[at] = value[at] - 0.7 * (difference + 0.9 * moment[at])
    torch.testing.assert_close(agreed["w"], torch.tensor(value))


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


def test_nesterov_arrives_where_heavy_ball_still_swings() -> None:
    """On f = w^2 / 2, exactly: the largest root of each recursion tells how fast it gets there."""
    agreed, moment, heavy = {"w": torch.ones(1)}, 0.0, 1.0
    outer = Nesterov(lr=0.7, momentum=0.9)
    for _ in range(20):
        outer.step(agreed, {"w": agreed["w"].clone()})
        moment = 0.9 * moment + heavy
        heavy -= 0.7 * moment
    assert abs(float(agreed["w"])) < 0.01 < abs(heavy)


def test_without_momentum_and_with_lr_one_it_is_the_average() -> None:
    first, second = {"w": torch.ones(7)}, {"w": torch.ones(7)}
    outer, plain = Nesterov(lr=1.0, momentum=0.0), Average()
    for mean in means():
        outer.step(first, {"w": mean})
        plain.step(second, {"w": mean})
    assert torch.equal(first["w"], second["w"])


def test_average_comes_to_the_mean_of_the_parameters() -> None:
    agreed = {"w": torch.randn(5)}
    peers = [torch.randn(5) for _ in range(3)]
    mean = torch.stack([agreed["w"] - peer for peer in peers]).mean(0)
    Average().step(agreed, {"w": mean})
    torch.testing.assert_close(agreed["w"], torch.stack(peers).mean(0))


def test_it_goes_on_from_a_state() -> None:
    first, whole = Nesterov(), Nesterov()
    agreed, other = {"w": torch.ones(7)}, {"w": torch.ones(7)}
    for at, mean in enumerate(means()):
        if at == 3:
            second = Nesterov()
            second.load_state_dict({"moments": {"w": first.state_dict()["moments"]["w"].clone()}})
            first = second
        first.step(agreed, {"w": mean})
        whole.step(other, {"w": mean})
    assert torch.equal(agreed["w"], other["w"])


def test_moments_follow_the_parameters_to_their_device() -> None:
    step = Nesterov()
    step.load_state_dict({"moments": {"w": torch.ones(2)}})
    agreed = {"w": torch.ones(2, device="meta")}
    step.step(agreed, {"w": torch.ones(2, device="meta")})
    assert step.state_dict()["moments"]["w"].is_meta


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0}, "lr: expected a finite number above 0, got 0"),
        ({"momentum": 1}, "momentum: expected a number"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Nesterov(**options)
