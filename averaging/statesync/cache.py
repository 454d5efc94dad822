"""The snapshots that a donor holds: the last that its trainer handed over, and one that is still being downloaded."""

from __future__ import annotations

from collections.abc import Collection

from equipoise.averaging.statesync.messages import Offer


class Cache:
    """At most two snapshots, so that a donor's memory holds two images and no more."""

    def __init__(self) -> None:
        self._last: Offer | None = None
        self._older: Offer | None = None

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What is held, the newest first."""
        return tuple(offer for offer in (self._last, self._older) if offer is not None)

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
        self._last, self._older = offer, kept[-1] if kept else None
        held = {one.image for one in self.offers}
        return [one for one in before if one.image not in held]

    def drop_unread(self, read: Collection[bytes]) -> list[Offer]:
        """Let the older snapshot go if nobody downloads it any more; return it."""
        if self._older is None or self._older.image.digest in read:
            return []
        gone, self._older = self._older, None
        return [gone]
