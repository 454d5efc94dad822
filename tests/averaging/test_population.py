"""Population based training without peers: who copies whom, what becomes of hyperparameters, and the paper's toy."""

from __future__ import annotations

import statistics
from collections import Counter
from random import Random

import pytest

from equipoise.averaging.population import (
    EXPLOITS,
    EXPLORES,
    Choice,
    Log,
    Scored,
    Space,
    Uniform,
    exploit,
    explore,
    ranked,
)
from equipoise.averaging.state import StateId

SEEDS = range(20)

TOP = 1.2
"""The toy's best score."""

SPACE: dict[str, Space] = {"h0": Uniform(0, 1), "h1": Uniform(0, 1)}


def member(name: str, score: float, values: dict[str, float] | None = None) -> Scored:
    return Scored(name, StateId(1, "0" * 64), score, values or {"lr": 0.1})


def members(*scores: float) -> list[Scored]:
    return [member(f"p{index}", score) for index, score in enumerate(scores)]


def toy(seed: int, how: str, exploiting: str = "truncation:fraction=0.25", steps: int = 200) -> float:
    """Section 3.1 and figure 2 of the paper (1711.09846): the best score of two members.

    The score is Q = 1.2 - |theta|^2. Each member descends along its surrogate 1.2 - h0 theta0^2 - h1 theta1^2, and
    sees only one coordinate at first. Empty `how`: a grid search, without exploit and explore.
    """
    chance = Random(seed)
    thetas = [[0.9, 0.9], [0.9, 0.9]]
    values = [{"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0}]
    best = 0.0
    for step in range(1, steps + 1):
        for theta, held in zip(thetas, values, strict=True):
            for at in range(2):
                theta[at] -= 0.04 * held[f"h{at}"] * theta[at]
        scores = [TOP - sum(one * one for one in theta) for theta in thetas]
        best = max(best, *scores)
        if how and step % 5 == 0:
            records = [member(str(at), score, values[at]) for at, score in enumerate(scores)]
            for one, other in exploit(records, chance, exploiting).items():
                thetas[int(one)] = list(thetas[int(other)])
                values[int(one)] = explore(values[int(other)], chance, SPACE, how)
    return best


@pytest.mark.parametrize("exploiting", ["truncation:fraction=0.25", "binary:threshold=0"])
def test_the_toy_is_solved_by_a_population_and_not_by_a_grid(exploiting: str) -> None:
    assert statistics.mean(toy(seed, "resample:chance=0.25", exploiting) for seed in SEEDS) >= 1.18
    assert max(toy(seed, "") for seed in SEEDS) == pytest.approx(0.39)


def test_perturbing_never_leaves_zero_and_resampling_does() -> None:
    assert max(toy(seed, "perturb:factor=0.2") for seed in SEEDS) == pytest.approx(0.39)
    values = {"h0": 0.0, "h1": 0.0}
    assert all(explore(values, Random(seed), SPACE, "perturb:factor=0.9") == values for seed in SEEDS)
    left = [explore(values, Random(seed), SPACE, "resample:chance=0.25") for seed in range(400)]
    moved = [one[name] > 0 for one in left for name in one]
    assert statistics.mean(moved) == pytest.approx(0.25, abs=0.05)


def test_the_worst_quarter_copies_the_best_quarter_uniformly() -> None:
    records = members(*map(float, range(8)))
    drawn = Counter(
        pair for seed in range(1000) for pair in exploit(records, Random(seed), "truncation").items()
    )
    assert drawn.keys() == {(one, other) for one in ("p0", "p1") for other in ("p6", "p7")}
    assert all(400 < times < 600 for times in drawn.values())
    assert exploit(members(1.0, 2.0, 3.0), Random(0)) == {"p0": "p2"}, "of few members, one copies"
    assert exploit(members(1.0), Random(0)) == exploit([], Random(0)) == {}


def test_binary_tournaments_need_a_difference() -> None:
    records = members(0.0, 1.0, 3.0)
    drawn = Counter(pair for seed in range(900) for pair in exploit(records, Random(seed), "binary").items())
    assert drawn.keys() == {("p0", "p1"), ("p0", "p2"), ("p1", "p2")}
    assert all(350 < times < 550 for times in drawn.values())
    needed = [exploit(records, Random(seed), "binary:threshold=2") for seed in range(50)]
    assert {pair for one in needed for pair in one.items()} == {("p0", "p2"), ("p1", "p2")}


@pytest.mark.parametrize("how", ["truncation", "binary"])
def test_ties_are_broken_at_random_and_alike_for_all(how: str) -> None:
    records, drawn = members(1.0, 1.0, 1.0, 1.0), Counter[str]()
    for seed in range(400):
        copies = exploit(records, Random(seed), how)
        assert copies == exploit(reversed(records), Random(seed), how), "whatever the order"
        drawn.update(copies.keys())
    assert min(drawn[one.peer] for one in records) > 50
    assert ranked(members(1.0, 2.0), Random(0))[0].peer == "p1"


def test_perturbed_values_stay_in_their_space() -> None:
    space: dict[str, Space] = {"lr": Log(1e-4, 1e-1), "batch": Choice(16, 32, 64), "drop": Uniform(0, 0.5)}
    for seed in SEEDS:
        chance = Random(seed)
        values = {name: one.draw(chance) for name, one in space.items()}
        for _ in range(50):
            before, values = values, explore(values, chance, space, "perturb:factor=0.2")
            assert all(space[name].holds(values[name]) for name in space)
            factor = values["lr"] / before["lr"]
            assert (
                factor == pytest.approx(0.8) or factor == pytest.approx(1.2) or values["lr"] in (1e-4, 1e-1)
            )
            assert abs(values["batch"] - before["batch"]) <= 1
    assert [space["batch"].value(at) for at in (0.0, 1.0, 2.0)] == [16, 32, 64]
    assert not any(space["batch"].holds(at) for at in (-1.0, 0.5, 3.0, float("inf")))
    assert not space["lr"].holds(0.2)
    assert not space["lr"].holds(float("nan"))


def test_logarithms_are_drawn_uniformly() -> None:
    chance, space = Random(0), Log(1e-5, 1e-1)
    drawn = [space.draw(chance) for _ in range(2000)]
    assert [sum(10.0**low <= one < 10.0 ** (low + 1) for one in drawn) for low in range(-5, -1)] == [
        pytest.approx(500, abs=80)
    ] * 4


def test_specs_and_spaces_say_what_is_wrong() -> None:
    assert EXPLOITS.parse("truncation").spec == "truncation:fraction=0.25"
    assert EXPLORES.parse("resample:chance=.5").spec == "resample:chance=0.5"
    for spec, told in (
        ("trunc", "unknown way to exploit 'trunc'; .*did you mean 'truncation'"),
        ("truncation:fraction=0.6", "truncation: expected fraction of at most 0.5, got 0.6"),
        ("binary:fraction=1", "binary has no option 'fraction'"),
    ):
        with pytest.raises(ValueError, match=told):
            exploit(members(1.0, 2.0), Random(0), spec)
    for spec, told in (
        ("perturb:factor=1.1", "perturb: expected factor of at most 1, got 1.1"),
        ("resample:chance=-1", "chance is a decimal number"),
    ):
        with pytest.raises(ValueError, match=told):
            explore({"h0": 0.0, "h1": 0.0}, Random(0), SPACE, spec)
    with pytest.raises(ValueError, match="the smaller one first"):
        Uniform(1, 0)
    with pytest.raises(ValueError, match="expected numbers above 0"):
        Log(0, 1)
    with pytest.raises(ValueError, match="at least two options"):
        Choice(1)
