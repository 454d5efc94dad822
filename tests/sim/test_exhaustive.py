"""Every order and every crash of groups of two and three, wholly.

More faults, and these with every owner of the part, for minutes: `pytest -m slow tests/sim`, or
`scripts/simulate.py --exhaustive 3`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.core import Violation
from simulator.explore import Explorer
from simulator.searches import Search, crashes_and_orders, further_faults


def at_length(search: Search) -> bool:
    """Whether a search takes seconds; by default the seeds of `test_seeds.py` meet the same faults."""
    if len(search.weights) == 3:
        return search.owner > 1 or (search.any_order and search.crashes + search.owner > 0)
    return search.cuts > 0


def named(searches: list[Search]) -> list[object]:
    slow = {True: [pytest.mark.slow], False: []}
    return [pytest.param(search, id=search.describe(), marks=slow[at_length(search)]) for search in searches]


@pytest.mark.parametrize("search", named([*crashes_and_orders(2), *further_faults(2)]))
def test_two_members(search: Search) -> None:
    assert Explorer(search).run().ends["oo"]


@pytest.mark.parametrize("search", named(crashes_and_orders(3)))
def test_three_members(search: Search) -> None:
    findings = Explorer(search).run()
    assert findings.ends["ooo"]
    if search.must_succeed:
        assert not any("f" in ends for ends in findings.ends)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("search", named(further_faults(3)))
def test_three_members_further_faults(search: Search) -> None:
    assert Explorer(search).run().ends["ooo"]


def test_a_broken_promise_is_told_with_the_way_there() -> None:
    search = Search((1.0, 2.0), crashes=1, must_succeed=True)
    with pytest.raises(Violation, match=r"(?s)failed: 1 of 2 members left.*Search\(.*after\n.*b -> a: lost"):
        Explorer(search).run()


def test_the_order_of_search_does_not_change_what_is_found() -> None:
    search = Search((1.0, 2.0, 3.0), owner=1, crashes=1)
    one, other = Explorer(search).run(), Explorer(replace(search)).run()
    assert one == other
