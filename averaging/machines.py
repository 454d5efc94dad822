"""The machines of strategies: a daemon makes them here, so that a training script can name a strategy without them.

Both functions know a strategy by its class, and its base classes. `matchmaker.register` and `policy.register` take what
makes the machine of another.
"""

from __future__ import annotations

from functools import singledispatch
from random import Random

from equipoise.averaging.gossip.machine import Pairing
from equipoise.averaging.matchmaking.closing import ClosePolicy, Grace, QuorumAndGrace
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.machine import Matchmaking
from equipoise.averaging.matchmaking.matchmaker import Matchmaker
from equipoise.averaging.strategy import AllReduce, Federated, Gossip, Strategy


@singledispatch
def matchmaker(strategy: Strategy, context: Context, chance: Random) -> Matchmaker:
    """Make the machine that forms the groups of one peer in `context`; the machine draws from `chance` alone."""
    return Matchmaking(context, policy(strategy, context))


@matchmaker.register
def _(strategy: Gossip, context: Context, chance: Random) -> Matchmaker:
    return Pairing(context, strategy.topology, chance)


@singledispatch
def policy(strategy: Strategy, context: Context) -> ClosePolicy:
    """Make the policy by which a coordinator in `context` closes its groups."""
    return ClosePolicy(context)


@policy.register
def _(strategy: AllReduce, context: Context) -> ClosePolicy:
    return ClosePolicy(context) if strategy.grace == () else Grace(context, strategy)


@policy.register
def _(strategy: Federated, context: Context) -> ClosePolicy:
    return QuorumAndGrace(context, strategy)
