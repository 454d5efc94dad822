"""Peers that gossip, in virtual time: values come together as theory says, and faults break no promise."""

from __future__ import annotations

import pytest

from simulator.gossip import mix, storm

PEERS, SEEDS = 64, 4

SLACK = 0.75, 1.35
"""For the mean of so few seeds; `scripts/simulate.py --what gossip --seeds 100` comes within a tenth."""


def test_values_come_together_as_those_of_random_pairs_do() -> None:
    found = [mix(PEERS, "random", 4 * PEERS, seed) for seed in range(SEEDS)]
    for rounds in (1, 2, 4):
        error = sum(one.error[rounds * PEERS] for one in found) / SEEDS
        # Least if peers pair off all at once again and again, most if two are drawn for each exchange.
        least = ((PEERS / 2 - 1) / (PEERS - 1)) ** (2 * rounds)
        most = (1 - 1 / (PEERS - 1)) ** (rounds * PEERS)
        assert SLACK[0] * least <= error <= SLACK[1] * most, f"after {rounds * PEERS} exchanges"
    assert not any(one.in_doubt for one in found)


def test_an_exchange_takes_as_many_messages_whatever_the_number_of_peers() -> None:
    few, many = (mix(peers, "random", 4 * peers, 0).messages for peers in (16, 64))
    assert many == pytest.approx(few, rel=0.25)


def test_a_ring_mixes_more_slowly() -> None:
    ring, exponential = (mix(32, topology, 128, 0).error[128] for topology in ("ring", "exponential"))
    assert ring > 2 * exponential


@pytest.mark.parametrize("seed", range(6))
def test_no_promise_is_broken_while_peers_stop_die_and_come(seed: int) -> None:
    assert storm(seed, 200).ok >= 200


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_exchanges_in_a_storm() -> None:
    worlds = [storm(seed, 1000) for seed in range(100, 200)]
    done, failed, doubtful = (
        sum(getattr(world, name) for world in worlds) for name in ("ok", "failed", "in_doubt")
    )
    print(f"{done} exchanges, {failed} failed, {doubtful} in doubt")
    assert done >= 100_000
    assert doubtful < done / 100
