"""The draw: how many, in which order, how even, and who takes a dead peer's place."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.averaging.draw import draw

PEERS = tuple(f"12D3KooW{number:04}" for number in range(40))


@pytest.mark.parametrize(
    ("peers", "fraction", "minimum", "drawn"),
    [
        (40, 1.0, 2, 40),
        (40, 0.5, 2, 20),
        (10, 0.29, 2, 2),
        (10, 0.39, 2, 3),
        (40, 0.1, 6, 6),
        (40, 0.0, 1, 1),
        (3, 0.5, 5, 3),
        (0, 1.0, 2, 0),
    ],
)
def test_how_many_are_drawn(peers: int, fraction: float, minimum: int, drawn: int) -> None:
    assert len(draw(PEERS[:peers], "seed", fraction=fraction, minimum=minimum)) == drawn


@given(st.permutations(PEERS[:9]), st.binary(max_size=40))
def test_the_order_is_that_of_the_hashes_whatever_the_order_of_the_peers(
    peers: list[str], seed: bytes
) -> None:
    expected = sorted(PEERS[:9], key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    assert draw(peers, seed, fraction=0.5, minimum=0) == tuple(expected[:4])
    assert draw([*peers, peers[0]], seed, fraction=1, minimum=0) == tuple(expected)


def test_a_lineage_may_be_text() -> None:
    assert draw(PEERS, "ab" * 32, fraction=0.5, minimum=2) == draw(PEERS, b"ab" * 32, fraction=0.5, minimum=2)


def test_a_dead_peer_is_replaced_by_the_next_in_order_and_all_others_stay() -> None:
    order = draw(PEERS, "seed", fraction=1, minimum=0)
    for dead in order[:6]:
        live = [peer for peer in PEERS if peer != dead]
        expected = tuple(peer for peer in order[:7] if peer != dead)
        assert draw(live, "seed", fraction=0.1, minimum=6) == expected


def test_a_dead_peer_that_was_not_drawn_changes_nothing() -> None:
    order = draw(PEERS, "seed", fraction=1, minimum=0)
    live = [peer for peer in PEERS if peer != order[6]]
    assert draw(live, "seed", fraction=0.1, minimum=6) == order[:6]


def test_draws_differ_by_seed_and_are_even() -> None:
    """2,000 draws of 4 of 40: each peer about 200 times; 70 is more than five standard deviations of 13.4."""
    seeds = [hashlib.sha256(bytes([number >> 8, number & 255])).hexdigest() for number in range(2000)]
    draws = [draw(PEERS, seed, fraction=0.1, minimum=2) for seed in seeds]
    assert len(set(draws)) > 1990
    counts = Counter(peer for drawn in draws for peer in drawn)
    first = Counter(drawn[0] for drawn in draws)
    assert all(abs(counts[peer] - 200) < 70 and abs(first[peer] - 50) < 36 for peer in PEERS)


@pytest.mark.parametrize(
    ("fraction", "minimum", "said"),
    [
        (1.5, 2, "fraction from 0 to 1, got 1.5"),
        (-0.1, 2, "fraction from 0 to 1"),
        (float("nan"), 2, "fraction from 0 to 1, got nan"),
        (0.5, -1, "minimum of at least 0 peers, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(fraction: float, minimum: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draw(PEERS, "seed", fraction=fraction, minimum=minimum)
