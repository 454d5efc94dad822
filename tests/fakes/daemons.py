"""Real daemons of one run in virtual time: their scripts average, and they may be killed, parted, or stopped.

All of a daemon's averaging is real but for its sockets.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch

from equipoise.averaging.aio.router import Router
from equipoise.averaging.aio.run_driver import RunDriver
from equipoise.averaging.aio.search_driver import MATCHMAKING_FRAME
from equipoise.averaging.matchmaking.messages import MatchmakingMessage, decode
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.dht.records import TTL_SECONDS
from equipoise.tasks import sleep_until
from fakes.hostile import Frame, JumpingLoop, TappedTransport
from fakes.memory import FakeIdentity, Net
from fakes.vectors import averaged
from simulator.core import Violation

made: list[Daemons] = []
"""All that were made; a fixture closes them."""

OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")
"""The daemon whose task runs."""


class _Ready(deque[Any]):
    """The callbacks of a loop that are due; those of stopped daemons are kept back."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: set[str] = set()
        self.kept: list[Any] = []

    def append(self, handle: Any) -> None:
        if self.stopped and handle._context.get(OWNER) in self.stopped:
            self.kept.append(handle)
        else:
            super().append(handle)


class Round(NamedTuple):
    """A round of one daemon: when its group had formed, its number and its members."""

    at: float
    number: int
    group: tuple[str, ...]


