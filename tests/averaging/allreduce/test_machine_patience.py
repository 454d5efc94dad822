"""Waiting for who is slow but delivers, and telling the others so. On whole rounds: tests/sim/test_slow.py."""

from __future__ import annotations

import pytest

from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.allreduce.endpoint import Endpoint
from equipoise.averaging.allreduce.events import BytesReceived, PeerLost, Woke
from equipoise.averaging.allreduce.failure_detector import (
    GRACE_SECONDS,
    MIN_BYTES_PER_SECOND,
    SLOWNESS,
)
from equipoise.averaging.timing import HEARTBEAT_SECONDS, STALL_SECONDS
from fakes.one_member import ALL, TIMEOUT, A, B, C, Table, ends, recipients, sent
from simulator.scenario import group_of

ENOUGH = int(MIN_BYTES_PER_SECOND * STALL_SECONDS)


def waiting_for_c(me: int, count: int = ENOUGH) -> Table:
    """An owner that has all but C's contribution, of which so many bytes have come in before a stall is due."""
    table = Table(me, owners=(A, B))
    table.contributes(A if me == B else B, me)
    table.now = STALL_SECONDS - 0.1
    table.tell(BytesReceived(C, count))
    return table


def test_a_member_that_delivers_is_neither_late_nor_a_stall() -> None:
    table = waiting_for_c(B)
    assert table.stall() == []
    assert table.machine._attendance.late == 0
    assert table.machine.deadline == 2 * STALL_SECONDS


def test_a_member_that_trickles_is_late() -> None:
    table = waiting_for_c(B, ENOUGH // 2)
    assert sent(table.stall(), wire.Report) == [(A, wire.Report(0, 0, 0b011))]


def test_bytes_of_who_is_not_waited_for_hold_nobody() -> None:
    table = waiting_for_c(B, 0)
    table.tell(BytesReceived(A, 10 * ENOUGH))
    assert sent(table.stall(), wire.Report)


def test_an_owner_tells_its_leader_that_it_waits_once_a_second() -> None:
    table = Table(B, owners=(A, B))
    table.contributes(A, 1)
    said = []
    for tick in range(1, 17):
        table.now = tick / 4
        said += sent(table.tell(BytesReceived(C, ENOUGH)), wire.Waiting)
    assert said == [(A, wire.Waiting())] * 4


def test_a_leader_does_not_replace_an_owner_that_waits_and_passes_its_word_on() -> None:
    table = Table(A, owners=(B,))
    for _ in range(4):
        table.now += 1.9
        actions = table.says(B, wire.Waiting())
        assert recipients(actions, wire.Waiting) == [B, C]
        actions = table.stall()
        assert not sent(actions, wire.Plan)
    assert sent(table.says(B, wire.Report(0, 0, ALL)), wire.Propose)


def test_a_leader_that_waits_is_not_unseated_for_half_of_the_timeout() -> None:
    table = Table(B, owners=(A,))
    opened = []
    while table.now < TIMEOUT - STALL_SECONDS:
        table.now = table.machine.deadline - 0.1
        table.says(A, wire.Waiting())
        if sent(table.stall(), wire.Prepare):
            opened.append(table.now)
    assert opened
    assert opened[0] > TIMEOUT / 2


def test_the_slowest_has_a_multiple_of_what_the_others_needed() -> None:
    table = Table(B, owners=(B,), weights=(1, 1, 1, 1))
    table.now = 0.5
    table.contributes(A)
    table.contributes(3)
    reports: list[tuple[int, wire.RoundMessage]] = []
    while not [one for _, one in reports if one == wire.Report(0, 0, 0b1011)]:
        table.now += 0.25
        reports = sent(table.tell(BytesReceived(C, ENOUGH)) + table.wake(), wire.Report)
        assert table.now < TIMEOUT
    first_look = 0.75
    allowed = SLOWNESS * first_look + GRACE_SECONDS
    assert allowed <= table.now - first_look <= allowed + 0.25


def test_a_partner_that_stops_within_a_part_is_given_up_when_it_is_silent() -> None:
    for silent in (False, True):
        table = Table(A, owners=(A, B), weights=(1, 1))
        table.tell(BytesReceived(B, ENOUGH))
        table.stall()  # B delivered, so this is no stall.
        table.now += 0.1
        fallen = ends(table.tell(PeerLost(B, "why", silent=silent)))
        assert bool(fallen) == silent, "a broken channel may be opened again"


@pytest.mark.parametrize("pause", [0.0, 1.5, 3.0, 20.0])
def test_time_in_which_this_process_stood_still_blames_nobody(pause: float) -> None:
    endpoint = Endpoint(group_of((A, B), (1, 1, 1)), A, 0.0, TIMEOUT)
    now = HEARTBEAT_SECONDS
    endpoint.start(0.0)
    endpoint.handle(Woke(), now)
    now += HEARTBEAT_SECONDS + pause
    endpoint.handle(Woke(), now)  # Before the frames that came meanwhile are read.
    assert endpoint.machine.findings.notes == []
    while not endpoint.machine.findings.notes:  # From then on, silence is noticed as fast as ever.
        now = endpoint.deadline
        endpoint.handle(Woke(), now)
    assert now == pytest.approx(STALL_SECONDS + pause)
