"""Strategies, by their specs: the ways in which peers form groups.

A strategy has values only, since a training script only names it; `averaging/machines.py` makes the machine that forms
this peer's groups. All strategies share one round, whose agreement is a two-sided commit where two are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.averaging.options import MAX_SPEC_CHARS, TOPOLOGIES
from equipoise.averaging.weights import LEAST_CONTRIBUTION
from equipoise.compression.grammar import canonical, choice, decimal, off, seconds_or, whole, words
from equipoise.compression.registry import Plugins, Registry

EXCHANGE_SECONDS = 120.0
"""Time for the exchange of a federated round, beyond the time for its forming: a gigabyte at 100 Mbit/s takes 80 s."""

MAX_SECONDS = 86_400
"""Longest grace, and longest deadline, of a federated round, in seconds: a day, the longest patience of a join."""

MAX_COPIES = 8
"""Most peers that hold a shard: each push goes to all of them."""


class Strategy:
    """The way in which a run averages.

    Attributes:
        name: Its name in specs.
        spec: The canonical spec: all options, in the documented order.
        quorum: Fewest contributors of a mean.
        least: Least weight of a contributor; with less, a member only attends. 0 for any weight above 0.
        total: Sum of the weights of a group; 0 for any. With it, a round counts all its contributors, or fails.
        codec: The codec of a run that names none.
        pairs: Whether groups are pairs, whose outcomes tell the distance of the two (`Outcome.apart`).
        batches: Whether a round may be due by what all peers have accumulated, so that each tells it at once.
        late: What becomes of a contribution that comes too late for its round: `drop`, or `next` if a loop of local
            steps, or federated rounds, are to have it count in the next round, at a discount.
    """

    name: str
    spec: str
    quorum: int = 2
    least: float = 0.0
    total: float = 0.0
    codec: str = "int8"
    pairs: bool = False
    batches: bool = True
    late: str = "drop"


class AllReduce(Strategy):
    """Groups by round: the ready peers meet once a round, up to `group_size` in a group.

    Attributes:
        grace: Seconds for which a group waits for the other peers, once its quorum is reached; `auto` to learn them
            from how late each peer is. Off, the wait begins with the first peer, and is learnt from the last ones.
    """

    name = "allreduce"

    def __init__(
        self,
        quorum: int = 2,
        grace: float | str | tuple[()] = (),
        late: str | tuple[()] = (),
        total: float | tuple[()] = (),
    ) -> None:
        if quorum < 2:
            raise ValueError(f"expected a quorum of at least 2 contributors, got {quorum}")
        if isinstance(grace, float) and grace > MAX_SECONDS:
            raise ValueError(f"allreduce: expected a grace of at most {MAX_SECONDS} s, got {grace:g}")
        self.quorum, self.grace = quorum, grace
        self.late, self.total = late or "drop", total or 0.0
        options = {"quorum": quorum, "grace": grace, "late": late, "total": total}
        self.spec = canonical(self.name, options)


class Gossip(Strategy):
    """Pairs, whenever two peers are free. They exchange parameters, whose precision matters."""

    name = "gossip"
    codec = "fp16"
    pairs = True

    def __init__(self, topology: str = "random") -> None:
        self.topology = topology
        self.spec = canonical(self.name, {"topology": topology})


@dataclass(eq=False)
class Federated(Strategy):
    """Rounds of peers that train for minutes: a draw names the peers that train, a quorum and a grace close a round.

    Attributes:
        fraction: Share of the live peers that is drawn.
        minimum: Fewest peers drawn; the quorum, if that is more.
        available: Fewest live peers that may be drawn with which the first round begins.
        quorum: Fewest contributors of a round.
        grace: Seconds for which a round waits for the other drawn peers, once its quorum is reached.
        deadline: Seconds within which a round reaches its quorum, or fails.
        late: `drop`, or `next` to count a late contribution at a discount in the next round.
        tags: Tags that a peer must carry to be drawn, sorted.
        reserve: Seconds of a round's timeout beyond the deadline: for the grace, and for the exchange.

    Raises:
        ValueError: An option is out of its range; names it.
    """

    fraction: float = 1.0
    minimum: int = 2
    available: int = 2
    quorum: int = 2
    grace: float = 10.0
    deadline: float = 600.0
    late: str = "drop"
    tags: tuple[str, ...] = ()

    name = "federated"
    least = LEAST_CONTRIBUTION
    batches = False

    def __post_init__(self) -> None:
        """Check the options, and write the spec."""
        fraction, grace, deadline = self.fraction, self.grace, self.deadline
        bounds = (
            (0 < fraction <= 1, f"a fraction above 0, at most 1, got {fraction:g}"),
            (self.minimum >= 1, f"a minimum of at least 1 drawn peer, got {self.minimum}"),
            (self.available >= 2, f"at least 2 available peers, got {self.available}"),
            (self.quorum >= 2, f"a quorum of at least 2 contributors, got {self.quorum}"),
            (grace <= MAX_SECONDS, f"a grace of at most {MAX_SECONDS} s, got {grace:g}"),
            (0 < deadline <= MAX_SECONDS, f"a deadline above 0 s, at most {MAX_SECONDS} s, got {deadline:g}"),
        )
        for holds, expected in bounds:
            if not holds:
                raise ValueError(f"federated: expected {expected}")
        self.spec = canonical(self.name, vars(self))
        self.reserve = self.grace + EXCHANGE_SECONDS
        if len(self.spec) > MAX_SPEC_CHARS:
            raise ValueError(f"federated: expected tags that fit into a spec of {MAX_SPEC_CHARS} characters")


class SharedTables(Strategy):
    """Rows of tables that the peers hold for each other; the run's rounds only say which peers serve.

    Attributes:
        staleness: Clocks by which a peer may be ahead of the slowest; infinite to wait for nobody.
        copies: Peers that hold each shard, its owner among them.
        timeout: Seconds after which a pull fails, and a push that is not acknowledged is lost.
    """

    name = "shared"
    codec = "fp32"
    batches = False

    def __init__(self, staleness: float | str = 4.0, copies: int = 2, timeout: float = 30.0) -> None:
        if not 1 <= copies <= MAX_COPIES:
            raise ValueError(f"shared: expected 1 to {MAX_COPIES} copies, got {copies}")
        if not 0 < timeout <= MAX_SECONDS:
            raise ValueError(f"shared: expected a timeout above 0, at most {MAX_SECONDS} s, got {timeout:g}")
        self.staleness, self.copies, self.timeout = float(staleness), copies, timeout
        self.spec = canonical(self.name, {"staleness": staleness, "copies": copies, "timeout": timeout})


STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    "strategies",
    "gossip:topology=random",
    MAX_SPEC_CHARS,
    Plugins("equipoise.strategies", Strategy),
)
"""All strategies; `STRATEGIES.register` adds another, and so does an installed package."""

STRATEGIES.register(
    "allreduce",
    AllReduce,
    quorum=whole(2),
    grace=off(seconds_or("auto", 10.0)),
    late=off(choice("drop", "next")),
    total=off(decimal(1.0)),
)
STRATEGIES.register("gossip", Gossip, topology=choice(*TOPOLOGIES))
STRATEGIES.register(
    "federated",
    Federated,
    fraction=decimal(1.0),
    minimum=whole(2),
    available=whole(2),
    quorum=whole(2),
    grace=decimal(10.0),
    deadline=decimal(600.0),
    late=choice("drop", "next"),
    tags=words(),
)

STRATEGIES.register(
    "shared", SharedTables, staleness=seconds_or("inf", 4.0), copies=whole(2), timeout=decimal(30.0)
)

parse_strategy = STRATEGIES.parse
"""Returns the strategy of a spec; raises ValueError with what came, what is known, and the nearest known name."""
