"""Schedules which donor is asked for which chunk. A donor's window follows its speed; others take over if it stalls.

The list of digests, item 0 of an image, is scheduled in the same way, by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from equipoise.averaging.timing import STALL_SECONDS

FIRST_WINDOW = 2
"""Most chunks asked of a donor at once before it has delivered any: it reads one while it sends the other."""

MAX_WINDOW = 8
"""Most chunks asked of a donor at once: 8 MiB keep a link of 80 MB/s with a tenth of a second's delay full, and more
would only wait in a queue."""

QUICK_SECONDS, LONG_SECONDS = 0.25, 1.0
"""Bounds on the time of a chunk: a faster chunk widens its donor's window, a slower chunk halves it, because a slow
donor must not hold many chunks."""

MAX_REST_SECONDS = 8.0
"""Longest time for which a donor that stalls again and again is not asked; then it is asked for one chunk."""


class Source:
    """One donor.

    Attributes:
        asked: Chunk -> when the donor was asked for it.
        late: Chunks now asked of other donors, because this donor stalled; still welcome.
        rests_until: When the donor may be asked again after it stalled.
    """

    def __init__(self) -> None:
        self.asked: dict[int, float] = {}
        self.late: set[int] = set()
        self._window = FIRST_WINDOW
        self._rest = STALL_SECONDS
        self.rests_until = 0.0
        self._heard_at = 0.0

    def room(self, now: float) -> int:
        """Return how many more chunks the donor may be asked for."""
        return max(self._window - len(self.asked), 0) if now >= self.rests_until else 0

    def ask(self, chunk: int, now: float) -> None:
        """Note that the donor is asked for a chunk."""
        if not self.asked:
            self._heard_at = now
        self.late.discard(chunk)
        self.asked[chunk] = now

    def deliver(self, chunk: int, now: float) -> None:
        """Note that the donor has delivered a chunk."""
        took = now - self.asked.pop(chunk, now - LONG_SECONDS)
        self._heard_at, self._rest, self.rests_until = now, STALL_SECONDS, 0.0
        if took < QUICK_SECONDS:
            self._window = min(self._window + 1, MAX_WINDOW)
        elif took > LONG_SECONDS:
            self._window = max(self._window // 2, 1)

    @property
    def stalls_at(self) -> float:
        """When the donor stalls if it delivers nothing."""
        return self._heard_at + STALL_SECONDS if self.asked else float("inf")

    def stall(self, now: float) -> list[int]:
        """Let the donor rest after a stall; return the chunks to ask of others."""
        self.rests_until = now + self._rest
        self._rest = min(2 * self._rest, MAX_REST_SECONDS)
        self._window = 1
        return self.give_up()

    def give_up(self) -> list[int]:
        """Return the chunks that the donor was asked for, to ask them of others."""
        chunks = list(self.asked)
        self.late.update(chunks)
        self.asked.clear()
        return chunks


class ChunkScheduler:
    """The donors of one image, and its missing chunks.

    Attributes:
        donors: The donors by PeerID.
        delivered: PeerID -> number of chunks delivered; includes donors that are gone.
    """

    def __init__(self, chunks: Sequence[int], donors: Iterable[str] = ()) -> None:
        self.donors = {peer: Source() for peer in donors}
        self.delivered: dict[str, int] = {}
        self._missing = set(chunks)
        self._waiting = deque(chunks)

    @property
    def left(self) -> int:
        """Number of missing chunks."""
        return len(self._missing)

    def add(self, peer: str) -> None:
        """Add a donor, unless `peer` is one already."""
        self.donors.setdefault(peer, Source())

    def remove(self, peer: str) -> bool:
        """Ask `peer` for nothing more; returns whether it was a donor."""
        source = self.donors.pop(peer, None)
        if source is not None:
            self._return(source.give_up())
        return source is not None

    def expects(self, peer: str, chunk: int) -> bool:
        """True if `peer` was asked for a chunk that is still missing."""
        source = self.donors.get(peer)
        asked = source is not None and (chunk in source.asked or chunk in source.late)
        return asked and chunk in self._missing

    def receive(self, peer: str, chunk: int, now: float) -> None:
        """Note that a chunk is in its place: no donor is asked for it any more."""
        if chunk in self._missing:
            self._missing.discard(chunk)
            self.donors[peer].deliver(chunk, now)
            self.delivered[peer] = self.delivered.get(peer, 0) + 1
            for source in self.donors.values():
                source.asked.pop(chunk, None)
                source.late.discard(chunk)

    def stalled(self, now: float) -> list[str]:
        """Take the chunks from donors that have stalled, and ask these donors last; return their PeerIDs."""
        found = [peer for peer, source in self.donors.items() if now >= source.stalls_at]
        for peer in found:
            source = self.donors[peer] = self.donors.pop(peer)
            self._return(source.stall(now))
        return found

    def requests(self, now: float) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the donors to ask now, with the chunks to ask each for."""
        for peer, source in self.donors.items():
            chunks = tuple(islice(self._unasked(), source.room(now)))
            for chunk in chunks:
                source.ask(chunk, now)
            if chunks:
                yield peer, chunks

    def deadline(self, now: float) -> float:
        """When the next donor stalls, or has rested."""
        resting = [source.rests_until for source in self.donors.values() if source.rests_until > now]
        return min([source.stalls_at for source in self.donors.values()] + resting, default=float("inf"))

    def _unasked(self) -> Iterator[int]:
        """Yield missing chunks that no donor is asked for."""
        while self._waiting:
            if (chunk := self._waiting.popleft()) in self._missing:
                yield chunk

    def _return(self, chunks: list[int]) -> None:
        self._waiting.extendleft(reversed(chunks))
