"""A swarm in one process and in virtual time: real daemons on a loop whose clock jumps, and scripts that take turns.

Each peer is a function in a thread of its own, as a user would write it. It runs until it waits for something; then
the loop goes on. All of a daemon is real but for its sockets: transport, directory and identity are in memory.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from random import Random
from typing import Any

from equipoise.averaging.aio.round_driver import HEADER_PREFIX_BYTES, ROUND_FRAME
from equipoise.averaging.aio.router import Router
from equipoise.averaging.outcome import Outcome
from equipoise.averaging.state import StateId
from equipoise.dht.gate import Gate
from equipoise.dht.records import TTL_SECONDS
from equipoise.dht.state import ReachStatus
from equipoise.limits import Candidate
from equipoise.peer.client.tensors import Tensors
from equipoise.peer.connecting import Client
from equipoise.peer.control.client import ANSWER_SECONDS, Connection
from equipoise.peer.control.messages import (
    Answer,
    Fetch,
    OfferState,
    Request,
    StartRound,
    Welcome,
)
from equipoise.peer.daemon.dispatcher import Dispatcher
from equipoise.peer.daemon.service import Service
from equipoise.peer.errors import DaemonLost, EquipoiseError, Refused
from equipoise.peer.run import Run
from equipoise.peer.simulation.virtual_time import VirtualTime, Worker
from fakes.hostile import Frame, JumpingLoop, TappedTransport
from fakes.memory import FakeIdentity, Net, passed

LIMIT_SECONDS = 3600.0
"""Of virtual time; a test that gets there hangs."""

LATENCY_SECONDS, LAG_SECONDS = 0.002, 0.02
"""Of frames, and of records, between machines of one town."""

HELD_SECONDS = 0.05
"""Time between two looks whether an answer is still to be held back."""

made: list[World] = []
"""All worlds that were made; a fixture closes them."""


class LoopTime(VirtualTime):
    """The scripts' threads, which run as callbacks of a loop."""

    def __init__(self, loop: JumpingLoop) -> None:
        self.loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()
        super().__init__()

    @property
    def now(self) -> float:  # type: ignore[override]
        return self.loop.time()

    @now.setter
    def now(self, seconds: float) -> None:
        assert seconds == self.loop.time(), "the loop moves it"

    def at(self, time: float, act: Callable[[], None]) -> None:
        if time <= self.now:
            self.loop.call_soon(act)
        else:
            self.loop.call_at(time, act)

    def run(self) -> None:
        try:
            self.loop.call_at(LIMIT_SECONDS, self._end_all, AssertionError("no script gets on any more"))
            self.loop.run_until_complete(self.ended)
        finally:
            self._end()

    @property
    def is_script(self) -> bool:
        """Whether a script's thread asks."""
        return self._running is not None and self._running.thread is threading.current_thread()

    def _pause(self, until: float) -> None:
        worker = self._worker()
        worker.questions = 0
        self._give_way(worker, until)

    def _resume(self, worker: Worker, ticket: int, limit: float = -1) -> None:
        super()._resume(worker, ticket, limit)
        if worker.error is not None or not self._living:
            self._end_all(worker.error)

    def _end_all(self, error: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(error) if error is not None else self.ended.set_result(None)


class WorldDaemon:
    """The daemon of one peer, with what a session needs of its swarm and a dispatcher of its daemon."""

    def __init__(self, world: World, peer: str) -> None:
        transport, self.directory = world.net.peer(peer)
        self.peer, self._named, self.gate = peer, world.named, Gate()
        self.outcomes: deque[Outcome] = deque(maxlen=64)
        tapped: Any = TappedTransport(transport, partial(world.tap, peer))
        lives = world.lives[peer] = world.lives.get(peer, 0) + 1
        chance = Random(f"{world.seed} {peer}" + f" {lives}" * (lives > 1))
        self.router = Router(tapped, self.directory, FakeIdentity(peer), chance=chance)
        self.service = Service(self.router, self)  # type: ignore[arg-type]
        self.history: Any = self
        self.add, self.last = self.outcomes.append, lambda limit: list(self.outcomes)[-limit:]
        self.company = lambda run: frozenset[str]()

    @property
    def named(self) -> frozenset[str]:
        return self._named - {self.peer}

    def reach(self, peer: str) -> ReachStatus:
        return ReachStatus("direct", "as all are here")


class WorldLink(Connection):
    """A script's connection to its daemon."""

    def __init__(self, world: World, daemon: WorldDaemon) -> None:
        self.welcome = Welcome(daemon.peer, daemon.peer, os.getpid(), named=daemon.named)
        self._world = world
        self._descriptors: deque[int] = deque()
        script = f"the script of {daemon.peer}"
        self.dispatcher = Dispatcher(daemon, script, self._descriptors.popleft, self._hear, self._unknown)  # type: ignore[arg-type]

    def start(self, request: Request[Answer], fds: Sequence[int] = ()) -> Future[Answer]:
        reply: Future[Answer] = Future()
        if self.lost is not None:
            reply.set_exception(self.lost)
            return reply
        self._descriptors.extend(map(os.dup, fds))
        if self._world.time.is_script:
            reply.add_done_callback(self._wakes(self._world.time.waker(lambda: type(request).__name__)))
        self._world.spawn(self._answer(request, reply))
        return reply

    def wait(self, reply: Future[Answer], timeout: float = ANSWER_SECONDS) -> Answer:
        while not self.settled(reply, timeout):  # A daemon that answers pings is waited for.
            continue
        return reply.result()

    def settled(self, reply: Future[Any], timeout: float = 0.0) -> bool:
        return self._world.wait(reply.done, timeout)

    def clock(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.compute(seconds)

    def watch(self, watcher: Callable[[EquipoiseError], None] | None) -> None:
        pass

    def close(self) -> None:
        self._world.spawn(self.dispatcher.leave_all("its client has gone"))

    @staticmethod
    def _wakes(wake: Callable[[], None]) -> Callable[[Future[Any]], None]:
        return lambda reply: wake()

    @staticmethod
    def _unknown() -> Any:
        raise Refused("a daemon of a world has no status")

    async def _hear(self, line: str) -> None:
        """Take a line for the script's log."""

    async def _answer(self, request: Request[Any], reply: Future[Any]) -> None:
        asked = self._world.now
        try:
            answer, error = await self.dispatcher.do(request), None
        except (EquipoiseError, ValueError) as refused:
            answer, error = None, Refused(str(refused))
        while answer is not None:
            await passed(min(HELD_SECONDS, self._world.held_back(request)))
            if self._world.now >= asked + self._world.held_back(request):
                break
        if reply.done():
            return
        self._world.log.append((self._world.now, self.welcome.peer_id, request, answer))
        reply.set_exception(error) if error is not None else reply.set_result(answer)


class World:
    """Peers, the clock, and the network between them.

    Attributes:
        net: The network: its latency, its cuts.
        log: All that scripts have asked their daemons, with the answers: time, peer, request, answer.
        rounds: Ids of the rounds that have begun, in that order.
        fails: Called with the number of a round, from 1, and a peer; whether no frame of it gets through there.
        fetch_seconds: What the download of a snapshot takes at least.
        recover_seconds: And that of a mean that was missed.
        codec: Codec of runs that are joined without one.
        options: Further options of `join`.
        named: The peers by which the others had their daemons join.
    """

    named: frozenset[str] = frozenset()

    def __init__(self, codec: str = "fp32", seed: int = 0, **options: Any) -> None:
        self.seed, self.codec, self.options = seed, codec, options
        self.loop = JumpingLoop()
        self.time = LoopTime(self.loop)
        self.net = Net(LATENCY_SECONDS, LAG_SECONDS, seed=seed)
        self.log: list[tuple[float, str, Request[Any], Any]] = []
        self.rounds: list[bytes] = []
        self.fails: Callable[[int, str], bool] = lambda number, peer: False
        self.fetch_seconds = self.recover_seconds = 0.0
        self.links: dict[str, WorldLink] = {}
        self.daemons: dict[str, WorldDaemon] = {}
        self.lives: dict[str, int] = {}
        self._workers: dict[str, Worker] = {}
        self._clients: dict[str, Client] = {}
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        made.append(self)

    @property
    def now(self) -> float:
        return self.loop.time()

    # ---- peers ----

    def peer(self, name: str, work: Callable[[], None], at: float = 0.0) -> None:
        """Have a peer's script begin at some time; also while others run, and again after the peer was killed."""
        index = next(self._order)
        self._clients.pop(name, None)
        self.net.frozen.discard(name)

        def live() -> None:
            self.compute(at - self.now)
            work()
            if name in self.links:
                self.links[name].close()

        seed = Random(f"{self.seed} {name}").getrandbits(32)
        self._workers[name] = self.time.spawn(index, live, seed)

    def join(self, peer: str, name: str, tensors: Tensors, **options: Any) -> Run:
        """Take part in a run, as a script of this peer does."""
        if peer not in self._clients:
            self._clients[peer] = Client(self.connect(peer))
        return self._clients[peer].join(name, tensors, **{"codec": self.codec, **self.options, **options})

    def connect(self, peer: str) -> WorldLink:
        """Connect to the daemon of this peer, which begins with that."""
        made: Future[WorldLink] = Future()

        def make() -> None:
            daemon = self.daemons[peer] = WorldDaemon(self, peer)
            self.links[peer] = WorldLink(self, daemon)
            made.set_result(self.links[peer])

        self.loop.call_soon(make)
        while not self.wait(made.done, self.net.latency):
            continue
        return made.result()

    def kill(self, name: str) -> None:
        """End a peer's script and daemon without a word; its record stays for a while."""
        if name in self.net.transports:
            self.links[name].lost = DaemonLost("this peer was killed")
            self.net.kill(name)
            records = [run for run in self.net.records.values() if name in run]
            self.net.frozen.add(name)
            self.time.at(self.now + TTL_SECONDS, lambda: self._forget(name, records))
            self.spawn(self.daemons[name].router.stop())
        self.time.kill(self._workers[name])

    def _forget(self, name: str, records: list[dict[str, Candidate]]) -> None:
        if name in self.net.frozen:
            for run in records:
                run.pop(name, None)

    # ---- time ----

    def run(self, *peers: Any) -> None:
        """Until all scripts are through, those that these peers begin now too; raises what one of them raised."""
        for peer in peers:
            peer.begin()
        try:
            self.time.run()
        finally:
            self.close()

    def each(self, count: int, work: Callable[[int], Any]) -> list[Any]:
        """Run a script for each of peer0, peer1, ..., by its index; returns what the scripts return."""
        found: dict[int, Any] = {}
        for index in range(count):
            self.peer(f"peer{index}", lambda index=index: found.update({index: work(index)}))
        self.run()
        return [found[index] for index in range(count)]

    def close(self) -> None:
        """End the daemons; idempotent."""
        if not self.loop.is_closed():
            self.loop.run_until_complete(self._stop())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Let the others go on until a condition holds that an answer brings about, or for so long."""
        if self.time.is_script:
            return self.time.wait(until, seconds)
        end = self.now + seconds
        while not until() and self.now < end:
            self.loop.run_until_complete(passed(min(0.001, seconds)))
        return until()

    def compute(self, seconds: float) -> None:
        """What a forward and a backward pass take."""
        if self.time.is_script:
            self.time.wait(lambda: False, seconds)
        else:
            self.loop.run_until_complete(passed(seconds))

    def spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- the network ----

    def hear_of_round(self, peer: str, number: int, frames: int) -> None:
        """Let a peer hear so many frames of the round that is the `number`th to begin, and no more."""
        tap, left = self.tap, [frames]

        def cut(sender: str, receiver: str, header: bytes, body: bytes) -> list[Frame]:
            passed = tap(sender, receiver, header, body)
            if receiver == peer and len(self.rounds) == number and header[:1] == ROUND_FRAME:
                left[0] -= 1
                return passed if left[0] >= 0 else []
            return passed

        self.tap = cut  # type: ignore[method-assign]

    def tap(self, sender: str, receiver: str, header: bytes, body: bytes) -> list[Frame]:
        """What leaves in place of a frame: nothing, if its round is to fail for one of both."""
        if header[:1] == ROUND_FRAME:
            found = header[1:HEADER_PREFIX_BYTES]
            if found not in self.rounds:
                self.rounds.append(found)
            number = self.rounds.index(found) + 1
            if self.fails(number, sender) or self.fails(number, receiver):
                return []
        return [(header, body)]

    def held_back(self, request: Request[Any]) -> float:
        """The seconds for which the answer is held back."""
        if isinstance(request, Fetch):
            return self.fetch_seconds if request.wish.after is None else self.recover_seconds
        return 0.0

    # ---- what has happened ----

    @property
    def recovered(self) -> list[tuple[str, StateId]]:
        """Who had which missed mean."""
        asked = [(peer, request, got) for _, peer, request, got in self.log if isinstance(request, Fetch)]
        return [
            (peer, asked.wish.after)
            for peer, asked, got in asked
            if asked.wish.after and got is not None and got.sources
        ]

    @property
    def offered(self) -> list[str]:
        """Who has made a snapshot for others."""
        return [peer for _, peer, asked, _ in self.log if isinstance(asked, OfferState)]

    @property
    def made(self) -> tuple[int, tuple[str, ...]]:
        """The epoch of the last state that a round has made, and the peers that made it."""
        made = [
            (one.state.epoch + 1, tuple(one.givers))
            for _, _, one in self.outcomes
            if one.state and one.givers
        ]
        return max(made, default=(0, ()))

    @property
    def outcomes(self) -> list[tuple[float, str, Outcome]]:
        """The outcomes of rounds at each peer, with their times."""
        return [(at, peer, got) for at, peer, asked, got in self.log if isinstance(asked, StartRound) and got]

    async def _stop(self) -> None:
        for link in self.links.values():
            link.lost = link.lost or DaemonLost("the world has ended")
        await asyncio.gather(*(daemon.router.stop() for daemon in self.daemons.values()))
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
