"""What a donor holds for others: the last snapshots of its trainer, and the last means of its rounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.chunks import ImageId
from equipoise.averaging.statesync.messages import Offer

KEPT_MEANS = 8
"""Most means that a donor keeps. A peer that is further behind takes a snapshot instead: eight means in int8 have as
many bytes as the image of a state with Adam's two moments."""


class Cache:
    """At most two snapshots, so that a donor's memory holds two images and no more.

    Attributes:
        offers: The last that its trainer handed over, and one that is still being downloaded.
    """

    def __init__(self) -> None:
        self.offers: tuple[Offer, ...] = ()

    def find(self, digest: bytes) -> Offer | None:
        """The snapshot whose image has this digest."""
        return next((offer for offer in self.offers if offer.image.digest == digest), None)

    def put(self, offer: Offer, read: Collection[bytes]) -> list[Offer]:
        """Hold a new snapshot; return those that must go.

        Args:
            offer: The new one.
            read: Digests of the images that are being downloaded. Of two of them the older stays: it is more complete.
        """
        before = self.offers
        kept = [one for one in before if one.image != offer.image and one.image.digest in read]
        self.offers = (offer, *kept[-1:])
        held = {one.image for one in self.offers}
        return [one for one in before if one.image not in held]

    def drop_unread(self, read: Collection[bytes]) -> tuple[Offer, ...]:
        """Let the older snapshot go if nobody downloads it any more; return it."""
        gone = tuple(offer for offer in self.offers[1:] if offer.image.digest not in read)
        self.offers = tuple(offer for offer in self.offers if offer not in gone)
        return gone


@dataclass
class _Mean:
    size: int
    image: ImageId | None = None
    making: bool = False


class Kept:
    """The means of one run, by the state that each leads on from."""

    def __init__(self) -> None:
        self._means: OrderedDict[StateId, _Mean] = OrderedDict()

    def keep(self, before: StateId, size: int, most: int, read: Collection[bytes]) -> list[StateId]:
        """Keep another, of `size` bytes; returns which others must go.

        Args:
            before: What it leads on from; it takes the place of one that does as well.
            size: Bytes.
            most: Bytes of all kept means together, but the last, which is kept whatever its size.
            read: Digests of the images that are being downloaded, which go last.
        """
        gone = []
        self._means.pop(before, None)
        self._means[before] = _Mean(size)
        while len(self._means) > 1 and (len(self._means) > KEPT_MEANS or self._bytes > most):
            *older, _ = self._means
            unread = (one for one in older if not ((offer := self.offer(one)) and offer.image.digest in read))
            oldest = next(unread, older[0])
            del self._means[oldest]
            gone.append(oldest)
        return gone

    def lacks_image(self, before: StateId) -> bool:
        """Whether the mean that leads on from there is kept, and has no image yet."""
        mean = self._means.get(before)
        return mean is not None and mean.image is None

    def begins_image(self, before: StateId) -> bool:
        """Whether an image of that mean is to be made: from now on one is being made."""
        mean = self._means.get(before)
        if mean is None or mean.making:
            return False
        mean.making = True
        return True

    def ready(self, before: StateId, image: ImageId | None) -> bool:
        """That mean has an image now; with None it cannot, and goes. Returns whether it is still kept."""
        if image is None:
            self._means.pop(before, None)
        mean = self._means.get(before)
        if mean is not None:
            mean.image = image
        return mean is not None

    def offer(self, before: StateId) -> Offer | None:
        """The mean that leads on from there, if it is kept and has an image."""
        mean = self._means.get(before)
        return None if mean is None or mean.image is None else Offer(before, mean.image)

    def find(self, digest: bytes) -> Offer | None:
        """The mean whose image has this digest."""
        offers = (self.offer(before) for before in self._means)
        return next((offer for offer in offers if offer is not None and offer.image.digest == digest), None)

    @property
    def _bytes(self) -> int:
        return sum(mean.size for mean in self._means.values())
