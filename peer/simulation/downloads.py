"""The downloads of simulated peers: snapshots and missed means. All donors are honest, so nothing is checked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from msgspec import structs

from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.state import StateId
from equipoise.peer.control.messages import Fetch
from equipoise.peer.shared_memory import SharedMemory
from equipoise.peer.simulation.swarm import Kept, Member, SimulatedRun
from equipoise.peer.simulation.virtual_time import VirtualTime

SNAPSHOT_SECONDS, MEAN_SECONDS = 0.5, 0.1
"""Virtual time from the choice of a snapshot, or of a mean, to its last byte."""


class Download(ABC):
    """A download that goes on, of one member of a run.

    Attributes:
        member: The member.
        request: Its script's request.
    """

    request: Fetch
    _seconds: float

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
        self.request = request
        self._run = run
        self._time = time
        self._reply = reply
        self._memory = memory
        self._began = time.now
        self._found: Callable[[], FetchOutcome] | None = None
        run.downloads.append(self)
        time.at(time.now + request.timeout, lambda: self.stop(f"not within {request.timeout:g} s"))
        self.look()

    def look(self) -> None:
        """Begin the download if a donor has its content, or give up if no peer will have it."""
        if self._found is None and not self._reply.done():
            found = self._find()
            if isinstance(found, str):
                if found:
                    self.stop(found)
                return
            self._found = found
            self._time.at(self._time.now + self._seconds, self._finish)

    def stop(self, reason: str) -> None:
        """End it without a result, if it goes on."""
        self._end(self._failed(reason))

    def _finish(self) -> None:
        if self._found is not None and not self._reply.done() and not self.member.dead:
            self._end(self._found())

    def _end(self, result: FetchOutcome) -> None:
        if not self._reply.done():
            self._run.downloads.remove(self)
            self._memory.close()
            self._reply.set_result(result)

    @property
    def _others(self) -> list[Member]:
        """The members whose daemons can answer."""
        return [one for one in self._run.members.values() if one is not self.member and not one.dead]

    @abstractmethod
    def _find(self) -> Callable[[], FetchOutcome] | str:
        """Return a function that takes the content from its donors; or why no peer will have it, empty if one may."""

    @abstractmethod
    def _failed(self, reason: str) -> FetchOutcome: ...


class SnapshotDownload(Download):
    """The download of a snapshot: of those that are offered, the one that most peers offer, then the latest."""

    _seconds = SNAPSHOT_SECONDS

    def _find(self) -> Callable[[], FetchOutcome] | str:
        others = [one for one in self._others if one.peer not in self.request.wish.barred]
        voters = [one for one in others if one.peer in self.request.wish.circle] or others
        offers = [one.offered for one in voters if one.offered is not None]
        fitting = Counter(offer for offer in offers if offer[0].epoch >= self.request.wish.at_least)
        if not fitting:
            return "" if others else "no other peer of this run is known"
        chosen = max(fitting, key=lambda offer: (fitting[offer], offer[0].epoch))
        donors = [one.peer for one in voters if one.offered == chosen]
        return lambda: self._taken(*chosen, donors, tuple(one.peer for one in voters))

    def _taken(
        self, state: StateId, image: bytes, donors: list[str], voters: tuple[str, ...]
    ) -> FetchOutcome:
        if len(image) > self._memory.capacity:
            return self._failed(f"expected at most {self._memory.capacity} bytes, {len(image)} are offered")
        self._memory.allocate(len(image))
        self._memory.view(len(image), writable=True)[:] = image
        return FetchOutcome(
            ok=True,
            reason=f"{len(donors)} of {len(voters)} peers offer it",
            state=state,
            size=len(image),
            sources={peer: len(image) // len(donors) for peer in donors},
            seconds=self._time.now - self._began,
            voters=voters,
        )

    def _failed(self, reason: str) -> FetchOutcome:
        return FetchOutcome(ok=False, reason=reason)


class MeanDownload(Download):
    """The download of a mean that this peer missed."""

    _seconds = MEAN_SECONDS

    @property
    def _after(self) -> StateId:
        assert self.request.wish.after is not None, "it is no snapshot"
        return self.request.wish.after

    def _find(self) -> Callable[[], FetchOutcome] | str:
        kept = self._run.kept.get(self._after)
        if kept is not None and not all(one.dead for one in kept.holders):
            return lambda: self._taken(kept)
        if self._in_round or (self.request.wish.patient and self._behind):
            return ""
        return f"none of {len(self._others)} peers keeps the mean after epoch {self._after.epoch}"

    def _taken(self, kept: Kept) -> FetchOutcome:
        size = len(kept.mean)
        self._memory.allocate(size)
        self._memory.view(size, writable=True)[:] = kept.mean
        reason = f"missed, and had from others: {kept.outcome.reason}"
        sources = {one.peer: 0 for one in kept.holders if not one.dead}
        outcome = structs.replace(kept.outcome, reason=reason, bytes_received=size)
        return FetchOutcome(ok=True, reason=reason, size=size, sources=sources, round=outcome)

    @property
    def _behind(self) -> int:
        here = [one for one in self._others if not one.left]
        return sum(one.epoch is None or one.epoch < self._after.epoch for one in here)

    @property
    def _in_round(self) -> int:
        """The number of peers in a round that may end in this mean."""
        rounds = (one.exchange for one in self._others if one.exchange is not None)
        return sum(one.manifest.before == self._after for one in rounds)

    def _failed(self, reason: str) -> FetchOutcome:
        return FetchOutcome(ok=False, reason=reason, behind=self._behind, unheard=self._in_round)
