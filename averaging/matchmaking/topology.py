"""The groups of each round, when the run is larger than a group.

Moshpit all-reduce (Ryabinin et al. 2021, arXiv:2103.03239) puts the peers on a grid of M^d cells and averages along
one axis after the other; d rounds make the mean exact where the grid is full. A half-empty grid is worse than random
groups, so here the grid is dealt like cards. The peers stand in a row, which is cut into as few groups of even sizes as
possible. The next round's row takes one peer from each group in turn. With M^d peers and groups of M, these groups
*are* the lines of the full grid, axis by axis. With any other number of peers, the sizes stay even, no group is smaller
than necessary, and each new group draws evenly from all old ones.

All peers that know the same peers compute the same groups, without a message.

Peers that hold one state cannot be split so: two groups would make two states of it. Their round has one group, with as
many places as a group may have members (`seats`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

PERIOD = 60
"""Rounds after which the deal starts over: a multiple of 1 to 6 axes, so that full grids wrap around exactly."""

MAX_ORDERS = 64
"""Most orders of peers cached: for this round and some others, in the peer's group and in the whole run."""

Groups = list[tuple[str, ...]]


def rank(key: str, peer: str) -> bytes:
    """A peer's place in an order that no peer can choose, and all peers compute alike."""
    return hashlib.sha256(f"{key}\0{peer}".encode()).digest()


@lru_cache(MAX_ORDERS)
def ranked(key: str, peers: tuple[str, ...]) -> tuple[str, ...]:
    """The peers in the order of their ranks."""
    return tuple(sorted(peers, key=lambda peer: rank(key, peer)))


def plan(peers: Iterable[str], round: int, group_size: int) -> Groups:
    """Assign every peer to one group of the round.

    Args:
        peers: PeerIDs, in any order, duplicates ignored.
        round: The round's number.
        group_size: Most peers in a group, at least 2.

    Returns:
        The groups: sizes differ by at most one, and a group of one is left only where an odd number of peers must
        form pairs.
    """
    row = sorted(set(peers), key=lambda peer: rank("row", peer))
    count = -(-len(row) // group_size)
    if count <= 1:
        return [tuple(row)] if row else []
    groups = _cut(row, count)
    for _ in range(round % PERIOD):
        groups = _cut(_deal(groups), count)
    return groups


def seats(peers: Iterable[str], holders: Iterable[str], key: str, group_size: int) -> tuple[str, ...]:
    """The peers that have the places of a group which goes on from a state, the holders first.

    Args:
        peers: PeerIDs of the live peers, in any order.
        holders: PeerIDs of the peers that made the state together: each keeps its place while it lives.
        key: Names the state, alike at all that hold it: the order in which the others take free places.
        group_size: Most peers in a group.
    """
    live, kept = set(peers), frozenset(holders)
    parts = ("row", live & kept), (key, live - kept)
    return tuple(peer for order, part in parts for peer in ranked(order, tuple(sorted(part))))[:group_size]


def _cut(row: Sequence[str], count: int) -> Groups:
    return [tuple(row[index * len(row) // count : (index + 1) * len(row) // count]) for index in range(count)]


def _deal(groups: Groups) -> list[str]:
    sizes = [len(group) for group in groups]
    row = [group[place] for place in range(max(sizes)) for group in groups if place < len(group)]
    # Dealing leaves the first peer first: a first peer that is a group of one would stay alone for ever.
    return row[1:] + row[:1] if min(sizes) == 1 else row
