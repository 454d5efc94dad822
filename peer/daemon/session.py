"""The daemon's work for its clients: a session is one client's part in one run.

It has shared memory, and joins a run of the swarm, with its own schema and run driver, for each purpose at first use. A
script that steps agrees on terms after its join; a script that does not is announced as averaging.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from equipoise.averaging.aio.router import MAX_LEFTOVERS
from equipoise.averaging.draw import Drawn
from equipoise.averaging.layout import Vectors
from equipoise.averaging.ledger import Given, Ledger
from equipoise.averaging.outcome import FetchOutcome, NoPeers, Outcome, RunState
from equipoise.averaging.ports import Candidate
from equipoise.averaging.rules import Mean
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import MAX_EPOCH, StateId
from equipoise.averaging.strategy import Federated
from equipoise.compression import kernels
from equipoise.compression.choice import WORTH_VALUES, are_worth
from equipoise.dht.records import MAX_RUNS_PER_PEER
from equipoise.limits import LruDict
from equipoise.peer.control.messages import MAX_TEXT, AgreeRun, Fetch, JoinRun, Progress, StartRound
from equipoise.peer.errors import Refused
from equipoise.peer.purposes import AVERAGE, PURPOSES, STEP, agreed_spec, run_specs
from equipoise.peer.shared_memory import Region, SharedMemory
from equipoise.peer.status import Exchanges, Kernels, PeerRow, RunStatus

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router
    from equipoise.averaging.aio.run_driver import RunDriver
    from equipoise.averaging.aio.transfer import Transfer
    from equipoise.compression.device_reduce import DeviceReducer
    from equipoise.dht.swarm import Swarm

MAX_RUNS = (MAX_RUNS_PER_PEER - MAX_LEFTOVERS) // len(PURPOSES)
"""Most runs of one daemon. Others keep `MAX_RUNS_PER_PEER` records of it: each purpose of a run has its own, and so has
each run that was left and is still served."""

ANNOUNCE_SECONDS = 0.5
"""Longest time for a script to agree on terms; after that, its run is announced to the peers that average."""

SEARCH_SECONDS = 5.0
"""Longest search of the directory. It takes some milliseconds; peers that it does not find in time are met later."""

COMPARE_SECONDS = 5.0
"""Longest time for two questions to the peers of another spec; each may stay unanswered for 2 s."""

NUMPY = Kernels("numpy", f"others are loaded for the first run of {WORTH_VALUES:,} values or more")

LOADS = "the daemon loads its kernels, once"

JUST_JOINED = "it has just been joined"

log = logging.getLogger(__name__)


class Session:
    """Takes part in one run for one client.

    Attributes:
        name: The run's name as the client calls it.
        client: The client, as messages name it.
    """

    def __init__(
        self, router: Router, swarm: Swarm, request: JoinRun, region: Region, client: str, ledger: Ledger
    ) -> None:
        """Join as the client asks; its vectors lie in `region`, and `ledger` counts its rounds.

        Raises:
            ValueError: An option or the schema is not valid, or the region is too small.
        """
        self.name = request.run
        self.client = client
        self._router = router
        self._swarm = swarm
        self._ledger = ledger
        self._region: Region | None = region
        self._specs = run_specs(request)
        for spec in self._specs.values():
            self._require_room(spec)
        self._role = swarm.role(swarm.peer)
        if self._role == "relay":
            raise Refused(
                "this daemon was invited as a relay, which joins no run", "ask for an invitation as trainer"
            )
        self._joined = self._specs.get(STEP)
        self._run_drivers: dict[str, RunDriver] = {}
        self._purpose = AVERAGE
        self._told: dict[str, str] = {}
        self._observes = self._role == "observer"
        self._joining = asyncio.Lock()
        self._round: asyncio.Task[Outcome] | None = None
        self._stopped = ""
        self._leaving: asyncio.Task[None] | None = None
        self._held: StateId | None = None
        self._claimed = False
        self._announcing = asyncio.create_task(self._announce())

    async def agree(self, request: AgreeRun, company: frozenset[str] = frozenset()) -> str:
        """Let `step` meet only peers of the same terms, and carry buffers behind the gradients; see `Run.agree`.

        `company` are the peers that this one has trained with. Returns how the terms of peers differ beside which this
        peer waits, one line; empty if none are known.

        Raises:
            Refused: Peers that have a say have other terms. Or the run has stepped on other terms, or has no gradients.
            ValueError: A term is too long or not printable, or a buffer has the name of a gradient.
        """
        if self._joined is None:
            raise _nothing_to(STEP, self.name)
        dtypes, frozen = request.dtypes, request.frozen
        agreed = agreed_spec(self._joined, request.terms, request.buffers, dtypes, frozen)
        self._require_room(agreed)
        async with self._joining:
            if STEP in self._run_drivers and agreed != self._specs[STEP]:
                hint = "agree before the first accumulate and step, or leave the run and join it again"
                raise Refused(f"run {self.name!r} has stepped on other terms", hint)
            self._specs[STEP], self._observes = agreed, request.observes or self._role == "observer"
            self._announcing.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEARCH_SECONDS):
                # Before joining: for a run that this peer is in, the directory returns what it knows already.
                await self._swarm.directory.peers(agreed.name)
        run_driver = await self._use(STEP)
        named, trained = self._swarm.named, company - {self._swarm.peer}
        objection = await run_driver.search.objection(named, trained, COMPARE_SECONDS)
        if objection:
            await self._disagree(run_driver)
            raise Refused(f"run {self.name!r}: {objection}", "give the same, or use another name")
        return run_driver.search.comparison.reason

    async def start_round(self, request: StartRound) -> Outcome:
        """Exchange the contribution in the shared memory; the run driver ends the round within its timeout.

        Raises:
            Refused: A round is going on.
        """
        if self._round is not None or self._leaving is not None:
            hint = "wait for its outcome"
            raise Refused(f"a round of run {self.name!r} is going on, or it is being left", hint)
        started, self._stopped = time.time(), ""
        self._round = asyncio.create_task(self._exchange(request))
        try:
            await asyncio.wait({self._round})
            if self._round.cancelled():
                outcome = self._failed("the run was left before the round ended")
            else:
                outcome = self._round.result()
        finally:
            self._round = None
        if not outcome.started:  # The round ended before a run driver was asked, or the run was left.
            outcome = msgspec.structs.replace(outcome, started=started)
        self._ledger.add(outcome, self._specs[request.purpose].layout.encoded_size)
        how = "ok" if outcome.ok else "failed"
        took = outcome.seconds.get("total", 0.0)
        log.info("run %s, round %d: %s (%s), %.3f s", outcome.run, outcome.round, how, outcome.reason, took)
        return outcome

    def stop_round(self, why: str) -> None:
        """End an open search for a group; a round that has begun goes on."""
        self._stopped = why[:MAX_TEXT] or "stopped"
        for run_driver in self._run_drivers.values():
            run_driver.search.stop(self._stopped)

    async def report_accumulated(self, weight: float) -> None:
        """Publish the weight that the client has accumulated towards its next step."""
        (await self._use(STEP)).search.announcer.report_accumulated(weight)

    def tell(self, topic: str, line: str) -> None:
        """Let `status` show a line of the client; an empty one takes back the topic's last."""
        self._told[topic] = line[:MAX_TEXT]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know about the run, one line each."""
        lines = [line for run_driver in self._run_drivers.values() for line in run_driver.twins.values()]
        if self._claimed:
            lines.append(f"run {self.name}: this daemon was invited as an observer: its weight counts as 0")
        return tuple(lines)

    @property
    def leaving(self) -> bool:
        """True once `leave` was called."""
        return self._leaving is not None

    async def peers(self) -> list[PeerRow]:
        """All known peers of the purposes in use."""
        rows = []
        for purpose, run_driver in list(self._run_drivers.items()):
            spec = self._specs[purpose]
            directory = self._swarm.directory
            known = [*await directory.peers(spec.name), *directory.banned(spec.name)]
            rows += [self._row(spec, run_driver, found) for found in known if not found.left]
        return rows

    async def state(self) -> RunState:
        """State of the next round of the purpose used last."""
        return (await self._run_driver(self._purpose)).search.state

    async def members(self, data: str) -> tuple[str, ...]:
        """The peers that answer, train and, if that is given, share `data`, of the purpose used last, sorted."""
        search = (await self._run_driver(self._purpose)).search
        if data not in ("", search.membership.data):
            search.membership.data = data
            search.announcer.publish()
        return search.membership.live((), data)

    def _draw(self, run_driver: RunDriver) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The peers that train in the next round of a federated run, and those that have contributed to it."""
        gathering = run_driver.gathering
        if gathering is not None and gathering.drawn:
            return gathering.drawn, gathering.contributed
        if self._held is not None and isinstance(self._specs[self._purpose].strategy, Federated):
            return run_driver.search.draw(self._held).peers, ()
        return (), ()

    async def progress(self, target: float | None, held: StateId | None) -> Progress:
        """Weight accumulated towards the next step: by this peer, and by all, as far as the others' claims count."""
        run_driver = await self._use(STEP)
        self._held = held or self._held
        drawn = run_driver.search.draw(held) if held is not None else Drawn((), ())
        others, own = await run_driver.others_accumulated(target), run_driver.search.announcer.accumulated
        awaited = run_driver.search.membership.is_trained(self._swarm.named)
        return Progress(own, own + others, run_driver.transfer.wanted, run_driver.waits, drawn, awaited)

    async def transfer(self) -> Transfer:
        """The exchange of the run's state, among the peers that step if there are gradients."""
        purpose = STEP if STEP in self._specs else AVERAGE
        return (await self._use(purpose)).transfer

    async def fetch(self, request: Fetch, memory: SharedMemory) -> FetchOutcome:
        """Download a snapshot, or a mean that was missed, into the client's memory.

        Raises:
            Refused: The epoch is out of range, or the memory too small for the mean.
            ValueError: A download of this run is going on already.
        """
        if not 0 <= request.wish.at_least <= MAX_EPOCH:
            raise Refused(f"expected an epoch of 0 to {MAX_EPOCH}, got {request.wish.at_least}")

        def room(size: int) -> memoryview:
            if size > memory.capacity:
                raise Refused(f"expected shared memory of {size} bytes, got {memory.capacity}")
            memory.allocate(size)  # For gigabytes the kernel takes seconds to provide the pages.
            return memory.view(size, writable=True)

        wish = msgspec.structs.replace(request.wish, limit=memory.capacity)
        found = await (await self.transfer()).fetch(wish, request.timeout, room)
        if found.round is not None:
            spec = self._specs[STEP if STEP in self._specs else AVERAGE]
            self._ledger.add(found.round, spec.layout.encoded_size)
        return found

    def status(self) -> RunStatus:
        """The run's part of the daemon's status."""
        spec, run_driver = self._specs[self._purpose], self._run_drivers.get(self._purpose)
        transfers = [] if self.leaving else [one.transfer.standing for one in self._run_drivers.values()]
        shown = RunStatus(
            name=self.name,
            purpose=self._purpose,
            spec=spec.hash,
            codec=spec.options.codec,
            group_size=spec.options.group_size,
            values=spec.schema.size,
            state=NoPeers(JUST_JOINED),
            reason=JUST_JOINED,
            transfer="; ".join(filter(None, transfers)),
            told={topic: line for topic, line in self._told.items() if line},
            strategy=spec.options.strategy,
        )
        if run_driver is None:
            return shown
        drawn, contributed = self._draw(run_driver)
        gathering = run_driver.gathering
        return msgspec.structs.replace(
            shown,
            state=run_driver.search.state,
            accumulated=run_driver.search.announcer.accumulated,
            reason=run_driver.search.reason if gathering is None else gathering.reason,
            round=run_driver.round,
            rounds_ok=run_driver.counts.ok,
            rounds_failed=run_driver.counts.failed,
            last=run_driver.counts.last[-1] if run_driver.counts.last else None,
            exchanges=_exchanges(run_driver) if spec.strategy.pairs else None,
            drawn=drawn,
            contributed=contributed,
            advice=run_driver.advice,
        )

    def _row(self, spec: RunSpec, run_driver: RunDriver, found: Candidate) -> PeerRow:
        reach = self._swarm.reach(found.peer)
        return PeerRow(
            run=spec.name,
            peer=found.peer,
            me=found.peer == self._swarm.peer,
            ready=found.ready,
            round=found.round,
            dialable=found.dialable,
            bandwidth=found.bandwidth,
            accumulated=found.accumulated,
            same_spec=found.spec == spec.hash,
            reach=reach.state,
            why=reach.reason,
            differs=run_driver.search.comparison.difference(found.peer),
            name=self._swarm.name(found.peer),
            tags=found.tags,
            role=self._swarm.role(found.peer),
            banned=self._swarm.standing(found.peer) == "banned",
            faults=run_driver.search.machine.context.deeds.told(found.peer),
            given=self._ledger.of(found.peer),
        )

    async def leave(self, reason: str) -> None:
        """Leave, finish or fail an open round, and release the memory; all callers wait for the same end."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(reason))
        await asyncio.shield(self._leaving)

    async def _announce(self) -> None:
        await asyncio.sleep(ANNOUNCE_SECONDS)
        await self._run_driver(AVERAGE)

    async def _use(self, purpose: str) -> RunDriver:
        run_driver = await self._run_driver(purpose)
        self._purpose = purpose
        return run_driver

    async def _run_driver(self, purpose: str) -> RunDriver:
        if purpose not in self._specs:
            raise _nothing_to(purpose, self.name)
        async with self._joining:
            if purpose not in self._run_drivers:
                if self._leaving is not None:
                    raise Refused(f"run {self.name!r} is being left", "join it again")
                self._run_drivers[purpose] = await self._router.join(self._specs[purpose], self._observes)
            return self._run_drivers[purpose]

    async def _disagree(self, run_driver: RunDriver) -> None:
        """Undo the agreement: the client may try again."""
        async with self._joining:
            await self._router.leave(run_driver, "others have agreed on something else")
            self._run_drivers.pop(STEP, None)
            self._purpose = AVERAGE
            self._announcing = asyncio.create_task(self._announce())
            if self._joined is not None:
                self._specs[STEP] = self._joined

    async def _exchange(self, request: StartRound) -> Outcome:
        try:
            run_driver = await self._use(request.purpose)
        except Refused:
            if self._leaving is None:
                raise
            return self._failed("the run was left before the round began")
        region, state = self._region, request.state
        assert region is not None, "leaving cancels the round before it releases the memory"
        if state is not None:
            self._reach(run_driver, state.epoch)
        if self._stopped:  # `stop_round` was called before the search began.
            return self._failed(self._stopped)
        spec = self._specs[request.purpose]
        sizes = spec.layout.encoded_size, spec.layout.mean_size(spec.options.group_size)
        vectors = Vectors(region.contribution[: sizes[0]], region.mean[: sizes[1]], request.clamped)
        reported = request.metrics, request.evaluation, request.purpose == STEP
        weight = 0.0 if self._role == "observer" else request.weight
        self._claimed |= weight < request.weight
        outcome = await run_driver.average(vectors, weight, request.timeout, state, *reported)
        if state is not None and outcome.givers and outcome.state == state:
            self._reach(run_driver, state.epoch + 1)
        return outcome

    def _reach(self, run_driver: RunDriver, epoch: int) -> None:
        run_driver.transfer.reach(epoch)
        run_driver.search.announcer.note_epoch(epoch)

    def _failed(self, reason: str) -> Outcome:
        return Outcome(ok=False, reason=reason, run=self.name)

    def _require_room(self, spec: RunSpec) -> None:
        needed = spec.layout.mean_size(spec.options.group_size)
        if self._region is not None and needed > self._region.size:
            room = self._region.size
            raise Refused(f"expected shared memory of {needed} bytes for run {spec.name!r}, it holds {room}")

    async def _leave(self, reason: str) -> None:
        self._announcing.cancel()
        async with self._joining:
            drivers = self._run_drivers.values()
            leaving = [asyncio.create_task(self._router.leave(run_driver, reason)) for run_driver in drivers]
        if leaving:
            await asyncio.wait(leaving)
        if self._round is not None:
            self._round.cancel()
        self._region = None


class Service:
    """Joins, serves and leaves runs on behalf of clients.

    Attributes:
        kernels: What encodes and decodes.
        swarm: The daemon's swarm.
    """

    def __init__(self, router: Router, swarm: Swarm, reducer: DeviceReducer | None = None) -> None:
        self.kernels = NUMPY
        self._router = router
        self.swarm = swarm
        self._reducer = reducer
        self.ledgers: LruDict[str, Ledger] = LruDict(MAX_RUNS)
        self._sessions: dict[str, Session] = {}
        self._loading = asyncio.Lock()

    @property
    def sessions(self) -> Sequence[Session]:
        """Open sessions, by the runs' names."""
        return [self._sessions[name] for name in sorted(self._sessions)]

    @property
    def given(self) -> dict[str, Given]:
        """What this daemon has given to the runs of its scripts, by their names, also after they have left."""
        return {name: ledger.of(self.swarm.peer) for name, ledger in sorted(self.ledgers.items())}

    async def join(
        self, request: JoinRun, fd: int, client: str, say: Callable[[str], Awaitable[None]]
    ) -> Session:
        """Take part in a run for a client whose vectors lie in the memory behind `fd`; takes over `fd`.

        What takes long is told the client by `say`, before it begins.

        Raises:
            ValueError: An option, the schema or the memory is not valid, or the run has a client already.
        """
        region = Region.attach(fd, request.size)
        await self._load_kernels(request, say)
        await self._make_room(request.run)
        ledger = self.ledgers.get(request.run) or Ledger(self.swarm.peer)
        session = Session(self._router, self.swarm, request, region, client, ledger)
        self._sessions[request.run], self.ledgers[request.run] = session, ledger
        ledger.begin()
        return session

    async def leave(self, session: Session, reason: str) -> None:
        """Leave a run; idempotent."""
        await session.leave(reason)
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    async def _load_kernels(self, request: JoinRun, say: Callable[[str], Awaitable[None]]) -> None:
        """Load what the run computes with, in threads: a daemon without a run does not need these libraries.

        Kernels are chosen when the first run is joined that is worth it, or at the first join if a GPU reduces.

        Raises:
            ValueError: An option or the schema is not valid.
        """
        needs_torch, size = await asyncio.to_thread(_needs, request)
        worth = self.kernels is NUMPY and (are_worth(size) or self._reducer is not None)
        if worth or (needs_torch and "torch" not in sys.modules):
            await say(LOADS)
        if worth or needs_torch:
            # A client that goes meanwhile does not end it: the next one needs the same.
            await asyncio.shield(asyncio.create_task(self._load(needs_torch, worth)))

    async def _load(self, needs_torch: bool, worth: bool) -> None:
        async with self._loading:
            if needs_torch:
                await asyncio.to_thread(importlib.import_module, "torch")
            if not worth or self.kernels is not NUMPY:
                return
            chosen = await asyncio.to_thread(kernels)
            # The daemon holds numpy arrays. Without compiled kernels, numpy computes.
            name, reason = chosen.name if chosen.arrays else "numpy", chosen.reason
            if self._reducer is not None:
                device = str(self._reducer.device)
                there = await asyncio.to_thread(kernels, device)
                name, reason = f"{name}; {there.name} on {device}", f"{reason}; {there.reason}"
            self.kernels = Kernels(name, reason)
            log.info("kernels: %s (%s)", name, reason)

    async def _make_room(self, name: str) -> None:
        other = self._sessions.get(name)
        if other is not None and other.leaving:
            await self.leave(other, "its client has gone")  # The new client need not notice.
            other = self._sessions.get(name)
        if other is not None:
            hint = "end that with run.leave() there, use another name, or start another daemon with another --home"
            raise Refused(f"this daemon takes part in run {name!r} already, for {other.client}", hint)
        if len(self._sessions) >= MAX_RUNS:
            told = f"run {name!r} is one too many: this daemon takes part in {MAX_RUNS} runs already, the maximum"
            raise Refused(told, "leave one, or start another daemon with another --home")


def _exchanges(run_driver: RunDriver) -> Exchanges:
    """The exchanges of a gossip run, in figures."""
    apart = [one.apart for one in run_driver.counts.last if one.apart is not None]
    return Exchanges(
        partners=run_driver.search.membership.count,
        ok=run_driver.counts.ok,
        failed=run_driver.counts.failed,
        in_doubt=run_driver.counts.in_doubt,
        spread=sum(apart) / len(apart) if apart else None,
    )


def _needs(request: JoinRun) -> tuple[bool, int]:
    """Whether a rule or codec of the run uses torch, whose import would hold a round up for 2 s; and the number of
    values of the run's longest vector."""
    specs = run_specs(request).values()
    needs_torch = any(not isinstance(spec.rule, Mean) or spec.layout.codec.math is None for spec in specs)
    return needs_torch, max((spec.layout.size for spec in specs), default=0)


def _nothing_to(purpose: str, run: str) -> Refused:
    return Refused(f"run {run!r} has no gradients to {purpose}", "join it with parameters that need them")
