"""Strategies: who meets whom, by their specs.

A strategy makes the machine that forms this peer's groups. The round that a group then has is the same for all. The
machines are imported when a daemon makes them: a training script only names a strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from random import Random
from typing import TYPE_CHECKING

from equipoise.averaging.gossip.topology import TOPOLOGIES
from equipoise.compression.grammar import Registry, canonical, choice, whole

if TYPE_CHECKING:
    from equipoise.averaging.matchmaking.context import Context
    from equipoise.averaging.matchmaking.matchmaker import Matchmaker


class Strategy(ABC):
    """The way in which a run averages.

    Attributes:
        name: What specs call it.
        spec: The canonical spec: all options, in the documented order.
        quorum: Fewest contributors of a mean.
        codec: How values travel in a run that names no codec.
        pairs: Whether groups are pairs, whose outcomes say how far the two were apart.
    """

    name: str
    spec: str
    quorum: int = 2
    codec: str = "int8"
    pairs: bool = False

    @abstractmethod
    def matchmaker(self, context: Context, chance: Random) -> Matchmaker:
        """Make what forms the groups of one peer, which starts with this standing; `chance` is its own to draw from."""


class AllReduce(Strategy):
    """Groups by round: the ready peers meet once a round, as many in a group as it holds."""

    name = "allreduce"

    def __init__(self, quorum: int = 2) -> None:
        if quorum < 2:
            raise ValueError(f"expected a quorum of at least 2 contributors, got {quorum}")
        self.quorum = quorum
        self.spec = canonical(self.name, {"quorum": quorum})

    def matchmaker(self, context: Context, chance: Random) -> Matchmaker:
        """See `Strategy.matchmaker`."""
        from equipoise.averaging.matchmaking.machine import Matchmaking

        return Matchmaking(context)


class Gossip(Strategy):
    """Pairs, whenever two peers are free. What they exchange are parameters, whose precision matters."""

    name = "gossip"
    codec = "fp16"
    pairs = True

    def __init__(self, topology: str = "random") -> None:
        self._topology = topology
        self.spec = canonical(self.name, {"topology": topology})

    def matchmaker(self, context: Context, chance: Random) -> Matchmaker:
        """See `Strategy.matchmaker`."""
        from equipoise.averaging.gossip.machine import Pairing

        return Pairing(context, self._topology, chance)


STRATEGIES: Registry[Strategy] = Registry("strategy", "strategies", "gossip:topology=random", 128)
"""All strategies; `STRATEGIES.register` makes another one known."""

STRATEGIES.register("allreduce", AllReduce, quorum=whole(2))
STRATEGIES.register("gossip", Gossip, topology=choice(*TOPOLOGIES))

parse_strategy = STRATEGIES.parse
"""Returns the strategy of a spec; raises ValueError with what came, what is known, and the nearest known name."""
