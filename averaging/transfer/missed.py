"""Which mean one that missed it takes: decided from what the peers answer, and in no more time than that takes.

Whoever holds the state after is asked for what led there. How many offer it proves nothing, for the votes that come
with a mean do (`votes`), so that one honest donor is enough. What most offer is tried first, of those by whom one knows
the state, so that strangers who make something up do not cost their betters the time. A peer at which that very round
goes on answers when it has ended.
"""

from __future__ import annotations

from collections import Counter

from equipoise.averaging.state import StateId
from equipoise.averaging.transfer.answers import LONE_SECONDS, Agreement, Answers, counted
from equipoise.averaging.transfer.messages import Offer


class Missed(Answers):
    """What is known of the mean that leads on from `after`.

    Args:
        after: The state.
        circle: PeerIDs of those by whom it is known.
        patient: Whether it may yet come to be, as long as some are not as far.
    """

    def __init__(self, after: StateId, circle: frozenset[str] = frozenset(), patient: bool = False) -> None:
        super().__init__()
        self._after = after
        self._circle = circle
        self._patient = patient

    @property
    def behind(self) -> int:
        """How many of those who answered are not as far as whoever asks, or look for the state themselves."""
        epochs = [answer.epoch for answer in self._answers.values()]
        return sum(epoch is None or epoch < self._after.epoch for epoch in epochs)

    @property
    def unheard(self) -> int:
        """How many have not answered."""
        return len(self.peers) - len(self._answers)

    def agreement(self, now: float) -> Agreement | None:
        """What to try next; None if that is not clear yet, or nobody keeps it."""
        if not self._tally:
            return None
        offer, count = max(
            self._tally.items(), key=lambda item: (self._near(item[0]), item[1], item[0].image.digest)
        )
        most = 2 * self._near(offer) > len(self._circle) if self._circle else 2 * count > len(self.peers)
        if not most and not self._settled(now):
            return None
        return self._agreed(offer, f"{count} of {counted(len(self.peers))} offer it")

    def hopeless(self, now: float) -> str:
        """Why it cannot be had, one line; empty as long as it may."""
        waits = not self._settled(now, LONE_SECONDS) or (self._patient and self.behind)
        return "" if waits else self.standing

    def wish(self, now: float) -> bool:
        """Nothing is wished for: a mean is kept, or it is not."""
        return False

    @property
    def standing(self) -> str:
        """What is waited for, in one line."""
        if self._nobody:
            return self._nobody
        offering = self._tally.total()
        if not offering:
            return f"none of {counted(len(self._answers))} that answered keeps the mean after epoch {self._after.epoch}"
        return f"{offering} of {counted(len(self.peers))} offer the mean after epoch {self._after.epoch}"

    def _near(self, offer: Offer) -> int:
        """How many of the circle offer it."""
        return sum(self.offers(peer, offer) for peer in self._circle)

    @property
    def _tally(self) -> Counter[Offer]:
        return Counter(
            offer for one in self._answers.values() for offer in one.offers[:1] if offer.state == self._after
        )
