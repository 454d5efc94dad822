"""The connection of a simulated peer: it answers a script's requests to its daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from equipoise.averaging.draw import Drawn
from equipoise.averaging.outcome import Gathering, NoPeers, RunState
from equipoise.averaging.state import StateId
from equipoise.peer.control import messages
from equipoise.peer.control.client import ANSWER_SECONDS, Connection
from equipoise.peer.control.messages import Answer, Progress, Request, RunRequest, Welcome
from equipoise.peer.errors import DaemonLost, EquipoiseError, Refused
from equipoise.peer.purposes import AVERAGE, STEP, agreed_spec, run_specs
from equipoise.peer.shared_memory import Region, SharedMemory
from equipoise.peer.simulation.downloads import Download
from equipoise.peer.simulation.swarm import Member, SimulatedRun, SimulatedSwarm
from equipoise.peer.simulation.virtual_time import SimulationError

JOIN_SECONDS = 0.01
"""Virtual time to join a run, and to agree on terms. Peers that begin together all do so before any of them goes on."""


class Part:
    """A peer's part in one run as its script calls it: a member of a run of the swarm for each purpose.

    Like a real daemon, it takes part among those that average until the script steps.

    Attributes:
        runs: The runs of the swarm that this peer has joined, and its part in each, by purpose.
    """

    def __init__(
        self,
        swarm: SimulatedSwarm,
        peer: str,
        tags: frozenset[str],
        request: messages.JoinRun,
        region: Region,
    ) -> None:
        self._swarm = swarm
        self._name = request.run
        self._peer = peer
        self._tags = tags
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
        if objection := self._swarm.objection(spec):
            raise Refused(f"run {self._name!r}: {objection}", "give the same, or use another name")
        run = self._swarm.run(spec)
        layout = run.spec.layout
        mean = self._region.mean[: layout.mean_size(run.spec.options.group_size)]
        vectors = self._region.contribution[: layout.encoded_size], mean
        member = Member(self._peer, *vectors, self._tags, self._observes)
        run.join(member)
        self.runs[purpose] = run, member


class SimulatedLink(Connection):
    """A connection to a simulated daemon, which dies only together with its script: it is never lost.

    Attributes:
        tags: The peer's tags.
    """

    def __init__(self, swarm: SimulatedSwarm, peer: str) -> None:
        self.welcome = Welcome(peer, peer, os.getpid())
        self._swarm = swarm
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
                region = Region.attach(os.dup(fds[0]), size)
                self._parts[name] = Part(self._swarm, self.welcome.peer_id, self.tags, request, region)
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
        Download(run, member, self._time, request, reply, SharedMemory.attach(os.dup(fd), request.size))
        run.serve()

    def _part(self, request: Request[Any]) -> Part:
        assert isinstance(request, RunRequest), "it is about a run"
        if request.run not in self._parts:
            raise Refused(f"this peer does not take part in run {request.run!r}")
        return self._parts[request.run]
