"""The draw of the peers that train in a round, which every peer computes alike.

The order follows from the agreed state: no peer knows a draw before the state exists, and no peer chooses it.
Selection by fraction and minimum is that of FedAvg (McMahan et al. 2017, arXiv:1602.05629, algorithm 1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec


class Drawn(msgspec.Struct, frozen=True):
    """The result of a run's draw for one state, as one peer sees it now.

    Attributes:
        peers: PeerIDs of the drawn peers, in the order of the draw; the next in order stand for dead ones.
        live: PeerIDs of all live peers of the run that may be drawn, maybe this peer's: they carry its tags, and train.
    """

    peers: tuple[str, ...]
    live: tuple[str, ...]


def draw(peers: Iterable[str], seed: bytes | str, *, fraction: float, minimum: int) -> tuple[str, ...]:
    """Draw max(int(n * fraction), minimum) of n peers, at most n, in the order of SHA-256 over seed and PeerID.

    The place of a peer in the order depends on no other peer: if a peer is missing, the peers behind it move up.

    Args:
        peers: PeerIDs, in any order.
        seed: Of a run, the lineage of the agreed state.
        fraction: From 0 to 1.
        minimum: Fewest peers to draw, at least 0.

    Raises:
        ValueError: `fraction` or `minimum` is out of its range.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"expected a fraction from 0 to 1, got {fraction!r}")
    if minimum < 0:
        raise ValueError(f"expected a minimum of at least 0 peers, got {minimum!r}")
    start = hashlib.sha256(seed.encode() if isinstance(seed, str) else seed)

    def place(peer: str) -> bytes:
        hashed = start.copy()
        hashed.update(peer.encode())
        return hashed.digest()

    ordered = sorted(set(peers), key=place)
    return tuple(ordered[: max(int(len(ordered) * fraction), minimum)])
