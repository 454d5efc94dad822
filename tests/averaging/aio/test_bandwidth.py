"""What a peer can send, from a counter of what was delivered."""

from __future__ import annotations

import pytest

from equipoise.averaging.aio.bandwidth import IDLE_BYTES, MIN_BYTES, WINDOW_SECONDS, Bandwidth


def send(bandwidth: Bandwidth, rate: float, seconds: float, at: float = 0.0, swallowed: int = 0) -> float:
    """One burst at `rate` bytes per second, sampled every 50 ms; returns when it ended."""
    start, now = at, at
    while now < start + seconds:
        bandwidth.observe(
            now, int(1e9 * start) + (swallowed if now > start else 0) + int(rate * (now - start))
        )
        now += 0.05
    bandwidth.end_burst(now, int(1e9 * start) + swallowed + int(rate * (now - start)))
    return now


def test_nothing_is_known_before_anything_was_sent() -> None:
    assert Bandwidth().estimate == 0.0


RATES = [mbit * 1e6 / 8 for mbit in (1, 5, 10, 20, 200, 1_000, 10_000)]


@pytest.mark.parametrize("rate", RATES)
def test_a_steady_link_with_a_backlog_is_measured(rate: float) -> None:
    bandwidth = Bandwidth()
    send(bandwidth, rate, 20.0)
    assert bandwidth.estimate == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize(("bucket", "lump"), [(0, 64 * 1024), (256 * 1024, 1), (32 * 1024, 16 * 1024)])
def test_a_link_that_lets_bytes_pass_in_lumps_is_measured_in_five_rounds(
    rate: float, bucket: int, lump: int
) -> None:
    bandwidth, delivered, now = Bandwidth(), 0, 0.0
    for _ in range(5):
        size = max(int(rate), 5 * MIN_BYTES)
        passed, began = 0, 0.0
        while passed < size:
            bandwidth.observe(now, delivered + passed)
            now += 0.05
            began += 0.05
            passed = min(size, int(bucket + rate * began) // lump * lump)
        delivered += passed
        bandwidth.end_burst(now, delivered)
        now += 1.0
    assert bandwidth.estimate == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize("rate", RATES)
def test_bursts_of_any_length_are_measured_by_looks_at_their_own_pace(rate: float) -> None:
    bandwidth, now = Bandwidth(), 0.0
    size = max(int(rate * 0.04), 5 * MIN_BYTES)
    for number in range(5):
        began, passed = now, 0
        while passed < size - IDLE_BYTES:
            bandwidth.observe(now, number * size + passed)
            now += bandwidth.sample_seconds
            passed = min(size, int(rate * (now - began)))
        bandwidth.end_burst(now, number * size + passed)
        now += 1.0
    assert bandwidth.estimate == pytest.approx(rate, rel=0.2)


def test_a_slow_link_is_measured_over_several_rounds_with_few_bytes_each() -> None:
    bandwidth, now = Bandwidth(), 0.0
    for _ in range(5):
        now = send(bandwidth, 125e3, 1.0, now)
    assert bandwidth.estimate == pytest.approx(125e3, rel=0.05)


def test_a_link_that_is_never_idle_is_measured() -> None:
    bandwidth = Bandwidth()
    for tick in range(400):
        bandwidth.observe(tick * 0.05, int(125e3 * tick * 0.05))
    assert bandwidth.estimate == pytest.approx(125e3, rel=0.05)


def test_a_link_that_slows_down_is_known_after_three_rounds_of_two_bursts_each() -> None:
    bandwidth, now = Bandwidth(), 0.0
    now = send(bandwidth, 100e6, 1.0)
    for _ in range(2 * 3):
        now = send(bandwidth, 10e6, 1.0, now + 1)
    assert bandwidth.estimate == pytest.approx(10e6, rel=0.02)


def test_late_receivers_hide_nothing_if_the_link_was_full_for_a_fifth_of_the_bytes() -> None:
    """A fast member of a group whose others acknowledge late: most of the time next to nothing passes."""
    bandwidth, now, delivered = Bandwidth(), 0.0, 0
    for _ in range(5):
        for rate, seconds in ((25e6, 0.05), (4e6, 0.2), (2e6, 0.3), (0.1e6, 3.0)):
            until = now + seconds
            while now < until:
                bandwidth.observe(now, delivered)
                step = bandwidth.sample_seconds
                now, delivered = now + step, delivered + int(rate * step)
        bandwidth.end_burst(now, delivered)
        now += 1.0
    assert bandwidth.estimate == pytest.approx(25e6, rel=0.2)


def test_a_burst_shorter_than_a_window_counts_as_a_whole() -> None:
    bandwidth = Bandwidth()
    bandwidth.observe(0.0, 0)
    bandwidth.end_burst(WINDOW_SECONDS / 2, 4 * MIN_BYTES)
    assert bandwidth.estimate == pytest.approx(4 * MIN_BYTES / (WINDOW_SECONDS / 2))


def test_a_few_bytes_say_nothing() -> None:
    bandwidth = Bandwidth()
    bandwidth.observe(0.0, 0)
    bandwidth.end_burst(5.0, MIN_BYTES - 1)
    assert bandwidth.estimate == 0.0
