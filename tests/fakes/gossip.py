"""Real daemons that gossip, in virtual time: how fast their values come together, and what faults leave of promises.

Peers exchange in turn with a wait that stands for their steps.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch

from equipoise.averaging.matchmaking.messages import GroupFormed, JoinRefused, JoinRequest
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.daemons import Daemons
from fakes.vectors import averaged
from simulator.core import Violation

VALUES = 4
"""Values of a peer, f32."""

EXCHANGE_SECONDS = 10.0
"""What a round of two may take, as its caller's timeout."""

COMPUTE_SECONDS = 0.5
"""What a peer does between two exchanges takes so long, on average."""

MIX_SECONDS = 1000.0
"""By then exchanges come about, or never."""

TROUBLE_SECONDS = 0.2
"""Between two faults of a storm, on average."""

CUT_SECONDS = (0.01, 0.1, 1.0, 3.0, 6.0)
"""A peer is cut off for so long: some are taken for dead."""


class Swarm(Daemons):
    """Peers of one gossip run.

    Attributes:
        values: The parameters of each peer, the dead too, f32 [VALUES].
        outcomes: Of the exchanges of each peer.
        given: By the digest of an exchange: by peer, what it brought and what it got, f32 [VALUES].
    """

    def __init__(self, names: list[str], topology: str, seed: int, trains: bool = False) -> None:
        options = RunOptions(strategy=f"gossip:topology={topology}", codec="fp32")
        spec = RunSpec.create("gossip", Schema.of({"w": torch.zeros(VALUES)}), options)
        self.values: dict[str, torch.Tensor] = {}
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self.given: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        self._trains = trains
        super().__init__(spec, names, seed, lag=0.02)
        self._loop.run_until_complete(self.net.acquainted(spec.name, names))
        for name in names:
            self.begin(name)

    @property
    def ok(self) -> int:
        """Exchanges that both have applied."""
        return sum(len(both) == 2 for both in self.given.values())

    @property
    def in_doubt(self) -> int:
        """Exchanges that only one has applied."""
        return len(self.given) - self.ok

    @property
    def failed(self) -> int:
        """Failed attempts of peers."""
        return sum(not outcome.ok for outcomes in self.outcomes.values() for outcome in outcomes)

    @property
    def messages(self) -> int:
        """Proposals, and answers to them, that were sent so far."""
        return sum(isinstance(sent[-1], JoinRequest | JoinRefused | GroupFormed) for sent in self.sent)

    @property
    def error(self) -> float:
        """Mean squared distance from the mean."""
        rows = torch.stack([self.values[name] for name in self.living]).double()
        return float(((rows - rows.mean(0)) ** 2).sum() / len(rows))

    def begin(self, name: str) -> None:
        """Have a peer's script begin."""
        self.values[name] = self._draw()
        self.each_round(name, lambda: self.chance.expovariate(1 / COMPUTE_SECONDS))

    def until(self, exchanges: int, seconds: float = MIX_SECONDS) -> bool:
        """Wait until so many exchanges were ok, or so long; returns whether they were."""
        return self.run(seconds, lambda: self.ok >= exchanges)

    def finish(self) -> None:
        """End; both of a pair must have got the mean of what they brought, or one of them died, or was in doubt.

        Raises:
            Violation: They did not.
        """
        self.on_idle.clear()
        self.run(EXCHANGE_SECONDS + 1.0)
        for digest, both in self.given.items():
            if len(both) == 2:
                (first, got), (second, same) = both.values()
                if not torch.equal(got, same) or not torch.allclose(
                    got, (first + second) / 2, rtol=1e-6, atol=0
                ):
                    raise Violation(f"{list(both)} brought {first} and {second}, and got {got} and {same}")
                continue
            (name,) = both
            group = next(one.group for one in self.outcomes[name] if one.digest == digest)
            (other,) = set(group) - {name}
            doubts = [one for one in self.outcomes[other] if one.in_doubt and name in one.group]
            if other in self.living and not doubts:
                raise Violation(f"{name} applied an exchange that failed at {other} without doubt")

    async def _average(self, name: str, weight: float, patience: float) -> None:
        if self._trains:
            self.values[name] = self._draw()
        before, result = self.values[name], torch.empty(VALUES)
        outcome = await averaged(self.runs[name], before, result, weight, EXCHANGE_SECONDS)
        self.outcomes[name].append(outcome)
        if outcome.ok:
            self.values[name] = result
            self.given[outcome.digest][name] = before, result

    def _draw(self) -> torch.Tensor:
        return torch.tensor([self.chance.gauss(0.0, 1.0) for _ in range(VALUES)])


