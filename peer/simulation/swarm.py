"""The swarm of a simulation: its runs, the groups that form in them, and what their daemons keep for others.

All peers of a run meet in one group of up to 64; others follow by downloads. It closes by the program's own
`GroupBuilder`, with one coordinator that sees all peers at once. Simulated peers know at once which peers are there,
have died, or have ended; real peers learn it by messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from msgspec import structs

from equipoise.averaging.aio.buffer_pool import BufferPool
from equipoise.averaging.draw import Drawn
from equipoise.averaging.machines import policy
from equipoise.averaging.manifest import NONCE_BYTES, Join, Manifest
from equipoise.averaging.matchmaking.context import Context
from equipoise.averaging.matchmaking.coordinator import ENDED_KEPT, LEAST_LATE
from equipoise.averaging.matchmaking.group_builder import Closing, GroupBuilder, Outlook, ParkedJoin
from equipoise.averaging.matchmaking.membership import MISSES, Membership
from equipoise.averaging.matchmaking.messages import MAX_HOPS
from equipoise.averaging.matchmaking.patient import federated
from equipoise.averaging.matchmaking.spec_diff import answer_of, differences
from equipoise.averaging.options import MAX_GROUP_SIZE
from equipoise.averaging.outcome import Exchanging, FetchOutcome, Gathering, Idle, NoPeers, Outcome, RunState
from equipoise.averaging.replication.server import KEPT_MEANS
from equipoise.averaging.spec import RunSpec
from equipoise.averaging.state import StateId
from equipoise.averaging.strategy import Federated
from equipoise.averaging.timing import GRACE
from equipoise.limits import LruDict
from equipoise.peer.control.messages import Fetch, StartRound
from equipoise.peer.errors import Refused
from equipoise.peer.shared_memory import SharedMemory
from equipoise.peer.simulation.exchange import Exchanged, exchange
from equipoise.peer.simulation.virtual_time import VirtualTime

COORDINATOR = "simulated-coordinator"
"""PeerID of the coordinator of all groups; it is no member, and lives for ever."""

MAX_PEERS = 512
"""Most peers of a simulation: each takes a thread, and a descriptor for the tensors of each run."""

DECISION_SECONDS = 0.02
"""Virtual time from a join to the coordinator's decision. Peers that join at one time are all in before that."""

EXCHANGE_SECONDS = 0.1
"""Virtual time from the close of a group to the outcomes of its members."""


@dataclass
class Search:
    """A peer's search for a group: its script's request, when it began, and what gets the outcome."""

    request: StartRound
    began: float
    reply: Future[Outcome]


class Exchange(NamedTuple):
    """The group of a round that goes on, or has ended, and when it closed."""

    manifest: Manifest
    closed: float


@dataclass(eq=False)
class Member:
    """One peer's part in a run.

    Attributes:
        peer: PeerID.
        contribution: Its script's contribution: an encoded vector.
        result: Gets the encoded mean.
        tags: Its tags.
        observes: Whether it trains nothing, so no draw takes it.
        data: The mark of the data set that it shares.
        misses: Rounds in a row in which a group waited for it in vain.
        accumulated: Weight that its script has accumulated.
        epoch: Epoch of the state that its script claimed last; None before.
        search: Its search, if it looks for a group.
        exchange: Its round, if one goes on.
        offered: The snapshot that it serves.
        left: Whether its script has left the run; its daemon still serves.
        dead: Whether it was killed.
    """

    peer: str
    contribution: memoryview
    result: memoryview
    tags: frozenset[str] = frozenset()
    observes: bool = False
    data: str = ""
    misses: int = 0
    accumulated: float = 0.0
    epoch: int | None = None
    search: Search | None = None
    exchange: Exchange | None = None
    offered: tuple[StateId, bytes] | None = None
    left: bool = False
    dead: bool = False


class Company(Membership):
    """The members of a run as its coordinator sees them: all of them, at once."""

    def __init__(self, run: SimulatedRun) -> None:
        super().__init__(COORDINATOR, run.spec.hash, MAX_PEERS)
        self._run = run

    def live(self, tags: Iterable[str], data: str = "") -> tuple[str, ...]:
        """See `Membership.live`."""
        wanted = frozenset(tags)
        there = [(peer, one) for peer, one in self._run.present.items() if data in ("", one.data)]
        return tuple(sorted(peer for peer, one in there if wanted <= one.tags and not one.observes))

    def expected(self, round: int, now: float, misses: float = MISSES) -> set[str]:
        """See `Membership.expected`."""
        return {peer for peer, one in self._run.present.items() if one.misses < misses}


