"""The downloads of simulated peers: snapshots and missed means. All donors are honest, so nothing is checked."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future

from msgspec import structs

from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.state import StateId
from equipoise.peer.control.messages import Fetch
from equipoise.peer.shared_memory import SharedMemory
from equipoise.peer.simulation.swarm import Member, SimulatedRun
from equipoise.peer.simulation.virtual_time import VirtualTime

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
        time: VirtualTime,
        request: Fetch,
        reply: Future[FetchOutcome],
        memory: SharedMemory,
    ) -> None:
        self.member = member
        self._run, self._time = run, time
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
            self._time.at(self._time.now + seconds, lambda: self._finish(*found))
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
        self._end(structs.replace(outcome, size=size, seconds=self._time.now - self._began))

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
