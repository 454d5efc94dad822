"""A peer's knowledge of the others, and the wait for parked joins, each by itself."""

from __future__ import annotations

import pytest

from equipoise.averaging.matchmaking.group_builder import FACTOR, MARGIN, GroupBuilder, ParkedJoin
from equipoise.averaging.matchmaking.membership import (
    MAX_PEERS,
    MAX_SUSPECT_SECONDS,
    SUSPECT_SECONDS,
    Membership,
)
from equipoise.averaging.options import Needs
from equipoise.averaging.timing import GRACE
from fakes.matchmaking import SPEC, asks, closed_without, join, record_of, roles


def knows(*names: str) -> Membership:
    one = Membership("alice", SPEC, 4)
    one.see([record_of(name) for name in names], 0.0)
    for name in names[:8]:
        one.hear(name, 0.0)
    return one


def test_each_loss_in_a_row_doubles_the_time_without_questions() -> None:
    one, now, waits = knows("bob"), 0.0, []
    for _ in range(6):
        one.lose("bob", now)
        low, high = now, now + 2 * MAX_SUSPECT_SECONDS
        while high - low > 0.01:
            middle = (low + high) / 2
            low, high = (middle, high) if one.suspects("bob", middle) else (low, middle)
        waits.append(high - now)
        now = high
    assert waits == pytest.approx(
        [min(SUSPECT_SECONDS * 2**n, MAX_SUSPECT_SECONDS) for n in range(6)], abs=0.02
    )


def test_a_flooded_directory_fills_no_memory() -> None:
    one = knows(*(f"peer{n}" for n in range(MAX_PEERS + 9)))
    assert one.knows("peer0")
    assert not one.knows(f"peer{MAX_PEERS}")


def test_one_mate_that_boasts_does_not_change_the_believed_round() -> None:
    one = knows("bob", "carol", "dave")
    one.shared(["bob", "carol", "dave"])
    for name, round in (("bob", 5), ("carol", 6), ("dave", 900)):
        one.advance(name, round)
    assert one.believed_round(1.0) == 6


def test_a_join_after_long_waits_of_others_still_gets_in() -> None:
    builder = GroupBuilder(0, Needs(4))
    for name, arrived in (("bob", 0.0), ("carol", 0.1), ("dave", 9.0)):
        builder.park(ParkedJoin(join(name), arrived, 1.0, 0))
    assert builder.out_of_patience() == 9.0 + GRACE


def test_a_member_that_comes_after_the_close_teaches_how_late_it_was() -> None:
    coordinator, second, rest = roles(3)
    one, _ = closed_without(rest[0], coordinator, second)
    for now in (4.5, 6.0):
        one.handle(asks(rest[0]), now)
        assert one.context.straggler_wait.wait == pytest.approx(3.5 * FACTOR + MARGIN), "once"