class SimulatedRun:
    """One run of the swarm: all peers that joined it on equal terms.

    Attributes:
        spec: The terms.
        members: By PeerID, in the order in which they joined; also those that left or died.
        kept: The last means, by the state to which each was applied.
        downloads: The downloads that go on.
        time: The simulation's time.
    """

    def __init__(self, spec: RunSpec, time: VirtualTime, chance: Random, pool: BufferPool) -> None:
        self.spec = spec
        self.members: dict[str, Member] = {}
        self.kept: LruDict[StateId, Exchanged] = LruDict(KEPT_MEANS)
        self.downloads: list[Download] = []
        self.time = time
        self._chance = chance
        self._pool = pool
        self._began = time.now
        context = self._context = Context(
            run=spec.name,
            spec=spec.hash,
            peer=COORDINATOR,
            needs=spec.needs._replace(group_size=MAX_GROUP_SIZE, places=False),
            sign=_sign,
            verify=lambda peer, content, signature: True,
        )
        context.membership = Company(self)
        self._policy = policy(spec.strategy, context)
        self._round = 0
        self._builder = self._gather()
        self._beyond: LruDict[StateId, Exchange] = LruDict(ENDED_KEPT)
        self._looks_at = math.inf

    # ---- peers that come and go ----

    def sharing(self, data: str) -> tuple[str, ...]:
        """See `messages.AskMembers`."""
        return self._context.membership.live((), data)

    @property
    def present(self) -> dict[str, Member]:
        """The members whose scripts take part now, by PeerID."""
        return {peer: one for peer, one in self.members.items() if not one.left}

    def join(self, member: Member) -> None:
        """Let a peer take part.

        Raises:
            Refused: They would be more than fit into one group; a federated run has room for all.
        """
        name, most = self.spec.name, self.spec.options.group_size
        if len(self.present) >= most and not isinstance(self.spec.strategy, Federated):
            told = f"expected at most group_size={most} simulated peers in run {name!r}, all in one group"
            larger = f"a group_size of up to {MAX_GROUP_SIZE}" if most < MAX_GROUP_SIZE else "fewer peers"
            raise Refused(told, f"give {larger}, or a federated strategy")
        self.members[member.peer] = member
        self.time.progressed()
        self._look_soon()

    def leave(self, member: Member, reason: str, dead: bool = False) -> None:
        """End a peer's part; its open search fails. Unless it is `dead`, its daemon still serves."""
        member.left, member.dead = True, member.dead or dead
        self.stop(member, reason)
        self._look_soon()

    def state(self, member: Member) -> RunState:
        """The state of a member's next round."""
        others = len(self.present) - 1
        if member.exchange is not None:
            return Exchanging(len(member.exchange.manifest.members), member.exchange.manifest.round)
        if not others:
            return NoPeers()
        if member.search is None:
            return Idle(others)
        return self._gathering(member.search)

    def draw(self, state: StateId) -> Drawn:
        """The peers that train from a state."""
        return self._policy.draw(state, self.time.now)

    # ---- rounds ----

    def start(self, member: Member, request: StartRound, reply: Future[Outcome]) -> None:
        """Look for a group for a member; `reply` gets the outcome.

        Raises:
            ValueError: A round of it goes on, or its weight is too large.
        """
        if member.search is not None or member.exchange is not None:
            raise ValueError(f"a round of run {self.spec.name!r} is going on already: wait for its outcome")
        if request.state is not None:
            member.epoch = request.state.epoch
        join = self._join(member, request)
        search = member.search = Search(request, self.time.now, reply)
        member.misses = 0
        self.time.at(self.time.now + request.timeout, lambda: self._expire(member, search))
        self._park(member, search, join)

    def stop(self, member: Member, why: str, late: float = 0.0) -> None:
        """End a member's search for a group, if it has none yet; `late` as in `Outcome`."""
        search, member.search = member.search, None
        if search is not None:
            self._builder.drop(member.peer)
            failed = Outcome(
                ok=False,
                reason=why,
                run=self.spec.name,
                round=self._round,
                seconds={"total": self.time.now - search.began},
                started=search.began,
                late=late,
            )
            search.reply.set_result(failed)

    def _park(self, member: Member, search: Search, join: Join) -> None:
        """Have a member's join wait for its group; end the search if the contribution is too late for any."""
        beyond = self._beyond.get(join.bound) if join.bound is not None else None
        if beyond is not None and member.peer not in beyond.manifest.peers:
            late = max(self.time.now - beyond.closed, LEAST_LATE)
            told = f"the group of round {beyond.manifest.round} has closed"
            self.stop(member, f"too late by {late:.3g} s: {told}", late)
            return
        parked = ParkedJoin(join, self.time.now, search.request.timeout, MAX_HOPS, answered=True)
        # Observers make room, and follow by downloads.
        if not self._builder.park(parked) and join.bound is not None:
            idle = (peer for peer, one in self._builder.parked.items() if one.join.bound is None)
            self._builder.drop(next(idle, ""))
            self._builder.park(parked)
        self._look_soon()

    def serve(self) -> None:
        """Go on with the downloads that can go on."""
        for download in list(self.downloads):
            download.look()

    def _look(self) -> None:
        """Close the group if it is complete, and go on with downloads."""
        now, builder = self.time.now, self._builder
        if builder.parked:
            outlook = self._outlook()
            closing = builder.decide(outlook, now)
            if closing is not None:
                self._close(closing)
            else:
                builder.invite(outlook, now)
                builder.speak(outlook, now)
                due = min(builder.deadline(outlook), self._began + GRACE if outlook.strangers else math.inf)
                self._look_at(max(due, now + DECISION_SECONDS))
                if outlook.holds:
                    self._look_soon()
        self.serve()

    def _look_soon(self) -> None:
        """Look when all joins of this time have been considered."""
        self._look_at(self.time.now + DECISION_SECONDS)

    def _look_at(self, at: float) -> None:
        if at < self._looks_at:
            self._looks_at = at
            self.time.at(at, self._look_again)

    def _look_again(self) -> None:
        if self.time.now >= self._looks_at:
            self._looks_at = math.inf
            self._look()

    def _expire(self, member: Member, search: Search) -> None:
        if member.search is search:
            waited = f"no group within {search.request.timeout:g} s"
            self.stop(member, f"{waited}: {self._gathering(search).reason}")

    def _gathering(self, search: Search) -> Gathering:
        """The peers that the group of a search waits for, in words."""
        builder, now = self._builder, self.time.now
        outlook = self._outlook()
        standing = self._policy.standing(builder, now)
        if standing is not None:
            closes_in = outlook.limit.at - now
            gives_up = search.began + search.request.timeout - self._policy.reserve - now
            closes = closes_in if math.isfinite(closes_in) else None
            return federated(standing, self._context.needs.quorum, closes, gives_up)
        target = max(len(outlook.expected | builder.parked.keys()), 2)
        return Gathering(len(builder.parked), target, self._policy.describe(builder, outlook.expected))

    def _join(self, member: Member, request: StartRound) -> Join:
        return Join(
            peer=member.peer,
            spec=self.spec.hash,
            round=self._round,
            weight=request.weight,
            bandwidth=0.0,
            dialable=True,
            nonce=self._chance.randbytes(NONCE_BYTES),
            credential=b"",
            state=request.state,
            signature=b"",
            fit=request.metrics,
            evaluation=request.evaluation,
            norm=request.norm,
        ).signed(_sign)

    def _gather(self) -> GroupBuilder:
        """The gathering of the next round."""
        return GroupBuilder(self._round, self._context.needs, self._policy.keepalive, self._policy.patient)

    def _outlook(self) -> Outlook:
        builder, now = self._builder, self.time.now
        expected, missing = self._policy.awaited(builder, now)
        joined = max((one.arrived for one in builder.parked.values()), default=now)
        holds = self._policy.holds(builder, now) or now < joined + DECISION_SECONDS
        # All peers begin at once, one after another.
        begins = now < self._began + GRACE
        limit = self._policy.limit(builder, now)
        return Outlook(expected, frozenset(), expected, missing, limit, begins, holds)

    # ---- the exchange ----

    def _close(self, closing: Closing) -> None:
        standing = self._policy.standing(self._builder, self.time.now)
        drawn = () if standing is None else standing.drawn
        manifest = Manifest.of(min(join.peer for join in closing.members), closing.members, drawn)
        going = Exchange(manifest, self.time.now)
        self._context.straggler_wait.learn(closing.lateness)
        late = self._policy.late(self._builder, closing, going.closed)
        self._policy.learn(late, closing.absent, going.closed)
        for peer in closing.absent:
            self.members[peer].misses += 1
        self._round += 1
        self._builder = self._gather()
        contributions, searches = {}, {}
        for peer in manifest.peers:
            member = self.members[peer]
            assert member.search is not None, "it is parked"
            member.exchange, searches[peer], member.search = going, member.search, None
            contributions[peer] = member.contribution
        found = exchange(self.spec, manifest, contributions, self._pool)
        if found.before is not None:
            self._beyond[found.before] = going
        self.time.at(self.time.now + EXCHANGE_SECONDS, lambda: self._end(going, searches, found))
        for join in closing.left_over:  # Contributions to another state, and observers beyond the group.
            member = self.members[join.peer]
            assert member.search is not None, "it is parked"
            self._park(member, member.search, self._join(member, member.search.request))

    def _end(self, going: Exchange, searches: Mapping[str, Search], found: Exchanged) -> None:
        """Give the members of a group their outcomes."""
        outcome, mean, before = found
        if outcome.ok:
            self.time.progressed()
        if before is not None:
            self.kept[before] = found
        for peer, search in searches.items():
            member = self.members[peer]
            member.exchange = None
            if member.dead:
                continue
            if outcome.ok:
                member.result[: len(mean)] = mean
            search.reply.set_result(self._measured(outcome, going, peer, search.began))
        self.serve()

    def _measured(self, outcome: Outcome, going: Exchange, peer: str, began: float) -> Outcome:
        """Add the times of one member, and the bytes of a butterfly in which all members own equal shares."""
        members, layout = len(outcome.group), self.spec.layout
        share = layout.encoded_size * (members - 1) // members
        gathered = layout.mean_size(len(outcome.shares) or 1) * (members - 1) // members
        gives = peer in outcome.contributors
        scattered = layout.encoded_size * (len(outcome.contributors) - gives) // members
        return structs.replace(
            outcome,
            bytes_sent=share * gives + gathered,
            bytes_received=gathered + scattered,
            seconds={
                "matchmaking": going.closed - began,
                "exchange": self.time.now - going.closed,
                "total": self.time.now - began,
            },
            started=began,
        )


