"""From whom peers draw: symmetric, connected, and as many as the topology says."""

from __future__ import annotations

import pytest

from equipoise.averaging.gossip.machine import partners
from equipoise.averaging.options import TOPOLOGIES


def named(count: int) -> list[str]:
    return [f"peer{index:03}" for index in range(count)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 13, 64])
def test_a_topology_is_symmetric_and_connected(topology: str, count: int) -> None:
    peers = named(count)
    near = {peer: partners(topology, reversed(peers), peer) for peer in peers}
    for peer, others in near.items():
        assert peer not in others
        assert list(others) == sorted(set(others))
        assert all(peer in near[other] for other in others)
    reached = {peers[0]}
    for _ in peers:
        reached |= {other for peer in reached for other in near[peer]}
    assert reached == set(peers)


def test_how_many_a_peer_draws_from() -> None:
    peers = named(64)
    count = {topology: len(partners(topology, peers, "peer017")) for topology in TOPOLOGIES}
    assert count == {"random": 63, "exponential": 2 * 6 - 1, "ring": 2}


def test_the_peer_itself_need_not_be_among_the_known() -> None:
    assert partners("ring", ["b", "c"], "a") == ("b", "c")
    assert partners("random", [], "a") == ()


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(ValueError, match="'star'"):
        partners("star", ["a", "b"], "a")
