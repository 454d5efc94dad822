"""A peer that has fallen silent is asked, and given up after two questions without an answer."""

from __future__ import annotations

from equipoise.dht.bootstrap import MAX_ASKED, QUIET_SECONDS, Pulse


def test_only_the_silent_are_asked_and_each_once_at_a_time() -> None:
    pulse = Pulse()
    pulse.heard("a", 0.0)
    pulse.heard("b", QUIET_SECONDS - 1)
    assert pulse.whom(["a", "b", "never heard"], QUIET_SECONDS) == ["a"]
    assert pulse.whom(["a", "b"], QUIET_SECONDS) == []
    pulse.answered("a", QUIET_SECONDS)
    assert pulse.whom(["a", "b"], QUIET_SECONDS + 0.5) == []


def test_two_misses_in_a_row_end_it() -> None:
    pulse = Pulse()
    pulse.heard("a", 0.0)
    assert pulse.whom(["a"], 10.0) == ["a"]
    assert not pulse.missed("a")
    assert pulse.whom(["a"], 10.1) == ["a"], "asked again at once"
    pulse.answered("a", 11.0)
    assert pulse.whom(["a"], 20.0) == ["a"]
    assert not pulse.missed("a")
    assert pulse.whom(["a"], 20.0) == ["a"]
    assert pulse.missed("a")
    assert pulse.whom(["a"], 60.0) == []


def test_whoever_calls_is_not_asked_and_what_is_not_connected_is_forgotten() -> None:
    pulse = Pulse()
    pulse.heard("a", 0.0)
    pulse.heard("a", 9.0)
    assert pulse.whom(["a"], 10.0) == []
    assert pulse.whom([], 20.0) == []
    assert pulse.whom(["a"], 20.0) == []


def test_in_doubt_all_are_asked() -> None:
    pulse = Pulse()
    pulse.heard("a", 0.0)
    pulse.heard("b", 1.0)
    pulse.doubt()
    assert sorted(pulse.whom(["a", "b"], 1.0)) == ["a", "b"]
    assert pulse.whom(["a", "b"], 1.0) == []


def test_a_large_swarm_is_asked_a_few_at_a_time_the_longest_silent_first() -> None:
    pulse = Pulse()
    peers = [f"p{number:03}" for number in range(5 * MAX_ASKED)]
    for number, peer in enumerate(reversed(peers)):
        pulse.heard(peer, number / 1000)
    asked = pulse.whom(peers, 100.0)
    assert asked == peers[::-1][:MAX_ASKED]
    assert pulse.whom(peers, 100.0) == []
