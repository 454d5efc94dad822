"""Real daemons that gossip, in virtual time: how fast their values come together, and what faults leave of promises.

All of a daemon's averaging is real but for its sockets. Peers exchange in turn with a wait that stands for their steps.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.aio.search_driver import MATCHMAKING_FRAME
from equipoise.averaging.matchmaking.messages import GroupFormed, JoinRefused, JoinRequest, decode
from equipoise.averaging.options import RunOptions
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec
from fakes.hostile import Frame, TappedTransport, run_at_once
from fakes.memory import FakeIdentity, Net, passed
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


@dataclass
class Peer:
    """A daemon, and the script that exchanges again and again.

    Attributes:
        values: Its parameters, f32 [VALUES].
        outcomes: Of its exchanges.
        work: The script, while it runs.
        run: Its part in the run; None before it has joined.
    """

    router: Router
    values: torch.Tensor
    outcomes: list[Outcome] = field(default_factory=list)
    work: asyncio.Task[None] | None = None
    run: RunDriver | None = None


class Swarm:
    """Peers of one gossip run.

    Attributes:
        peers: By name, the dead too.
        given: By the digest of an exchange: by peer, what it brought and what it got, f32 [VALUES].
        messages: Proposals, and answers to them, that were sent so far.
    """

    def __init__(self, names: list[str], topology: str, seed: int, trains: bool = False) -> None:
        self.chance = Random(f"gossip {seed}")
        self.net = Net(0.002, 0.02, seed=seed)
        self.peers: dict[str, Peer] = {}
        self.given: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = defaultdict(dict)
        self.messages = 0
        self._names, self._trains, self._over = names, trains, False
        options = RunOptions(strategy=f"gossip:topology={topology}", codec="fp32")
        self._spec = RunSpec.create("gossip", Schema.of({"w": torch.zeros(VALUES)}), options)

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
        return sum(not outcome.ok for peer in self.peers.values() for outcome in peer.outcomes)

    @property
    def living(self) -> list[str]:
        """The peers that are not dead."""
        return [name for name in self.peers if name in self.net.transports]

    @property
    def error(self) -> float:
        """Mean squared distance from the mean."""
        rows = torch.stack([self.peers[name].values for name in self.living]).double()
        return float(((rows - rows.mean(0)) ** 2).sum() / len(rows))

    def run(self, play: Callable[[], Awaitable[None]]) -> None:
        """Begin all peers, have it play, and stop them.

        Raises:
            Violation: A promise was broken.
        """
        wrong = run_at_once(self._run(play))
        if wrong:
            raise Violation(f"a daemon met an error: {wrong[0]}")

    async def until(self, exchanges: int) -> None:
        """Wait until so many exchanges were ok.

        Raises:
            Violation: They were not in time.
        """
        began = asyncio.get_running_loop().time()
        while self.ok < exchanges:
            if asyncio.get_running_loop().time() > began + MIX_SECONDS:
                raise Violation(f"{self.ok} of {exchanges} exchanges in {MIX_SECONDS:g} s")
            await passed(0.01)

    async def add(self, name: str) -> None:
        """A daemon that joins the run; its script begins with `begin`."""
        transport, directory = self.net.peer(name)
        tapped: Any = TappedTransport(transport, self._tap)
        router = Router(tapped, directory, FakeIdentity(name), chance=Random(self.chance.random()))
        self.peers[name] = Peer(router, self._draw())
        self.peers[name].run = await router.join(self._spec)

    def begin(self, name: str) -> None:
        """Have a peer's script begin."""
        self.peers[name].work = asyncio.create_task(self._exchange(name, self.peers[name]))

    async def kill(self, name: str) -> None:
        """End a peer without a word; its record stays."""
        peer = self.peers[name]
        assert peer.work is not None
        self.net.frozen.add(name)
        self.net.kill(name)
        peer.work.cancel()
        await asyncio.wait([peer.work])
        await peer.router.stop()

    def check(self) -> None:
        """Check that both of a pair got the mean of what they brought, or one of them died, or was in doubt.

        Raises:
            Violation: They did not.
        """
        for digest, both in self.given.items():
            if len(both) == 2:
                (first, got), (second, same) = both.values()
                if not torch.equal(got, same) or not torch.allclose(
                    got, (first + second) / 2, rtol=1e-6, atol=0
                ):
                    raise Violation(f"{list(both)} brought {first} and {second}, and got {got} and {same}")
                continue
            (name,) = both
            group = next(one.group for one in self.peers[name].outcomes if one.digest == digest)
            (other,) = set(group) - {name}
            doubts = [one for one in self.peers[other].outcomes if one.in_doubt and name in one.group]
            if other in self.living and not doubts:
                raise Violation(f"{name} applied an exchange that failed at {other} without doubt")

    async def _run(self, play: Callable[[], Awaitable[None]]) -> None:
        try:
            for name in self._names:
                await self.add(name)
            await self.net.acquainted(self._spec.name, self._names)
            for name in self._names:
                self.begin(name)
            await play()
        finally:
            self._over = True
            await asyncio.wait([peer.work for peer in self.peers.values() if peer.work is not None])
            await asyncio.gather(*(peer.router.stop() for peer in self.peers.values()))
        self.check()

    async def _exchange(self, name: str, peer: Peer) -> None:
        while not self._over:
            await passed(self.chance.expovariate(1 / COMPUTE_SECONDS))
            if self._trains:
                peer.values = self._draw()
            assert peer.run is not None
            before, result = peer.values, torch.empty(VALUES)
            outcome = await averaged(peer.run, before, result, 1.0, EXCHANGE_SECONDS)
            peer.outcomes.append(outcome)
            if outcome.ok:
                peer.values = result
                self.given[outcome.digest][name] = before, result

    def _draw(self) -> torch.Tensor:
        return torch.tensor([self.chance.gauss(0.0, 1.0) for _ in range(VALUES)])

    def _tap(self, receiver: str, header: bytes, body: bytes) -> list[Frame]:
        if header[:1] == MATCHMAKING_FRAME:
            self.messages += isinstance(decode(header[1:]), JoinRequest | JoinRefused | GroupFormed)
        return [(header, body)]


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

    async def play() -> None:
        first = swarm.error
        while swarm.ok < exchanges:
            due = min(peers * 2 ** len(error), exchanges)
            await swarm.until(due)
            error[due] = swarm.error / first

    swarm.run(play)
    return Mixing(error, swarm.in_doubt, swarm.messages / swarm.ok)


