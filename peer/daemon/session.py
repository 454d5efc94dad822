"""A session is one client's part in one run of the swarm.

It has shared memory, and joins a run of the swarm, with its own schema and run driver, for each purpose at first use. A
script that steps agrees on terms after its join; a script that does not is announced as averaging.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from equipoise.averaging.draw import Drawn
from equipoise.averaging.layout import Vectors
from equipoise.averaging.ledger import Ledger
from equipoise.averaging.outcome import FetchOutcome, Outcome, RunState
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.peer.control.messages import (
    MAX_TEXT,
    AgreeRun,
    Fetch,
    JoinRun,
    Progress,
    SendMessage,
    StartRound,
)
from equipoise.peer.daemon.script_messages import ScriptMessages
from equipoise.peer.errors import Refused
from equipoise.peer.purposes import AVERAGE, STEP, agreed_spec, run_specs
from equipoise.peer.shared_memory import Region, SharedMemory

if TYPE_CHECKING:
    from equipoise.averaging.aio.router import Router
    from equipoise.averaging.aio.run_driver import RunDriver
    from equipoise.averaging.aio.transfer import Transfer
    from equipoise.dht.swarm import Swarm

SEARCH_SECONDS = 5.0
"""Longest search of the directory. It takes some milliseconds; peers that it does not find in time are met later."""

COMPARE_SECONDS = 5.0
"""Longest time for two questions to the peers of another spec; each may stay unanswered for 2 s."""

STOPPING = "this daemon is stopping"
"""Why a run is left whose script goes on: another daemon may take over."""

log = logging.getLogger(__name__)


ANNOUNCE_SECONDS = 0.5
"""Longest time for a script to agree on terms; after that, its run is announced to the peers that average."""


class RunDrivers:
    """Joins the swarm's run of a purpose when that is first used.

    Attributes:
        specs: By purpose, the run that this peer is in, or would be.
        in_use: By purpose, the drivers of the runs that it is in.
        purpose: The purpose used last.
        closed: Whether the client leaves, so that nothing more is joined.
    """

    def __init__(self, router: Router, name: str, specs: dict[str, RunSpec], observes: bool) -> None:
        """Begin to announce the run `name`, as the client calls it, to the peers that average."""
        self.specs = dict(specs)
        self.in_use: dict[str, RunDriver] = {}
        self.purpose = AVERAGE
        self.closed = False
        self._router = router
        self._name = name
        self._first = specs
        self._observes = observes
        self._joining = asyncio.Lock()
        self._announcing = asyncio.create_task(self._announce())

    def joined(self, purpose: str) -> RunSpec:
        """The spec of a purpose as the client joined it, before it agreed on anything; raises Refused without one."""
        if purpose not in self._first:
            raise _nothing_to(purpose, self._name)
        return self._first[purpose]

    async def agree(self, agreed: RunSpec, observes: bool) -> None:
        """Step on these terms from now on; raises Refused if the run has stepped on others."""
        async with self._joining:
            if STEP in self.in_use and agreed != self.specs[STEP]:
                hint = "agree before the first accumulate and step, or leave the run and join it again"
                raise Refused(f"run {self._name!r} has stepped on other terms", hint)
            self.specs[STEP], self._observes = agreed, observes
            self._announcing.cancel()

    async def disagree(self, run_driver: RunDriver) -> None:
        """Undo the agreement that this driver has joined on: the client may try again."""
        async with self._joining:
            await self._router.leave(run_driver, "others have agreed on something else")
            if self.in_use.get(STEP) is not run_driver:
                return
            del self.in_use[STEP]
            self.specs[STEP], self.purpose = self._first[STEP], AVERAGE
            if not self.closed:
                self._announcing = asyncio.create_task(self._announce())

    async def use(self, purpose: str) -> RunDriver:
        """Return the driver of a purpose, which is now the one used last; raises Refused as `get`."""
        run_driver = await self.get(purpose)
        self.purpose = purpose
        return run_driver

    async def get(self, purpose: str) -> RunDriver:
        """Return the driver of a purpose; raises Refused if the run has no such purpose, or is being left."""
        if purpose not in self.specs:
            raise _nothing_to(purpose, self._name)
        async with self._joining:
            if purpose not in self.in_use:
                if self.closed:
                    raise Refused(f"run {self._name!r} is being left", "join it again")
                self.in_use[purpose] = await self._router.join(self.specs[purpose], self._observes)
            return self.in_use[purpose]

    def close(self) -> None:
        """Join nothing more: the client leaves."""
        self.closed = True
        self._announcing.cancel()

    async def leave(self, reason: str) -> None:
        """Leave all runs; their drivers go on showing what they were."""
        async with self._joining:
            drivers = self.in_use.values()
            leaving = [asyncio.create_task(self._router.leave(run_driver, reason)) for run_driver in drivers]
        if leaving:
            await asyncio.wait(leaving)

    async def _announce(self) -> None:
        await asyncio.sleep(ANNOUNCE_SECONDS)
        await self.get(AVERAGE)


def _nothing_to(purpose: str, run: str) -> Refused:
    return Refused(f"run {run!r} has no gradients to {purpose}", "join it with parameters that need them")


class Session:
    """Takes part in one run for one client.

    Attributes:
        name: The run's name as the client calls it.
        client: The client, as messages name it.
        drivers: The run drivers of the purposes in use.
        messages: What the script sends to other scripts, and receives.
        ledger: Counts the run's rounds.
        told: By topic, a line of the client that `status` shows.
        held: The state that the client held last.
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
        self.ledger = ledger
        self.told: dict[str, str] = {}
        self.held: StateId | None = None
        self._swarm = swarm
        self._region: Region | None = region
        specs = run_specs(request)
        for spec in specs.values():
            self._require_room(spec)
        self._role = swarm.gate.standing(swarm.peer)
        if self._role == "relay":
            raise Refused(
                "this daemon was invited as a relay, which joins no run", "ask for an invitation as trainer"
            )
        self.drivers = RunDrivers(router, request.run, specs, self._role == "observer")
        self.messages = ScriptMessages(router, request, region, self._mates)
        self._round: asyncio.Task[Outcome] | None = None
        self._stopped = ""
        self._leaving: asyncio.Task[None] | None = None
        self._claimed = False

    async def agree(self, request: AgreeRun, company: frozenset[str] = frozenset()) -> str:
        """Let `step` meet only peers of the same terms, and carry buffers behind the gradients; see `Run.agree`.

        `company` are the peers that this one has trained with. Returns how the terms of peers differ beside which this
        peer waits, one line; empty if none are known.

        Raises:
            Refused: Peers that have a say have other terms. Or the run has stepped on other terms, or has no gradients.
            ValueError: A term is too long or not printable, or a buffer has the name of a gradient.
        """
        dtypes, frozen = request.dtypes, request.frozen
        agreed = agreed_spec(self.drivers.joined(STEP), request.terms, request.buffers, dtypes, frozen)
        self._require_room(agreed)
        await self.drivers.agree(agreed, request.observes or self._role == "observer")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEARCH_SECONDS):
                # Before joining: for a run that this peer is in, the directory returns what it knows already.
                await self._swarm.directory.peers(agreed.name)
        run_driver = await self.drivers.use(STEP)
        named, trained = self._swarm.named, company - {self._swarm.peer}
        objection = await run_driver.search.objection(named, trained, COMPARE_SECONDS)
        if objection:
            await self.drivers.disagree(run_driver)
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
        self.ledger.add(outcome, self.drivers.specs[request.purpose].layout.encoded_size)
        how = "ok" if outcome.ok else "failed"
        took = outcome.seconds.get("total", 0.0)
        log.info("run %s, round %d: %s (%s), %.3f s", outcome.run, outcome.round, how, outcome.reason, took)
        return outcome

    def stop_round(self, why: str) -> None:
        """End an open search for a group; a round that has begun goes on."""
        self._stopped = why[:MAX_TEXT] or "stopped"
        for run_driver in self.drivers.in_use.values():
            run_driver.search.stop(self._stopped)

    async def report_accumulated(self, weight: float) -> None:
        """Publish the weight that the client has accumulated towards its next step."""
        (await self.drivers.use(STEP)).search.announcer.report_accumulated(weight)

    def tell(self, topic: str, line: str) -> None:
        """Let `status` show a line of the client; an empty one takes back the topic's last."""
        self.told[topic] = line[:MAX_TEXT]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know about the run, one line each."""
        lines = [line for run_driver in self.drivers.in_use.values() for line in run_driver.twins.values()]
        if self._claimed:
            lines.append(f"run {self.name}: this daemon was invited as an observer: its weight counts as 0")
        return tuple(lines)

    @property
    def leaving(self) -> bool:
        """True once `leave` was called."""
        return self._leaving is not None

    async def state(self) -> RunState:
        """State of the next round of the purpose used last."""
        return (await self.drivers.get(self.drivers.purpose)).search.state

    async def members(self, data: str) -> tuple[str, ...]:
        """The peers that answer, train and, if that is given, share `data`, of the purpose used last, sorted."""
        search = (await self.drivers.get(self.drivers.purpose)).search
        if data not in ("", search.announcer.data):
            search.announcer.data = data
            search.announcer.publish()
        return search.membership.live((), data)

    async def _mates(self, sends: bool) -> dict[str, bytes]:
        """The credentials of the other peers with equal terms; if called with True, without those that only observe."""
        with contextlib.suppress(Refused):
            await self.drivers.get(self.drivers.purpose)
        barred = ("banned", "relay", "observer") if sends else ("banned", "relay")
        return {
            one.peer: one.credential
            for run_driver in list(self.drivers.in_use.values())
            for one in await self._swarm.directory.peers(run_driver.spec.name)
            if one.spec == run_driver.spec.hash and one.peer != self._swarm.peer
            if not one.left and self._swarm.gate.standing(one.peer) not in barred
        }

    def send(self, request: SendMessage) -> None:
        """Send a message to the script of another peer; raises `Refused`, see `ScriptMessages.send`."""
        if self._role == "observer":
            raise Refused("this daemon was invited as an observer, which sends no messages")
        if request.to == self._swarm.peer:
            raise Refused("expected another peer as the receiver, got this one")
        self.messages.send(request)

    async def progress(self, target: float | None, held: StateId | None) -> Progress:
        """Weight accumulated towards the next step: by this peer, and by all, as far as the others' claims count."""
        run_driver = await self.drivers.use(STEP)
        self.held = held or self.held
        drawn = run_driver.search.draw(held) if held is not None else Drawn((), ())
        others, own = await run_driver.others_accumulated(target), run_driver.search.announcer.accumulated
        awaited = run_driver.search.membership.is_trained(self._swarm.named)
        return Progress(own, own + others, run_driver.transfer.donor.wanted, run_driver.waits, drawn, awaited)

    async def transfer(self) -> Transfer:
        """The exchange of the run's state, among the peers that step if there are gradients."""
        purpose = STEP if STEP in self.drivers.specs else AVERAGE
        return (await self.drivers.use(purpose)).transfer

    async def fetch(self, request: Fetch, memory: SharedMemory) -> FetchOutcome:
        """Download a snapshot, or a mean that was missed, into the client's memory.

        Raises:
            Refused: The memory is too small for the mean.
            ValueError: A download of this run is going on already.
        """

        def room(size: int) -> memoryview:
            if size > memory.capacity:
                raise Refused(f"expected shared memory of {size} bytes, got {memory.capacity}")
            memory.allocate(size)  # For gigabytes the kernel takes seconds to provide the pages.
            return memory.view(size, writable=True)

        wish = msgspec.structs.replace(request.wish, limit=memory.capacity)
        found = await (await self.transfer()).fetch(wish, request.timeout, room)
        if found.round is not None:
            spec = self.drivers.specs[STEP if STEP in self.drivers.specs else AVERAGE]
            self.ledger.add(found.round, spec.layout.encoded_size)
        return found

    async def leave(self, reason: str) -> None:
        """Leave, finish or fail an open round, and release the memory; all callers wait for the same end."""
        if self._leaving is None:
            self.drivers.close()
            self.messages.close(reason, final=reason != STOPPING)
            self._leaving = asyncio.create_task(self._leave(reason))
        await asyncio.shield(self._leaving)

    async def _exchange(self, request: StartRound) -> Outcome:
        try:
            run_driver = await self.drivers.use(request.purpose)
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
        spec = self.drivers.specs[request.purpose]
        sizes = spec.layout.encoded_size, spec.layout.mean_size(spec.options.group_size)
        memory = region.contribution[: sizes[0]], region.mean[: sizes[1]]
        vectors = Vectors(*memory, request.clamped, request.norm)
        reported = request.metrics, request.evaluation, request.purpose == STEP
        weight = 0.0 if self._role == "observer" else request.weight
        self._claimed |= weight < request.weight
        outcome = await run_driver.average(vectors, weight, request.timeout, state, *reported)
        if state is not None and outcome.before == state:
            self._reach(run_driver, state.epoch + 1)
        return outcome

    def _reach(self, run_driver: RunDriver, epoch: int) -> None:
        run_driver.transfer.donor.reach(epoch)
        run_driver.search.announcer.note_epoch(epoch)

    def _failed(self, reason: str) -> Outcome:
        return Outcome(ok=False, reason=reason, run=self.name)

    def _require_room(self, spec: RunSpec) -> None:
        needed = spec.layout.mean_size(spec.options.group_size)
        if self._region is not None and needed > self._region.size:
            room = self._region.size
            raise Refused(f"expected shared memory of {needed} bytes for run {spec.name!r}, it holds {room}")

    async def _leave(self, reason: str) -> None:
        await self.drivers.leave(reason)
        if self._round is not None:
            self._round.cancel()
        if self._region is not None:
            self._region.release()
        self._region = None