@dataclass(frozen=True, slots=True)
class Mixing:
    """The result of exchanges without faults.

    Attributes:
        error: Mean squared distance from the mean, as a share of the first, after so many exchanges.
        in_doubt: Exchanges that one of the two applied, as far as the other knows.
        messages: Proposals and answers for each exchange.
    """

    error: dict[int, float]
    in_doubt: int
    messages: float


def mixes_as_expected(error: dict[int, float], peers: int) -> bool:
    """True if errors of `Mixing`, averaged over seeds, are those of random pairs, give or take a tenth.

    Args:
        error: After `peers` exchanges, twice as many, and so on.
        peers: Number of peers.
    """
    bounds = {}
    for done in error:
        # Least if all peers pair off at once again and again, most if two are drawn for each exchange (Boyd 2006).
        least = ((peers / 2 - 1) / (peers - 1)) ** (2 * done / peers)
        bounds[done] = 0.9 * least, 1.1 * (1 - 1 / (peers - 1)) ** done
    return all(bounds[done][0] <= found <= bounds[done][1] for done, found in error.items())


def mix(peers: int, topology: str, exchanges: int, seed: int) -> Mixing:
    """Have peers that know each other exchange; the error is taken after `peers` exchanges, twice as many, and so on.

    Raises:
        Violation: A promise was broken.
    """
    swarm = Swarm([f"p{at:04}" for at in range(peers)], topology, seed)
    error: dict[int, float] = {}
    first = swarm.error
    while swarm.ok < exchanges:
        due = min(peers * 2 ** len(error), exchanges)
        if not swarm.until(due):
            raise Violation(f"{swarm.ok} of {due} exchanges in {MIX_SECONDS:g} s")
        error[due] = swarm.error / first
    found = Mixing(error, swarm.in_doubt, swarm.messages / swarm.ok)
    swarm.finish()
    swarm.close()
    return found


def storm(seed: int, exchanges: int, peers: int = 8) -> Swarm:
    """Have peers that train exchange, while channels break and peers are cut off, die, come, and withdraw.

    Raises:
        Violation: A promise was broken.
    """
    swarm = Swarm([f"p{at}" for at in range(peers)], "random", seed, trains=True)
    swarm.net.loss = 0.01
    names = itertools.count(peers)
    while not swarm.until(exchanges, swarm.chance.expovariate(1 / TROUBLE_SECONDS)):
        if swarm.now > MIX_SECONDS:
            raise Violation(f"{swarm.ok} of {exchanges} exchanges in {MIX_SECONDS:g} s")
        victim = swarm.chance.choice(swarm.living)
        match swarm.chance.choice(["cut", "kill", "part", "withdraw"]):
            case "cut":
                swarm.cut(victim, swarm.chance.choice(CUT_SECONDS))
            case "kill":
                swarm.kill(victim)
                swarm.add(name := f"p{next(names)}")
                swarm.begin(name)
            case "part":
                for channel in swarm.net.transports[victim].channels[:1]:
                    channel.close()
            case "withdraw":
                swarm.withdraw(victim)
    swarm.finish()
    swarm.close()
    return swarm
