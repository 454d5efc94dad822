"""The topologies of gossip: the peers among which a peer draws its partners.

Two peers exchange both ways, so every topology is symmetric. With `random` an exchange contracts the error as a random
matching does (Boyd et al. 2006, "Randomized gossip algorithms"). `exponential` is the static exponential graph (Ying et
al. 2021, arXiv:2110.13363), with its edges used both ways. `ring` is for tests: it mixes slowly.
"""

from __future__ import annotations

from collections.abc import Iterable

from equipoise.averaging.options import TOPOLOGIES


def partners(topology: str, peers: Iterable[str], me: str) -> tuple[str, ...]:
    """Return the peers from which `me` draws, evenly.

    Args:
        topology: One of `options.TOPOLOGIES`.
        peers: PeerIDs of the run, in any order; with or without `me`.
        me: This peer.

    Returns:
        PeerIDs, each once, sorted. Peers that know the same others agree: of two peers each is among the
        other's partners, or neither is.

    Raises:
        ValueError: The topology is not known.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"expected a topology of {', '.join(TOPOLOGIES)}, got {topology!r}")
    row = sorted({*peers, me})
    place, count = row.index(me), len(row)
    steps = {
        "random": list(range(1, count)),
        "exponential": [2**power for power in range((count - 1).bit_length())],
        "ring": [1],
    }[topology]
    found = {row[(place + sign * step) % count] for step in steps for sign in (1, -1)}
    return tuple(sorted(found - {me}))
