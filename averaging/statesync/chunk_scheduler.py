"""The chunks that each donor is asked for: as many at once as it has shown to deliver, and from others if it stalls.

The list of digests is asked for in the same way, as the only item of its kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from equipoise.averaging.timing import STALL_SECONDS

FIRST_WINDOW = 2
"""Most chunks that a donor is asked for at once before it has delivered any: one is sent while it reads the next."""

MAX_WINDOW = 8
"""Most chunks that a donor is asked for at once: 8 MiB keep a link of 80 MB/s with a tenth of a second's delay full,
and more would only queue there."""

QUICK_SECONDS, LONG_SECONDS = 0.25, 1.0
"""Times of a chunk: one that takes less widens its donor's window, one that takes more halves it, for a slow donor must
not hold many."""

MAX_REST_SECONDS = 8.0
"""Longest time that a donor which stalls again and again is left in peace, before it is asked for one chunk."""


class Source:
    """One donor.

    Attributes:
        asked: Chunk -> when it was asked for it.
        late: Chunks that it was asked for and has lost to others; still welcome.
        rests_until: When it may be asked again after it stalled.
    """

    def __init__(self) -> None:
        self.asked: dict[int, float] = {}
        self.late: set[int] = set()
        self._window = FIRST_WINDOW
        self._rest = STALL_SECONDS
        self.rests_until = 0.0
        self._heard_at = 0.0

    def room(self, now: float) -> int:
        """Return how many more chunks it may be asked for."""
        return max(self._window - len(self.asked), 0) if now >= self.rests_until else 0

    def ask(self, chunk: int, now: float) -> None:
        """It is asked for a chunk."""
        if not self.asked:
            self._heard_at = now
        self.late.discard(chunk)
        self.asked[chunk] = now

    def deliver(self, chunk: int, now: float) -> None:
        """A chunk has come from it."""
        took = now - self.asked.pop(chunk, now - LONG_SECONDS)
        self._heard_at, self._rest, self.rests_until = now, STALL_SECONDS, 0.0
        if took < QUICK_SECONDS:
            self._window = min(self._window + 1, MAX_WINDOW)
        elif took > LONG_SECONDS:
            self._window = max(self._window // 2, 1)

    @property
    def stalls_at(self) -> float:
        """When it will have stalled if nothing comes."""
        return self._heard_at + STALL_SECONDS if self.asked else float("inf")

    def stall(self, now: float) -> list[int]:
        """It has stalled: return what others are to be asked for."""
        self.rests_until = now + self._rest
        self._rest = min(2 * self._rest, MAX_REST_SECONDS)
        self._window = 1
        return self.give_up()

    def give_up(self) -> list[int]:
        """Expect nothing more of it; return what others are to be asked for."""
        chunks = list(self.asked)
        self.late.update(chunks)
        self.asked.clear()
        return chunks


class ChunkScheduler:
    """The donors of one image, and what of it is missing.

    Attributes:
        donors: By PeerID.
        delivered: PeerID -> chunks, of donors that are gone too.
    """

    def __init__(self, chunks: int, donors: Iterable[str] = ()) -> None:
        self.donors = {peer: Source() for peer in donors}
        self.delivered: dict[str, int] = {}
        self._missing = set(range(chunks))
        self._waiting = deque(range(chunks))

    @property
    def left(self) -> int:
        """Chunks that are missing."""
        return len(self._missing)

    def add(self, peer: str) -> None:
        """`peer` offers the image; nothing happens if that is known."""
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
        """A chunk is in its place."""
        if chunk in self._missing:
            self._missing.discard(chunk)
            self.donors[peer].deliver(chunk, now)
            self.delivered[peer] = self.delivered.get(peer, 0) + 1
            for source in self.donors.values():
                source.asked.pop(chunk, None)
                source.late.discard(chunk)

    def stalled(self, now: float) -> list[str]:
        """Take from those who have stalled what they were asked for, and ask them last; return who they are."""
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
        """When a donor will have stalled, or has rested."""
        resting = [source.rests_until for source in self.donors.values() if source.rests_until > now]
        return min([source.stalls_at for source in self.donors.values()] + resting, default=float("inf"))

    def _unasked(self) -> Iterator[int]:
        """Take missing chunks from those that nobody is asked for."""
        while self._waiting:
            if (chunk := self._waiting.popleft()) in self._missing:
                yield chunk

    def _return(self, chunks: list[int]) -> None:
        self._waiting.extendleft(reversed(chunks))
