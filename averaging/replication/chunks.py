"""Images: a state as bytes, cut into chunks, named by one digest over the digests of all chunks.

A hash tree of one level: a peer that knows the name can check the list of digests, and with the list each chunk by
itself, from any donor (as in BitTorrent v2, BEP 52, with a flat layer in place of a binary tree).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3

from equipoise.averaging.ports import Buffer
from equipoise.averaging.timing import STALL_SECONDS
from equipoise.limits import MAX_BODY_BYTES

DIGEST_BYTES = 32

CHUNK_BYTES = 1024 * 1024
"""Length of a chunk: a hundredth of a second on a link of 1 Gbit/s, the time that a round may wait or a liar waste."""

MAX_CHUNKS = MAX_BODY_BYTES // DIGEST_BYTES
"""Most chunks of an image: the list of digests must fit one frame's body. So images have up to 128 GiB."""

MAX_IMAGE_BYTES = MAX_CHUNKS * CHUNK_BYTES

_DOMAIN = b"equipoise image 1\0"

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGE_BYTES)]


class ImageId(msgspec.Struct, frozen=True, array_like=True):
    """Names an image: equal ids, equal bytes. Its items are the list of digests, item 0, and the chunks, from 1 on.

    Attributes:
        digest: BLAKE3 over the size and the digests of all chunks.
        size: Bytes.
    """

    digest: Digest
    size: Size

    @classmethod
    def of(cls, size: int, digests: Buffer) -> ImageId:
        """Name the image of `size` bytes whose chunks have these digests, 32 bytes each."""
        return cls(blake3(_DOMAIN + size.to_bytes(8, "big") + digests).digest(), size)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.size // CHUNK_BYTES)

    def span(self, chunk: int) -> slice:
        """The place of a chunk in the image."""
        return slice((chunk - 1) * CHUNK_BYTES, min(chunk * CHUNK_BYTES, self.size))

    def length(self, item: int) -> int:
        """Bytes of an item; all chunks have `CHUNK_BYTES` but the last."""
        if item == 0:
            return self.chunks * DIGEST_BYTES
        span = self.span(item)
        return int(span.stop - span.start)

    def genuine(self, digests: Buffer) -> bool:
        """True if these are the digests of this image's chunks."""
        return len(digests) == self.length(0) and ImageId.of(self.size, digests) == self


class Image(NamedTuple):
    """An image that a donor serves.

    Attributes:
        name: Its name.
        data: Its bytes.
        digests: The digests of its chunks.
    """

    name: ImageId
    data: memoryview
    digests: bytes

    @classmethod
    def of(cls, data: memoryview) -> Image:
        """The image of these bytes, with their digests; slow, so run it in a thread: it does not hold the GIL."""
        starts = range(0, len(data), CHUNK_BYTES)
        digests = b"".join(blake3(data[start : start + CHUNK_BYTES]).digest() for start in starts)
        return cls(ImageId.of(len(data), digests), data, digests)


def is_chunk(body: memoryview, digests: bytes, chunk: int) -> bool:
    """True if `body` is that chunk of the image whose chunks have these digests."""
    end = chunk * DIGEST_BYTES
    return blake3(body).digest() == digests[end - DIGEST_BYTES : end]


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
    """The donors of one image, and its missing chunks: which donor is asked for which. Others take over from a donor
    that stalls. The list of digests, item 0, is scheduled in the same way, by itself.

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
