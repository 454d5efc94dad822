"""`simulate`: a training script once for each simulated peer, in one process and in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any, TypeVar

import torch

from equipoise.peer.client.tensors import Tensors
from equipoise.peer.connecting import Client
from equipoise.peer.run import Run
from equipoise.peer.simulation.link import SimulatedLink
from equipoise.peer.simulation.swarm import MAX_PEERS, SimulatedSwarm
from equipoise.peer.simulation.virtual_time import Chance, VirtualTime

Result = TypeVar("Result")


class SimulatedPeer(Client):
    """A peer of a simulation, as its script sees it: `join` is that of `connect()`; `clock` and `compute` are its time.

    Rounds and downloads take virtual time by themselves; the script's own computing takes none, unless it says so by
    `compute`.

    Attributes:
        tags: The tags of its daemon, by which a federated strategy may draw; set them before `join`.
    """

    def __init__(self, link: SimulatedLink, time: VirtualTime, codec: str) -> None:
        super().__init__(link)
        self.tags: tuple[str, ...] = ()
        self._time = time
        self._codec = codec
        self._simulated = link

    def join(self, name: str, tensors: Tensors, *, codec: str | None = None, **options: Any) -> Run:
        """Take part in a run; see `Client.join`. Without a codec, the run has that of the simulation.

        Raises:
            ValueError: Peers of the strategy meet in pairs, which is not simulated.
        """
        self._simulated.tags = frozenset(self.tags)
        run = super().join(name, tensors, codec=codec or self._codec, **options)
        if run.core.strategy.pairs:
            run.leave()
            raise ValueError(
                f"expected a strategy whose groups can be simulated, got {run.core.strategy.spec!r}"
            )
        return run

    def clock(self) -> float:
        """Virtual seconds since the beginning of the simulation."""
        return self._time.now

    def compute(self, seconds: float) -> None:
        """Let virtual time pass, as a computation of the script would.

        Raises:
            ValueError: `seconds` is not a finite number >= 0.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ValueError(f"expected a finite number of seconds >= 0, got {seconds!r}")
        self._time.progressed(self._time.now + seconds)
        self._time.sleep(seconds)


def simulate(
    work: Callable[[SimulatedPeer, int], Result],
    peers: int,
    *,
    codec: str = "int8",
    seed: int = 0,
    kill: Mapping[int, float] | None = None,
) -> list[Result | None]:
    """Run a training script once for each simulated peer, in one process and in virtual time.

    One peer's script runs at a time, until it waits; then that of which the wait ends first goes on. All depends on the
    arguments and the script alone: the same seed gives the same results. Each peer has its own state of the random
    generators of `random`, numpy and torch, seeded by `seed` and its index. torch computes with one thread.

    Args:
        work: Called with the peer and its index, 0 to `peers` - 1, each in a thread of its own.
        peers: Number of peers, 1 to 512. They begin at the virtual time 0. All peers of a run meet in one group, so one
            that is not federated has at most `group_size`. In a larger federated run, 64 meet, and the others follow.
        codec: Codec of the runs that are joined without one.
        seed: A whole number: other seeds give other draws, and other random numbers to the scripts.
        kill: Index -> virtual seconds at which that peer's script and daemon end without a word.

    Returns:
        What `work` returned for each peer, by index; None for a peer that was killed before its work ended.

    Raises:
        ValueError: An argument is out of its range.
        SimulationError: All peers wait for each other for ever; says for what.
        BaseException: The first error of a peer's work; a note names the peer. The others end there.
    """
    if isinstance(peers, bool) or not isinstance(peers, int) or not 1 <= peers <= MAX_PEERS:
        raise ValueError(f"expected 1 to {MAX_PEERS} peers, got {peers!r}")
    for index, at in (kill or {}).items():
        if index not in range(peers) or not 0 <= at < math.inf:
            raise ValueError(f"expected kill as {{index below {peers}: seconds}}, got {index!r}: {at!r}")
    time = VirtualTime()
    swarm = SimulatedSwarm(time, seed)
    links: dict[int, SimulatedLink] = {}

    def live(index: int) -> Result:
        links[index] = SimulatedLink(swarm, f"simulated-peer-{index:05}")
        peer = SimulatedPeer(links[index], time, codec)
        result = work(peer, index)
        peer.close()
        return result

    def end(index: int) -> None:
        if index in links:
            links[index].kill()
        time.kill(workers[index])

    before, threads = Chance(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index, at in (kill or {}).items():
            time.at(at, partial(end, index))
            time.progressed(at)
        chances = (Random(f"{seed} {index}").getrandbits(32) for index in range(peers))
        workers = [time.spawn(index, partial(live, index), chance) for index, chance in enumerate(chances)]
        time.run()
    finally:
        before.restore()
        torch.set_num_threads(threads)
    return [worker.result for worker in workers]
