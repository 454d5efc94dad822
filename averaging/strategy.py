"""Strategies, by their specs: the ways in which peers form groups.

A strategy makes the machine that forms this peer's groups. The round of a group is the same for all strategies. The
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
        name: Its name in specs.
        spec: The canonical spec: all options, in the documented order.
        quorum: Fewest contributors of a mean.
        codec: The codec of a run that names none.
        pairs: Whether groups are pairs, whose outcomes tell the distance of the two (`Outcome.apart`).
    """

    name: str
    spec: str
    quorum: int = 2
    codec: str = "int8"
    pairs: bool = False

    @abstractmethod
    def matchmaker(self, context: Context, chance: Random) -> Matchmaker:
        """Make the machine that forms the groups of one peer in `context`; the machine draws from `chance` alone."""


class AllReduce(Strategy):
    """Groups by round: the ready peers meet once a round, up to `group_size` in a group."""

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
    """Pairs, whenever two peers are free. They exchange parameters, whose precision matters."""

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
"""All strategies; `STRATEGIES.register` adds another."""

STRATEGIES.register("allreduce", AllReduce, quorum=whole(2))
STRATEGIES.register("gossip", Gossip, topology=choice(*TOPOLOGIES))

parse_strategy = STRATEGIES.parse
"""Returns the strategy of a spec; raises ValueError with what came, what is known, and the nearest known name."""
