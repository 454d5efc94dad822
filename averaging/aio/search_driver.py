"""This peer's search for the groups of one run: the driver of its matchmaking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set

import msgspec

from equipoise.averaging.aio.announcer import Announcer
from equipoise.averaging.aio.round_driver import ROUND_FRAME, Shared
from equipoise.averaging.allreduce import messages as wire
from equipoise.averaging.draw import Drawn
from equipoise.averaging.machines import matchmaker
from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.matchmaking import events
from equipoise.averaging.matchmaking import messages as matchmaking_messages
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import LEAST_LATE
from equipoise.averaging.matchmaking.membership import Membership
from equipoise.averaging.matchmaking.spec_diff import SpecDiff
from equipoise.averaging.outcome import FetchOutcome, NoPeers, Outcome, RunState
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.tasks import Driver, TaskSet, sleep_until

MATCHMAKING_FRAME = b"M"
"""First byte of the header of every matchmaking frame; a message follows."""

DIALABLE_SECONDS = 0.5
"""Time between two looks of a searching peer whether other peers can dial it."""

LOOK_SECONDS = 0.25
"""Time between two reads of the directory's cache, which costs nothing."""

log = logging.getLogger(__name__)


class SearchDriver:
    """Finds groups for as long as this peer takes part in the run.

    Attributes:
        machine: Decides.
        announcer: Tells the directory.
        comparison: Asks the peers of the run that have another spec how theirs differs.
        waited: The peer that the last group waited for, and seconds; None if it waited for none.
    """

    def __init__(self, spec: RunSpec, shared: Shared) -> None:
        sessions, identity = shared.sessions, shared.identity
        signs = identity.sign, identity.verify, identity.role
        context = Context(spec.name, spec.hash, sessions.peer, spec.needs, *signs)
        self.machine = matchmaker(spec.strategy, context, sessions.chance)
        self.waited: tuple[str, float] | None = None
        self._spec = spec
        self._sessions = sessions
        self._directory = shared.directory
        self._loop = asyncio.get_running_loop()
        self.comparison = SpecDiff(spec, sessions.peer, self._loop.time())
        self._comparing = Driver(self.comparison, self._perform)
        self._compared = asyncio.Event()
        self._formed: asyncio.Future[Manifest | Outcome] | None = None
        self._offered: tuple[StateId | None, float] = (None, 0.0)
        self._missed: tuple[Outcome, float] | None = None  # A round, and when its group closed.
        self._driver = Driver(self.machine, self._perform, events.Woke)
        self._tasks = TaskSet()
        self.announcer = Announcer(spec, shared, self.machine, self._tasks)

    @property
    def membership(self) -> Membership:
        """This peer's knowledge of the others."""
        return self.machine.context.membership

    @property
    def state(self) -> RunState:
        """State of the next round."""
        state = self.machine.state
        return NoPeers(self.reason) if isinstance(state, NoPeers) and self.comparison.reason else state

    @property
    def reason(self) -> str:
        """Reason for the state, one line; if all other peers have another spec, the difference."""
        return self._difference or self.machine.reason

    @property
    def _difference(self) -> str:
        return self.comparison.reason if isinstance(self.machine.state, NoPeers) else ""

    def draw(self, state: StateId) -> Drawn:
        """The peers that are to train from an agreed state, as far as this peer knows now, and the live peers."""
        return self.machine.draw(state, self._loop.time())

    def start(self, observes: bool) -> None:
        """Make this peer known in the run; `observes` if it trains nothing there, so that no draw takes it."""
        self.membership.observes = observes
        self._tasks.keep(self._look_regularly)
        self._driver.tell(events.Woke())
        self.announcer.publish()

    async def leave(self, serves: bool) -> None:
        """Search no longer. The directory learns whether the daemon `serves` on."""
        self._driver.stop()
        self._comparing.stop()
        await self._tasks.stop()
        if serves:
            await self.announcer.announce()
        else:
            await self._directory.withdraw(self._spec.name)

    async def objection(self, named: Set[str], trained: Set[str], timeout: float) -> str:
        """Return why this peer should not take part with its spec, one line; empty if it may.

        See `SpecDiff` for the peers that may object.

        Waits up to `timeout` seconds until the known peers with another spec have described theirs.
        """
        until = self._loop.time() + timeout
        self.comparison.named, self.comparison.trained = named, trained
        await self._look()
        while not self.comparison.settled(now := self._loop.time()) and now < until:
            self._compared.clear()
            await sleep_until(self._compared, until - now)
        return self.comparison.objection()

    # ---- one search ----

    async def find(self, join: Join, timeout: float) -> Manifest | Outcome:
        """Offer a contribution until a group has formed; else return an outcome that is not ok, and says why.

        Raises:
            ValueError: A search goes on already.
        """
        if self._formed is not None:
            raise ValueError(f"a round of run {self._spec.name!r} is going on already: wait for its outcome")
        self._offered = join.bound, self._loop.time()
        if late := self._lateness():  # The mean came while this peer still trained.
            return self.failed(_too_late(late), late)
        self._formed = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout):
                return await self._seek(self._formed, join, timeout)
        except TimeoutError:
            lacks = self._difference or self.machine.shortage
            reason = f"no group within {timeout:.3g} s: {lacks}"
            self._driver.tell(events.Withdrew())
            return self.failed(reason)
        except asyncio.CancelledError:
            self._driver.tell(events.Withdrew())
            raise
        finally:
            self._formed = None

    async def _seek(
        self, formed: asyncio.Future[Manifest | Outcome], join: Join, timeout: float
    ) -> Manifest | Outcome:
        """Wait for a group. The join states whether others can dial this peer, so sign it again when that changes."""
        until = self._loop.time() + timeout
        dialable: bool | None = None
        while True:
            again, dialable = dialable is not None, self._sessions.dialable
            join = msgspec.structs.replace(
                join,
                nonce=self._sessions.chance.randbytes(NONCE_BYTES),
                bandwidth=self._sessions.meter.upload.told,
                download=self._sessions.meter.download.told,
                credential=self._sessions.credential,
                dialable=dialable,
            )
            self._driver.tell(events.BecameReady(join, max(0.0, until - self._loop.time())))
            if again:
                # The machine takes its record for published; that others can dial this peer is not its concern.
                self.announcer.publish()
            while self._sessions.dialable == dialable:
                await asyncio.wait({formed}, timeout=DIALABLE_SECONDS)
                if formed.done():
                    return formed.result()

    def stop(self, why: str, late: float = 0.0) -> None:
        """End the search for a group, if one goes on: its outcome is not ok, says `why`, and has `late`."""
        if self._end(self.failed(why, late)):
            self._driver.tell(events.Withdrew())

    def _end(self, result: Manifest | Outcome) -> bool:
        """End the search for a group; returns whether one went on."""
        goes_on = self._formed is not None and not self._formed.done()
        if self._formed is not None and goes_on:
            self._formed.set_result(result)
        return goes_on

    def failed(self, reason: str, late: float = 0.0) -> Outcome:
        """The outcome of a round that has not begun."""
        return Outcome(ok=False, reason=reason, run=self._spec.name, round=self.machine.round, late=late)

    # ---- rounds that end ----

    def ended(self, number: int, ok: bool, faults: dict[str, str]) -> None:
        """Note that a round that began here has ended, and the peers at fault, with reasons."""
        self._driver.tell(events.RoundEnded(number, ok, faults))

    def hold(self, outcome: Outcome) -> None:
        """Note that this peer holds the mean of a round."""
        self._driver.tell(events.MeanHeld(outcome))

    def note_mean(self, found: FetchOutcome) -> None:
        """Note the round whose mean came; end the search of a federated contribution that is late for it."""
        if found.round is None:
            return
        self._missed = found.round, self._loop.time() - found.age
        self.hold(found.round)
        if late := self._lateness():
            self.stop(_too_late(late), late)

    def _lateness(self) -> float:
        """Seconds by which the offered contribution is late for the round whose mean this peer has; 0 if it is not."""
        if self._missed is None or not self._spec.strategy.least:
            return 0.0
        (state, offered_at), (mean, closed_at) = self._offered, self._missed
        overtaken = mean.before == state and not mean.counted(self._sessions.peer)
        return max(offered_at - closed_at, LEAST_LATE) if overtaken else 0.0

    # ---- between the machine and the world ----

    def receive(self, peer: str, message: matchmaking_messages.MatchmakingMessage) -> None:
        """Take a matchmaking message of this run."""
        event = events.MessageReceived(peer, message)
        differs = isinstance(message, matchmaking_messages.SpecMessage)
        (self._compare if differs else self._driver.tell)(event)

    def lost(self, peer: str) -> None:
        """Note that a peer cannot be reached."""
        self._driver.tell(events.PeerLost(peer))
        self._compare(events.PeerLost(peer))

    def heard_a_round(self, peer: str) -> None:
        """Note that a peer has sent a frame of a round that this daemon does not know."""
        if self._formed is not None:
            self._driver.tell(events.RoundHeard(peer))

    def _compare(self, event: events.Event) -> None:
        before = self.comparison.reason
        self._comparing.tell(event)
        self._compared.set()
        if self.comparison.reason not in (before, ""):
            log.warning("run %s: %s", self._spec.name, self.comparison.reason)

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.Send(peer, message):
                self._sessions.post(peer, MATCHMAKING_FRAME + matchmaking_messages.encode(message))
            case events.Form(manifest, reason, last, waited):
                log.info("run %s: %s", self._spec.name, reason)
                self.waited = (last, waited) if last else None
                self._end(manifest)
            case events.Late(seconds, reason):
                self._end(self.failed(f"too late by {seconds:.3g} s: {reason}", seconds))
            case events.Decline(peer, round_id):
                gone = wire.GiveUp("it was not ready for this group")
                self._sessions.post(peer, ROUND_FRAME + round_id + wire.encode(gone))
            case events.Announce(ready):
                self.announcer.ready = ready
                self.announcer.publish()

    async def _look_regularly(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        found = await self._directory.peers(self._spec.name)
        seen = events.CandidatesSeen([one for one in found if not one.left])
        self._driver.tell(seen)
        self._compare(seen)


def _too_late(seconds: float) -> str:
    return f"too late by {seconds:.3g} s: this peer has the mean of its round"
