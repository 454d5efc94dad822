"""Images: a state as bytes, cut into chunks, named by one digest over the digests of all chunks.

A hash tree of one level: a peer that knows the name can check the list of digests, and with the list each chunk by
itself, from any donor (as in BitTorrent v2, BEP 52, with a flat layer in place of a binary tree).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from blake3 import blake3

from equipoise.averaging.ports import Buffer
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
