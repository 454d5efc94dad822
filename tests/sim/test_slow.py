"""Slow links: who delivers is waited for, who trickles is not, and nobody holds the others until their timeout."""

from __future__ import annotations

from random import Random

import pytest

from equipoise.averaging.allreduce.events import Fail, Finish
from equipoise.averaging.allreduce.failure_detector import (
    GRACE_SECONDS,
    MIN_BYTES_PER_SECOND,
    SLOWNESS,
    Attendance,
    Awaited,
)
from equipoise.averaging.timing import MAX_SILENCE_SECONDS, STALL_SECONDS
from fakes.seeds import few_and_many
from simulator.faults import Fault, When
from simulator.network import PART_BYTES, Weather
from simulator.scenario import group_of, starts_of
from simulator.world import Report, Scenario, World

WEIGHTS = (1.0, 2.0, 3.0, 4.0)
MEMBERS = len(WEIGHTS)
TIMEOUT = 200.0
EVERYONE = (1 << MEMBERS) - 1
VICTIM = 2

TRICKLE = 2 * PART_BYTES / MIN_BYTES_PER_SECOND
"""Seconds per part at half the least rate."""


def scenario(
    seed: int, transfer: tuple[float, float], slow: Fault | None = None, leader: int = 0, size: int = 0
) -> Scenario:
    chance = Random(seed)
    group = group_of((at // 3 for at in range(3 * MEMBERS)), WEIGHTS, leader=leader, encoded_size=size)
    starts = starts_of(chance, group, TIMEOUT)
    faults = ((When(seconds=0.0), slow),) if slow else ()
    return Scenario(seed, group, starts, Weather((0.0005, 0.005), transfer), faults, core=EVERYONE)


def counted(report: Report) -> set[int]:
    return {end.decision.contributors for end in report.ends if isinstance(end, Finish)}


def outgoing(*senders: int) -> tuple[tuple[int, int], ...]:
    return tuple((one, other) for one in senders for other in range(MEMBERS) if one != other)


@pytest.mark.parametrize("transfer", [(2.5, 3.0), (2.1, 7.0)])
@few_and_many(6, 15)
def test_where_all_links_are_slow_everyone_counts(transfer: tuple[float, float], seeds: range) -> None:
    for seed in seeds:
        report = World(scenario(seed, transfer)).run()
        assert counted(report) == {EVERYONE}, seed


@pytest.mark.parametrize("leader", [0, VICTIM])
@few_and_many(6, 15)
def test_one_that_is_four_times_slower_counts(leader: int, seeds: range) -> None:
    for seed in seeds:
        report = World(scenario(seed, (1.0, 1.2), Fault(World.slow, outgoing(VICTIM), 4.5), leader)).run()
        assert counted(report) == {EVERYONE}, seed


@pytest.mark.parametrize("leader", [0, VICTIM])
@pytest.mark.parametrize("transfer", [TRICKLE, PART_BYTES / MIN_BYTES_PER_SECOND / 1.5, 2.0])
@few_and_many(6, 15)
def test_one_that_trickles_costs_seconds_and_not_the_round(
    leader: int, transfer: float, seeds: range
) -> None:
    for seed in seeds:
        made = scenario(seed, (0.01, 0.02), Fault(World.slow, outgoing(VICTIM), transfer), leader)
        report = World(made).run()
        # What the victim says waits behind the part that it writes, and it leads.
        assert report.seconds < (14.0 if leader != VICTIM else 14.0 + 2 * transfer), seed
        assert all(isinstance(report.ends[member], Finish) for member in range(MEMBERS)), seed


@pytest.mark.parametrize("owners", [range(8), range(1, 8)], ids=["owns", "owns nothing"])
@pytest.mark.parametrize("others", [5.0, 50.0, 200.0])
def test_an_uplink_of_1_mbit_counts_beside_seven_fast_ones(others: float, owners: range) -> None:
    """Each member shares its uplink between the seven links on which it sends."""
    group = group_of(owners, [1.0] * 8, encoded_size=len(owners) * PART_BYTES)
    weather, everyone = Weather((0.0005, 0.005), (seconds_per_part(others),) * 2), (1 << 8) - 1
    slow = Fault(World.slow, tuple((0, other) for other in range(1, 8)), seconds_per_part(1.0))
    starts = starts_of(Random(1), group, 120.0)
    report = World(Scenario(1, group, starts, weather, ((When(seconds=0.0), slow),), core=everyone)).run()
    assert counted(report) == {everyone}
    assert report.seconds < 2.2 * seconds_per_part(1.0)


def seconds_per_part(mbit: float) -> float:
    return 7 * PART_BYTES / (mbit * 1e6 / 8)


@pytest.mark.parametrize("leader", [0, VICTIM])
def test_one_that_trickles_into_a_large_vector_leaves_the_others_half_of_their_time(leader: int) -> None:
    slow = Fault(World.slow, outgoing(VICTIM), TRICKLE / 4)
    report = World(scenario(1, (0.01, 0.02), slow, leader, size=1 << 30)).run()
    assert all(isinstance(report.ends[member], Finish) for member in range(MEMBERS) if member != VICTIM)
    assert report.seconds < TIMEOUT / 2 + 14.0


def attendance_at(now: float) -> Attendance:
    return Attendance(group_of((0, 1, 2, 3), WEIGHTS), now, TIMEOUT)


def test_a_trickle_is_a_stall() -> None:
    awaited = Awaited(0b110, 0b1110, dispensable=True)
    attendance = attendance_at(0.0)
    attendance.begin("scatter", 0.0)
    for tick in range(1, 9):
        attendance.received(1, MIN_BYTES_PER_SECOND // 4, awaited, tick / 4)
        attendance.received(2, MIN_BYTES_PER_SECOND // 4 - 1, awaited, tick / 4)
    assert not attendance.stall(awaited, 2.0), "one of them delivers"
    assert attendance.late == 0b100


def test_who_has_delivered_may_rest_for_as_long_as_a_living_member_may_be_silent() -> None:
    awaited = Awaited(0b010, 0b1110, dispensable=True)
    attendance = attendance_at(0.0)
    attendance.begin("scatter", 0.0)
    attendance.received(1, 1 << 20, awaited, 1.0)
    stalls = [at for at in range(1, 20) if attendance.stall(awaited, float(at))]
    assert MAX_SILENCE_SECONDS <= stalls[0] - 1.0 <= MAX_SILENCE_SECONDS + STALL_SECONDS
    assert attendance.late == 0b010


def test_who_is_out_of_reach_does_not_rest() -> None:
    awaited = Awaited(0b010, 0b1110, dispensable=True)
    attendance = attendance_at(0.0)
    attendance.received(1, 1 << 20, awaited, 0.5)
    attendance.lose(1, 1.0, gone=False, silent=False)
    assert attendance.stall(awaited, STALL_SECONDS)


def test_patience_is_measured_by_what_half_of_the_others_needed() -> None:
    attendance = attendance_at(100.0)
    attendance.begin("scatter", 100.0)
    attendance.received(1, 1, Awaited(0b0110, 0b1110), 103.0)
    assert attendance.ends_at == float("inf")
    attendance.received(2, 1, Awaited(0b0100, 0b1110), 105.0)
    assert attendance.ends_at == 105.0 + SLOWNESS * 5.0 + GRACE_SECONDS
    attendance.begin("gather", 106.0)
    assert attendance.ends_at == float("inf")


def test_of_two_one_is_waited_for_as_long_as_it_delivers() -> None:
    attendance = attendance_at(0.0)
    attendance.received(1, 1, Awaited(0b10, 0b10), 50.0)
    assert attendance.ends_at == float("inf")


def test_two_members_on_a_slow_link_finish() -> None:
    group = group_of((0, 0, 0, 1, 1, 1), WEIGHTS[:2])
    starts = starts_of(Random(1), group, TIMEOUT)
    report = World(Scenario(1, group, starts, Weather((0.01, 0.02), (3.0, 9.0)), (), core=0b11)).run()
    assert not [end for end in report.ends if isinstance(end, Fail)]
