"""What a stranger's word may have this peer dial, in virtual time."""

from __future__ import annotations

import ipaddress
import itertools
import random

import pytest

from equipoise.dht.dialpolicy import (
    MAX_NEW_HOSTS,
    MAX_PAUSE_SECONDS,
    MAX_TRIES_PER_HOST,
    WINDOW_SECONDS,
    DialPolicy,
)

THIRD = ("203.1.1.1", 4001)
HOME = ipaddress.ip_network("192.168.0.0/16")


@pytest.fixture
def policy() -> DialPolicy:
    return DialPolicy(lambda: [HOME])


def tried(
    policy: DialPolicy, peer: str, place: tuple[str, int], now: float, failure: str = "refused"
) -> bool:
    """Try at once, in vain unless `failure` is empty; whether the policy allowed it."""
    if policy.begin(peer, place, now) is not None:
        return False
    policy.end(peer, place, now, failure)
    return True


@pytest.mark.parametrize("peers", [60, 4000])
def test_records_that_name_one_place_have_it_tried_seven_times_a_minute(policy, peers: int) -> None:
    tries = [
        now / 10
        for now in range(600)
        for peer in range(peers // 60)
        if tried(policy, f"{peer}", THIRD, now / 10)
    ]
    assert tries == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0]
    later = [now for now in range(100, 700) if tried(policy, "another", THIRD, float(now))]
    assert all(after - before >= MAX_PAUSE_SECONDS for before, after in itertools.pairwise(later))


def test_records_that_name_all_ports_of_a_host_have_few_tried(policy) -> None:
    tries = [
        now
        for now in range(180)
        for port in range(1, 100)
        if tried(policy, f"{now} {port}", (THIRD[0], port), float(now))
    ]
    for second in range(180):
        assert sum(second <= now < second + WINDOW_SECONDS for now in tries) <= MAX_TRIES_PER_HOST


def test_new_hosts_tried_in_a_minute_are_bounded(policy) -> None:
    rng = random.Random(1)
    hosts = [f"203.{number // 250}.{number % 250}.1" for number in range(4000)]
    rng.shuffle(hosts)
    tries = [
        now / 10 for now in range(600) for host in hosts[now::600] if tried(policy, host, (host, 1), now / 10)
    ]
    assert len(tries) == MAX_NEW_HOSTS
    assert tried(policy, "honest", THIRD, 2 * WINDOW_SECONDS)


def test_a_large_swarm_is_met_as_fast_as_it_answers(policy) -> None:
    for number in range(300):
        assert tried(policy, f"{number}", (f"203.2.{number // 250}.{number % 250}", 1), 0.0, failure="")
    for port in range(1, 300):
        assert tried(policy, f"{port}", ("127.0.0.1", port), 0.0, failure="")


def test_tries_under_way_are_waited_for_and_ended_ones_are_not(policy) -> None:
    for port in range(1, MAX_TRIES_PER_HOST + 1):
        assert policy.begin(f"{port}", (THIRD[0], port), 0.0) is None
    crowded = policy.begin("next", (THIRD[0], 99), 0.0)
    assert crowded is not None
    assert crowded.passing
    policy.end("1", (THIRD[0], 1), 0.0)
    assert policy.begin("next", (THIRD[0], 99), 0.0) is None
    for port in range(2, MAX_TRIES_PER_HOST + 1):
        policy.end(f"{port}", (THIRD[0], port), 0.0, "refused")
    policy.end("next", (THIRD[0], 99), 0.0, "refused")
    crowded = policy.begin("late", (THIRD[0], 100), 1.0)
    assert crowded is not None
    assert not crowded.passing
    assert f"{MAX_TRIES_PER_HOST} tries within a minute" in crowded.reason


def test_the_last_real_cause_stays_the_reason(policy) -> None:
    assert tried(policy, "peer", THIRD, 0.0, "nobody listens there")
    refusal = policy.begin("other", THIRD, 0.5)
    assert refusal is not None
    assert refusal.reason == "nobody listens there"


def test_strangers_do_not_hinder_a_peer_that_was_met_at_the_host(policy) -> None:
    host, port = THIRD
    policy.meet("honest", host, 0.0)
    for now in range(100):
        for number in range(30):
            tried(policy, f"stranger {number}", (host, port + number % 2), float(now), "wrong peer")
    assert tried(policy, "honest", THIRD, 100.0, "refused")
    assert not tried(policy, "honest", THIRD, 100.5)
    assert tried(policy, "honest", THIRD, 101.0)
    assert tried(policy, "honest", (host, port + 1), 101.0)


def test_a_peer_that_comes_back_is_dialled_after_at_most_as_long_as_it_was_away(policy) -> None:
    for away in (0.5, 3.0, 20.0, 50.0):
        place = ("203.3.1.1", int(away * 10))
        now = 0.0
        while now < away:
            tried(policy, "peer", place, now)
            now += 0.1
        while not tried(policy, "peer", place, now, failure=""):
            now += 0.1
        assert now <= 2 * away + 1.1


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("203.1.1.1", True),
        ("2a00:1450::1", True),
        ("seed.example.org", True),
        ("127.0.0.1", True),
        ("192.168.7.1", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
    ],
)
def test_private_addresses_are_dialled_within_ones_own_network_only(policy, host: str, allowed: bool) -> None:
    assert policy.permits(host) is allowed
    assert tried(policy, "stranger", (host, 1), 0.0) is allowed