def storm(seed: int, exchanges: int, peers: int = 8) -> Swarm:
    """Have peers that train exchange, while channels break and peers are cut off, die, come, and withdraw.

    Raises:
        Violation: A promise was broken.
    """
    swarm = Swarm([f"p{at}" for at in range(peers)], "random", seed, trains=True)
    swarm.net.loss = 0.01
    names = itertools.count(peers)

    async def trouble() -> None:
        chance, net = swarm.chance, swarm.net
        while True:
            await passed(chance.expovariate(1 / TROUBLE_SECONDS))
            victim = chance.choice(swarm.living)
            match chance.choice(["cut", "kill", "part", "withdraw"]):
                case "cut":
                    net.cut(victim)
                    asyncio.get_running_loop().call_later(chance.choice(CUT_SECONDS), net.cuts.clear)
                case "kill":
                    await swarm.kill(victim)
                    await swarm.add(name := f"p{next(names)}")
                    swarm.begin(name)
                case "part":
                    for channel in net.transports[victim].channels[:1]:
                        channel.close()
                case "withdraw" if run := swarm.peers[victim].run:
                    run.search.stop("it withdraws")

    async def play() -> None:
        weather = asyncio.create_task(trouble())
        await swarm.until(exchanges)
        weather.cancel()
        await asyncio.wait([weather])
        if not weather.cancelled():
            raise weather.exception() or Violation("the weather has ended")

    swarm.run(play)
    return swarm
