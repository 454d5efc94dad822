"""A simulated peer, and its connection, which answers its script's requests to a daemon."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from random import Random
from typing import Any, TypeVar

import torch

from equipoise.averaging.draw import Drawn
from equipoise.averaging.outcome import Gathering, NoPeers, RunState
from equipoise.averaging.state import StateId
from equipoise.peer.client.tensors import Tensors
from equipoise.peer.connecting import Client
from equipoise.peer.control import messages
from equipoise.peer.control.client import ANSWER_SECONDS, Connection
from equipoise.peer.control.messages import Answer, Progress, Request, RunRequest, Welcome
from equipoise.peer.errors import DaemonLost, EquipoiseError, Refused
from equipoise.peer.purposes import AVERAGE, STEP, agreed_spec, run_specs
from equipoise.peer.run import Run
from equipoise.peer.shared_memory import Region, SharedMemory
from equipoise.peer.simulation.swarm import MAX_PEERS, Download, Member, SimulatedRun, SimulatedSwarm
from equipoise.peer.simulation.virtual_time import Chance, SimulationError, VirtualTime

JOIN_SECONDS = 0.01
"""Virtual time to join a run, and to agree on terms. Peers that begin together all do so before any of them goes on."""


class Part:
    """A peer's part in one run as its script calls it: a member of a run of the swarm for each purpose.

    Like a real daemon, it takes part among those that average until the script steps.

    Attributes:
        runs: The runs of the swarm that this peer has joined, and its part in each, by purpose.
    """

    def __init__(self, link: SimulatedLink, request: messages.JoinRun, region: Region) -> None:
        self._link = link
        self._name = request.run
        self._region = region
        self._specs = run_specs(request)
        self.runs: dict[str, tuple[SimulatedRun, Member]] = {}
        self._purpose = AVERAGE
        self._observes = False
        self._enter(AVERAGE)

    def agree(self, request: messages.AgreeRun) -> None:
        """See `Run.agree`; raises as `use` does."""
        joined, observed = self._specs[STEP], self._observes
        spec = agreed_spec(joined, request.terms, request.buffers, request.dtypes, request.frozen)
        self._specs[STEP], self._observes = spec, request.observes
        try:
            self.use(STEP)
        except Refused:
            self._specs[STEP], self._observes = joined, observed
            raise

    def use(self, purpose: str) -> tuple[SimulatedRun, Member]:
        """The run of the swarm for a purpose, which this peer joins at first use, and this peer's part in it.

        Raises:
            Refused: There is nothing to step, or other peers of the run have other terms.
        """
        if purpose not in self._specs:
            raise Refused(
                f"there is nothing to {purpose}", "join the run with parameters that need gradients"
            )
        if purpose not in self.runs:
            self._enter(purpose)
        self._purpose = purpose
        return self.runs[purpose]

    def state(self) -> RunState:
        """See `Run.state`."""
        run, member = self.use(self._purpose)
        return run.state(member)

    def members(self, data: str) -> tuple[str, ...]:
        """See `messages.AskMembers`."""
        run, member = self.use(self._purpose)
        member.data = data or member.data
        return run.sharing(data)

    def progress(self, held: StateId | None) -> Progress:
        """See `Run.progress`; all peers tell the truth."""
        run, member = self.use(STEP)
        swarm = sum(one.accumulated for one in run.present.values())
        wanted = (one.wanted for one in run.downloads if one.member is not member)
        first = min((one for one in wanted if one is not None), default=None)
        drawn = Drawn((), ()) if held is None else run.draw(held)
        return Progress(member.accumulated, swarm, first, drawn=drawn)

    def leave(self, reason: str, dead: bool = False) -> None:
        """Leave the run."""
        for run, member in self.runs.values():
            run.leave(member, reason, dead)

    def _enter(self, purpose: str) -> None:
        spec = self._specs[purpose]
        swarm = self._link.swarm
        if objection := swarm.objection(spec):
            raise Refused(f"run {self._name!r}: {objection}", "give the same, or use another name")
        run, layout = swarm.run(spec), spec.layout
        mean = self._region.mean[: layout.mean_size(spec.options.group_size)]
        vectors = self._region.contribution[: layout.encoded_size], mean
        member = Member(self._link.welcome.peer_id, *vectors, self._link.tags, self._observes)
        run.join(member)
        self.runs[purpose] = run, member


class SimulatedLink(Connection):
    """A connection to a simulated daemon, which dies only together with its script: it is never lost.

    Attributes:
        swarm: The swarm of the simulation.
        tags: The peer's tags.
    """

    def __init__(self, swarm: SimulatedSwarm, peer: str) -> None:
        self.welcome = Welcome(peer, peer, os.getpid())
        self.swarm = swarm
        self._time = swarm.time
        self._parts: dict[str, Part] = {}
        self._wake = self._time.waker(self._waits)
        self._dead = False
        self.tags: frozenset[str] = frozenset()

    def kill(self) -> None:
        """End the daemon without a word."""
        self._dead = True
        for part in self._parts.values():
            part.leave("killed", dead=True)

    def start(self, request: Request[Answer], fds: Sequence[int] = ()) -> Future[Answer]:
        """See `Connection.start`."""
        reply: Future[Any] = Future()
        if self._dead:  # The script ends at its next wait. A thread that only tells something goes on.
            reply.set_exception(DaemonLost("this peer was killed"))
            return reply
        try:
            self._take(request, fds, reply)
        except (EquipoiseError, ValueError) as error:
            reply.set_exception(Refused(str(error)))
        if isinstance(request, messages.JoinRun | messages.AgreeRun):
            self.sleep(JOIN_SECONDS)
        if not reply.done():
            reply.add_done_callback(lambda _: self._wake())
        return reply

    def wait(self, reply: Future[Answer], timeout: float = ANSWER_SECONDS) -> Answer:
        """See `Connection.wait`."""
        if not self.settled(reply, timeout):
            raise SimulationError(f"a simulated daemon has not answered within {timeout:g} s")
        return reply.result()

    def settled(self, reply: Future[Any], timeout: float = 0.0) -> bool:
        """See `Connection.settled`."""
        return self._time.wait(reply.done, timeout)

    def clock(self) -> float:
        """See `Connection.clock`."""
        return self._time.now

    def sleep(self, seconds: float) -> None:
        """See `Connection.sleep`."""
        self._time.sleep(seconds)

    def watch(self, watcher: Callable[[EquipoiseError], None] | None) -> None:
        """See `Connection.watch`."""

    def close(self) -> None:
        """See `Connection.close`."""
        for part in self._parts.values():
            part.leave("its script has ended")

    def _waits(self) -> str:
        standing = (part.state() for part in self._parts.values())
        rounds = (one.reason for one in standing if isinstance(one, Gathering | NoPeers))
        return next((f"a round: {reason}" for reason in rounds if reason), "a round or a download")

    def _take(self, request: Request[Any], fds: Sequence[int], reply: Future[Any]) -> None:
        """Perform a request, and answer `reply`; rounds and downloads answer it later."""
        answer: object = None
        match request:
            case messages.StartRound(purpose=purpose):
                run, member = self._part(request).use(purpose)
                run.start(member, request, reply)
                return
            case messages.Fetch():
                self._download(request, fds[0], reply)
                return
            case messages.JoinRun(name, size=size):
                if name in self._parts:
                    raise Refused(f"this peer takes part in run {name!r} already")
                self._parts[name] = Part(self, request, Region.attach(os.dup(fds[0]), size))
            case messages.AskState():
                answer = self._part(request).state()
            case messages.AskMembers(_, data):
                answer = self._part(request).members(data)
            case messages.AskProgress(held=held):
                answer = self._part(request).progress(held)
            case messages.ReportAccumulated(weight=weight):
                if request.run in self._parts:  # A script that leaves reports last of all.
                    _, member = self._part(request).use(STEP)
                    member.accumulated = weight
            case messages.AgreeRun():
                self._part(request).agree(request)
            case messages.OfferState(state=state, size=size):
                run, member = self._part(request).use(STEP)
                with closing(SharedMemory.attach(os.dup(fds[0]), size)) as memory:
                    member.offered = state, bytes(memory.view(size, writable=False))
                member.epoch = state.epoch
                run.serve()
            case messages.StopRound(why=why):
                for run, member in self._part(request).runs.values():
                    run.stop(member, why or "stopped")
            case messages.StopFetch():
                for run, member in self._part(request).runs.values():
                    for download in [one for one in run.downloads if one.member is member]:
                        download.stop("cancelled")
            case messages.LeaveRun(run=name):
                self._part(request).leave("the run was left")
                del self._parts[name]
            case messages.TellStatus():
                pass
            case _:
                raise Refused(f"a simulated daemon does not answer {type(request).__name__}")
        reply.set_result(answer)

    def _download(self, request: messages.Fetch, fd: int, reply: Future[Any]) -> None:
        run, member = self._part(request).use(STEP)
        if any(download.member is member for download in run.downloads):
            raise Refused(f"a state of run {run.spec.name!r} is being fetched already: wait for it")
        if request.wish.after is not None:
            member.epoch = request.wish.after.epoch
        Download(run, member, request, reply, SharedMemory.attach(os.dup(fd), request.size))
        run.serve()

    def _part(self, request: Request[Any]) -> Part:
        assert isinstance(request, RunRequest), "it is about a run"
        if request.run not in self._parts:
            raise Refused(f"this peer does not take part in run {request.run!r}")
        return self._parts[request.run]


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