class Daemons:
    """The daemons of one run. Time passes in `run`; between its calls faults may be made.

    Attributes:
        net: The network between them.
        chance: Of the world.
        runs: The part of each daemon in the run, by name, of the dead too.
        rounds: The rounds of each daemon, by name.
        called: How often each has asked for a round.
        claims: The state that each claims for round 0; later rounds lead to later ones.
        sent: When which daemon sent which other a message of matchmaking.
        passes: Whether a message of matchmaking arrives, by sender and receiver.
        on_idle: What each does when its round is over, or its search.
    """

    def __init__(
        self,
        spec: RunSpec,
        names: Sequence[str] = (),
        seed: int = 0,
        latency: float = 0.002,
        lag: float = 0.04,
    ) -> None:
        self.chance = Random(f"daemons {seed}")
        self.net = Net(latency, lag, seed=seed)
        self.runs: dict[str, RunDriver] = {}
        self.rounds: dict[str, list[Round]] = defaultdict(list)
        self.called: Counter[str] = Counter()
        self.claims: dict[str, StateId] = {}
        self.sent: list[tuple[float, str, str, MatchmakingMessage]] = []
        self.passes: Callable[[str, str, MatchmakingMessage], bool] = lambda sender, to, message: True
        self.on_idle: dict[str, Callable[[], None]] = {}
        self._spec = spec
        self._loop, self._ready = JumpingLoop(), _Ready()
        self._loop._ready = self._ready  # type: ignore[attr-defined]
        self._wrong: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._wrong.append(context))
        self._contexts: dict[str, contextvars.Context] = {}
        self._routers: dict[str, Router] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        made.append(self)
        for name in names:
            self.add(name)

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def living(self) -> list[str]:
        """Those that were not killed."""
        return [name for name in self.runs if name in self.net.transports]

    def coordinator_of(self, name: str) -> str:
        """The peer that coordinates another's next round, as that one sees it."""
        run = self.runs[name]
        return str(run.search.membership.coordinator(name, run.round, self.now))

    # ---- daemons ----

    def add(self, name: str, dialable: bool = True) -> None:
        """Start a daemon that joins the run, also in place of one that was killed."""
        self.net.frozen.discard(name)
        self._contexts[name] = contextvars.copy_context()
        self._contexts[name].run(OWNER.set, name)
        self._loop.run_until_complete(self._spawn(name, self._join(name, dialable)))

    async def _join(self, name: str, dialable: bool) -> None:
        transport, directory = self.net.peer(name, dialable)
        tapped: Any = TappedTransport(transport, partial(self._tap, name))
        router = Router(tapped, directory, FakeIdentity(name), chance=Random(self.chance.random()))
        self._routers[name], self.runs[name] = router, await router.join(self._spec)

    def _tap(self, sender: str, to: str, header: bytes, body: bytes) -> list[Frame]:
        if header[:1] == MATCHMAKING_FRAME:
            message = decode(header[1:])
            self.sent.append((self.now, sender, to, message))
            if not self.passes(sender, to, message):
                return []
        return [(header, body)]

    def kill(self, name: str) -> None:
        """End a daemon and its script without a word; its record stays for as long as it lasts."""
        self.resume(name)
        self.on_idle.pop(name, None)
        self.net.frozen.add(name)
        self.net.kill(name)
        self._loop.call_later(TTL_SECONDS, self._expire, name)
        if name in self._work:
            self._work[name].cancel()
        self._spawn(name, self._routers[name].stop())

    def _expire(self, name: str) -> None:
        if name in self.net.frozen:
            self.net.records[self._spec.name].pop(name, None)

    def stop(self, name: str) -> None:
        """Have a daemon take no step, as by SIGSTOP."""
        self._ready.stopped.add(name)

    def resume(self, name: str) -> None:
        """Have it go on."""
        self._ready.stopped.discard(name)
        kept, self._ready.kept = self._ready.kept, []
        for handle in kept:
            self._ready.append(handle)

    def sever(self, one: str, other: str) -> None:
        """Break the channels between two."""
        for channel in [each for each in self.net.transports[one].channels if each.peer == other]:
            channel.close()

    def cut(self, name: str, seconds: float) -> None:
        """Part a daemon from all others for a while."""
        self.net.cut(name)
        self._loop.call_later(seconds, self.net.cuts.clear)

    # ---- scripts ----

    def ready(self, *names: str, after: float = 0.0, weight: float = 1.0, patience: float = 3600.0) -> None:
        """Have scripts average once, unless they do so already."""
        for name in names:
            self._loop.call_later(after, self._begin, name, weight, patience)

    def each_round(self, name: str, compute: Callable[[], float]) -> None:
        """Have a script average again and again, `compute()` seconds after its last round."""
        self.on_idle[name] = lambda: self.ready(name, after=compute())
        self.on_idle[name]()

    def withdraw(self, name: str) -> None:
        """Have a script give up."""
        stop = self.runs[name].search.stop
        self._loop.call_soon(stop, "it withdraws", context=self._contexts[name].copy())

    def _begin(self, name: str, weight: float, patience: float) -> None:
        if name in self.living and (name not in self._work or self._work[name].done()):
            self.called[name] += 1
            self._work[name] = self._spawn(name, self._average(name, weight, patience))
            self._work[name].add_done_callback(lambda _: self._loop.call_soon(self._idle, name))

    def _idle(self, name: str) -> None:
        self._news.set()
        self.on_idle.get(name, lambda: None)()

    async def _average(self, name: str, weight: float, patience: float) -> None:
        values, claim = torch.ones(self._spec.layout.size), self.claims.get(name)
        state = claim and StateId(claim.epoch + self.runs[name].round, claim.lineage)
        began = self.now
        outcome = await averaged(self.runs[name], values, values.clone(), weight, patience, state)
        if outcome.group:
            formed = began + outcome.seconds["matchmaking"]
            self.rounds[name].append(Round(formed, outcome.round, outcome.group))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(work, context=self._contexts[name])

    # ---- time ----

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; returns whether `until` came true, as it may when a script is idle.

        Raises:
            Violation: A daemon met an error.
        """
        held = self._loop.run_until_complete(self._pass(until, self.now + seconds))
        if self._wrong:
            raise Violation(f"a daemon met an error: {self._wrong[0]}")
        return held

    async def _pass(self, until: Callable[[], bool], end: float) -> bool:
        while not until():
            if self.now >= end:
                return False
            self._news.clear()
            await sleep_until(self._news, end - self.now)
        return True

    def soon(self, act: Callable[[], None]) -> None:
        """Have something happen outside of all daemons, at once."""
        self._loop.call_soon(act, context=contextvars.Context())

    def close(self) -> None:
        """End all that goes on."""
        for name in list(self._ready.stopped):
            self.resume(name)
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()
