"""Rounds from seeds; `scripts/simulate.py` runs thousands. A seed that fails is kept below as a regression."""

from __future__ import annotations

import pytest

from equipoise.averaging.allreduce.events import Finish
from simulator.scenario import draw_scenario
from simulator.world import Report, World

BLOCK = 50
"""Seeds per test: a failure names its block at once, and the seed in its message."""

RECOVERY_SECONDS = 30.0
"""From the last fault to the core's success. Usual are 0 to 7; duelling leaders that back off take longer."""


def blocks(first: int, by_default: int, end: int, size: int = BLOCK) -> pytest.MarkDecorator:
    """Blocks of the seeds from `first` to `end`; those from `by_default` on only with `-m slow`."""
    slow = [pytest.param(start, marks=pytest.mark.slow) for start in range(by_default, end, size)]
    return pytest.mark.parametrize("first", [*range(first, by_default, size), *slow])


def simulate(seed: int, sizes: tuple[int, int], live: bool, keep_story: bool = False) -> Report:
    try:
        return World(draw_scenario(seed, sizes, live), keep_story).run()
    except Exception as error:
        error.add_note(f"seed {seed}, sizes {sizes}, live={live}")
        raise


@blocks(0, 100, 400)
def test_whatever_goes_wrong_nobody_is_wrong(first: int) -> None:
    for seed in range(first, first + BLOCK):
        simulate(seed, (2, 7), live=False)


@blocks(0, 100, 400)
def test_a_core_that_is_spared_succeeds(first: int) -> None:
    for seed in range(first, first + BLOCK):
        report = simulate(seed, (2, 7), live=True)
        assert report.seconds < report.calm_at + RECOVERY_SECONDS, seed


@pytest.mark.parametrize("live", [False, True])
@blocks(1000, 1000 + BLOCK // 2, 1000 + 2 * BLOCK, BLOCK // 2)
def test_groups_of_up_to_sixteen(first: int, live: bool) -> None:
    for seed in range(first, first + BLOCK // 2):
        simulate(seed, (8, 16), live)


@pytest.mark.parametrize(
    ("seed", "sizes"),
    [
        pytest.param(
            2536, (2, 7), id="the finished stopped their signs of life before all had heard the commit"
        ),
        pytest.param(4085, (2, 7), id="a mean that another had replaced was never reduced again"),
    ],
)
def test_what_once_failed(seed: int, sizes: tuple[int, int]) -> None:
    simulate(seed, sizes, live=True)


def test_a_seed_tells_the_same_story_twice() -> None:
    one, other = (simulate(7, (5, 9), live=False, keep_story=True) for _ in range(2))
    assert one.story
    assert one == other


def test_scenarios_are_varied() -> None:
    scenarios = [draw_scenario(seed) for seed in range(200)]
    assert {scenario.group.size for scenario in scenarios} == set(range(2, 17))
    assert any(0 in scenario.group.weights for scenario in scenarios)
    assert any(scenario.group.dialable != scenario.group.everyone for scenario in scenarios)
    struck = {fault.method for scenario in scenarios for _, fault in scenario.faults}
    assert struck >= {World.kill, World.corrupt}
    assert any(scenario.weather.lingers for scenario in scenarios)


def test_most_calm_rounds_succeed_at_once() -> None:
    calm = [seed for seed in range(80) if not draw_scenario(seed, (2, 16), live=True).faults]
    assert len(calm) > 10
    for seed in calm:
        report = simulate(seed, (2, 16), live=True)
        assert all(isinstance(end, Finish) for end in report.ends), seed