def _sign(content: bytes) -> bytes:
    return b"simulated"


SNAPSHOT_SECONDS, MEAN_SECONDS = 0.5, 0.1
"""Virtual time from the choice of a snapshot, or of a mean, to its last byte."""

Found = tuple[bytes | memoryview, FetchOutcome]
"""The content that a donor has, and the outcome without its size; in place of both, why no peer will have it, which is
empty if one may."""


class Download:
    """A download that goes on, of one member of a run.

    Attributes:
        member: The member.
    """

    def __init__(
        self,
        run: SimulatedRun,
        member: Member,
        request: Fetch,
        reply: Future[FetchOutcome],
        memory: SharedMemory,
    ) -> None:
        self.member = member
        self._run, time = run, run.time
        self._wish, self._reply, self._memory = request.wish, reply, memory
        self._began, self._chosen = time.now, False
        run.downloads.append(self)
        time.at(time.now + request.timeout, lambda: self.stop(f"not within {request.timeout:g} s"))
        self.look()

    @property
    def wanted(self) -> int | None:
        """The first epoch of which a snapshot is of use; None if a mean is wanted."""
        return self._wish.at_least if self._wish.after is None else None

    def look(self) -> None:
        """Begin the download if a donor has its content, or give up if no peer will have it."""
        if self._chosen or self._reply.done():
            return
        after = self._wish.after
        found = self._snapshot() if after is None else self._mean(after)
        if not isinstance(found, str):
            self._chosen = True
            seconds = SNAPSHOT_SECONDS if after is None else MEAN_SECONDS
            self._run.time.at(self._run.time.now + seconds, lambda: self._finish(*found))
        elif found:
            self.stop(found)

    def stop(self, reason: str) -> None:
        """End it without a result, if it goes on."""
        outcome, after = FetchOutcome(ok=False, reason=reason), self._wish.after
        if after is not None:
            outcome = structs.replace(outcome, behind=self._behind(after), unheard=self._in_round(after))
        self._end(outcome)

    def _finish(self, content: bytes | memoryview, outcome: FetchOutcome) -> None:
        if self._reply.done() or self.member.dead:
            return
        size, most = len(content), self._memory.capacity
        if size > most:
            self.stop(f"expected at most {most} bytes, {size} are offered")
            return
        self._memory.allocate(size)
        self._memory.view(size, writable=True)[:] = content
        self._end(structs.replace(outcome, size=size, seconds=self._run.time.now - self._began))

    def _end(self, outcome: FetchOutcome) -> None:
        if not self._reply.done():
            self._run.downloads.remove(self)
            self._memory.close()
            self._reply.set_result(outcome)

    @property
    def _others(self) -> list[Member]:
        """The members whose daemons can answer."""
        return [one for one in self._run.members.values() if one is not self.member and not one.dead]

    def _snapshot(self) -> Found | str:
        """Of the snapshots that are offered, the one that most peers offer, then the latest."""
        others = [one for one in self._others if one.peer not in self._wish.barred]
        voters = [one for one in others if one.peer in self._wish.circle] or others
        offers = [one.offered for one in voters if one.offered is not None]
        fitting = Counter(offer for offer in offers if offer[0].epoch >= self._wish.at_least)
        if not fitting:
            return "" if others else "no other peer of this run is known"
        chosen = max(fitting, key=lambda offer: (fitting[offer], offer[0].epoch))
        state, image = chosen
        donors = [one.peer for one in voters if one.offered == chosen]
        sources = {peer: len(image) // len(donors) for peer in donors}
        names, why = tuple(one.peer for one in voters), f"{len(donors)} of {len(voters)} peers offer it"
        return image, FetchOutcome(ok=True, reason=why, state=state, sources=sources, voters=names)

    def _mean(self, after: StateId) -> Found | str:
        kept = self._run.kept.get(after)
        holders = [peer for peer in kept.outcome.group if not self._run.members[peer].dead] if kept else []
        if kept is None or not holders:
            if self._in_round(after) or (self._wish.patient and self._behind(after)):
                return ""
            return f"none of {len(self._others)} peers keeps the mean after epoch {after.epoch}"
        reason = f"missed, and had from others: {kept.outcome.reason}"
        outcome = structs.replace(kept.outcome, reason=reason, bytes_received=len(kept.mean))
        return kept.mean, FetchOutcome(
            ok=True, reason=reason, sources=dict.fromkeys(holders, 0), round=outcome
        )

    def _behind(self, after: StateId) -> int:
        here = [one for one in self._others if not one.left]
        return sum(one.epoch is None or one.epoch < after.epoch for one in here)

    def _in_round(self, after: StateId) -> int:
        """The number of peers in a round that may end in this mean."""
        rounds = (one.exchange for one in self._others if one.exchange is not None)
        return sum(one.manifest.before == after for one in rounds)


class SimulatedSwarm:
    """All runs of a simulation.

    Args:
        time: The simulation's time.
        seed: Seed of the nonces of joins, from which digests, lineages and draws follow.
    """

    def __init__(self, time: VirtualTime, seed: int) -> None:
        self.time = time
        self._chance = Random(seed)
        self._pool = BufferPool()
        self._runs: dict[RunSpec, SimulatedRun] = {}

    def run(self, spec: RunSpec) -> SimulatedRun:
        """The run of these terms."""
        if spec not in self._runs:
            self._runs[spec] = SimulatedRun(spec, self.time, self._chance, self._pool)
        return self._runs[spec]

    def objection(self, spec: RunSpec) -> str:
        """Return how the terms of other peers of a run's name differ, in one line; empty if all have these."""
        others = (one.spec for one in self._runs.values() if one.present and one.spec.name == spec.name)
        differ = (differences(spec, answer_of(other, spec.marks, 0.0)) for other in others if other != spec)
        return next(differ, "")
