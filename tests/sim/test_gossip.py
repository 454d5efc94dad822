"""Peers that gossip, in virtual time: values come together as theory says, and faults break no promise."""

from __future__ import annotations

import pytest

from fakes.gossip import mix, mixes_as_expected, storm

PEERS, SEEDS = 64, 4


@pytest.mark.slow
def test_values_come_together_as_those_of_random_pairs_do() -> None:
    found = [mix(PEERS, "random", 4 * PEERS, seed) for seed in range(SEEDS)]
    error = {done: sum(one.error[done] for one in found) / SEEDS for done in (64, 128, 256)}
    assert mixes_as_expected(error, PEERS), error
    assert not any(one.in_doubt for one in found)


@pytest.mark.parametrize("peers", [32, pytest.param(256, marks=pytest.mark.slow)])
def test_an_exchange_takes_as_many_messages_whatever_the_number_of_peers(peers: int) -> None:
    few, many = (mix(count, "random", 4 * count, 0).messages for count in (8, peers))
    assert many == pytest.approx(few, rel=0.25)


def test_a_ring_mixes_more_slowly() -> None:
    ring, exponential = (mix(24, topology, 96, 0).error[96] for topology in ("ring", "exponential"))
    assert ring > 2 * exponential


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_promise_is_broken_while_peers_stop_die_and_come(seed: int) -> None:
    assert storm(seed, 200).ok >= 200


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_hundred_thousand_exchanges_in_a_storm() -> None:
    done = failed = doubtful = 0
    for seed in range(100, 200):
        world = storm(seed, 1000)
        done, failed, doubtful = done + world.ok, failed + world.failed, doubtful + world.in_doubt
    print(f"{done} exchanges, {failed} failed, {doubtful} in doubt")
    assert done >= 100_000
    assert doubtful < done / 100
