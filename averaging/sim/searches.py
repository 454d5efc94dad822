"""Which small groups are explored wholly, and under which faults."""

from __future__ import annotations

from dataclasses import replace

from equipoise.averaging.sim.explore import Search

WEIGHTS = (1.0, 2.0, 3.0, 4.0)

OBSERVER_LAST = (1.0, 2.0, 0.0)


def crashes_and_orders(size: int) -> list[Search]:
    """Groups of `size`: every owner of the part, every crash of all but one, every order with and without overtaking.

    Where a minority crashes, everyone else must succeed.
    """
    minority = (size - 1) // 2
    searches = []
    for owner in range(size):
        plain = Search(WEIGHTS[:size], owner)
        for any_order in (False, True):
            searches.append(replace(plain, any_order=any_order, crashes=size - 1))
            searches.append(replace(plain, any_order=any_order, crashes=minority, must_succeed=True))
    if size == 3:
        searches += [
            Search(OBSERVER_LAST, 0, crashes=2, any_order=True),
            Search(OBSERVER_LAST, 2, crashes=2, any_order=True),
            Search(WEIGHTS[:3], 0, dialable=0b001, crashes=2, any_order=True),
            Search(WEIGHTS[:3], 1, dialable=0b011, crashes=2, any_order=True),
        ]
    return searches


def further_faults(size: int) -> list[Search]:
    """The same groups with connections that break, frames that come twice, and pauses; minutes for three members."""
    searches = []
    for owner in range(size):
        plain = Search(WEIGHTS[:size], owner)
        if size == 2:
            everything = replace(plain, crashes=1, cuts=1, blips=1, duplicates=1, early=1)
            searches += [everything, replace(everything, any_order=True)]
            continue
        searches += [
            replace(plain, cuts=1, must_succeed=True),
            replace(plain, blips=1, must_succeed=True),
            replace(plain, duplicates=2, must_succeed=True),
            replace(plain, crashes=1, duplicates=1, must_succeed=True),
            replace(plain, crashes=1, early=1, must_succeed=True),
            replace(plain, crashes=1, cuts=1),
            replace(plain, crashes=1, blips=1),
        ]
    return searches
