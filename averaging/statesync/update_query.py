"""The mean that a peer takes which missed one: decided from the answers of the others, as soon as they allow it.

The peer asks whoever holds the state after for what led there. How many offer a mean proves nothing; the votes that
come with it do (`update`), so one honest donor is enough. The peer tries first what most offer of those by whom
it knows its state: strangers who make something up do not cost it the time. What nobody gives, though some offer it,
comes last. That changes as answers come: a peer at which that very round goes on answers when the round has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.answers import LONE_SECONDS, Agreement, Answers, counted
from equipoise.averaging.statesync.messages import Answer, Offer

FEWEST_VOTES = 2
"""Fewest votes of a mean that is worth a download: more than half of the smallest round."""

MAX_PROOFS = 256
"""Most proofs held at once, of peers that are asked and of some that have gone: four times as many as are asked."""


class UpdateQuery(Answers):
    """The answers on the mean that leads on from `after`.

    Args:
        after: The state.
        circle: PeerIDs of the peers by whom it is known.
        patient: Whether it may yet come to be, as long as some peers are not as far.
        proved: Whether the asking peer can tell it by its digest, from any donor.
    """

    def __init__(
        self,
        after: StateId,
        circle: frozenset[str] = frozenset(),
        patient: bool = False,
        proved: bool = False,
    ) -> None:
        super().__init__()
        self._proved = proved
        self._after = after
        self._circle = circle
        self._patient = patient
        self._offered: dict[str, tuple[Offer, Commit] | None] = {}
        self._doubted: set[Offer] = set()

    def hear(self, peer: str, answer: Answer, now: float) -> None:
        """See `Answers`. What proves a mean is kept when its donor has gone, or is not believed any more."""
        super().hear(peer, answer, now)
        if peer not in self.peers or not any(offer.state == self._after for offer in answer.offers):
            return
        if len(self._offered) >= MAX_PROOFS:
            self._offered = {one: given for one, given in self._offered.items() if one in self.peers}
        self._offered.setdefault(peer, None)
        if answer.proof is not None and (offer := self._offer_in(answer)) is not None:
            self._offered[peer] = (offer, answer.proof)

    def proofs(self, offer: Offer) -> tuple[Commit, ...]:
        """The proofs that were given for it, each once."""
        return tuple({given[1]: None for given in self._offered.values() if given and given[0] == offer})

    def doubt(self, offer: Offer) -> None:
        """None of those who offered it has given anything of it when it was asked for it."""
        self._doubted.add(offer)

    def rank(self, offer: Offer) -> tuple[bool, int]:
        """Of two offers that with the larger one is tried first: of those who are known to have the state, most."""
        return offer not in self._doubted, sum(self.offers(peer, offer) for peer in self._circle)

    @property
    def behind(self) -> int:
        """The number of peers that answered and are not as far as this one, or look for the state themselves."""
        epochs = [answer.epoch for answer in self._answers.values() if not answer.left]
        return sum(epoch is None or epoch < self._after.epoch for epoch in epochs)

    @property
    def unheard(self) -> int:
        """The number of peers that have not answered, or have offered a mean: the right one, perhaps."""
        return len((self.peers.keys() - self._answers.keys()) | self._offered.keys())

    def agreement(self, now: float) -> Agreement | None:
        """Return what to try next; None if that is not clear yet, or nobody keeps it."""
        tally = self._tally
        if not tally:
            return None
        offer = max(tally, key=lambda one: (*self.rank(one), tally[one], one.image.digest))
        count, (_, near) = tally[offer], self.rank(offer)
        most = 2 * near > len(self._circle) if self._circle else 2 * count > len(self.peers)
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
    def _awaited(self) -> Set[str]:
        """Those by whom the state is known, where all of them are there: only what most of them signed is taken.
        Others are asked as well, but records of peers that never answer, which anybody can write, must not hold up
        every question."""
        enough = bool(self._circle) and self._circle <= self.peers.keys() and not self._proved
        return self._circle if enough else self.peers.keys()

    @property
    def standing(self) -> str:
        """The offers of the mean so far, in one line."""
        if self._nobody:
            return self._nobody
        offering = self._tally.total()
        if not offering:
            return f"none of {counted(len(self._answers))} that answered keeps the mean after epoch {self._after.epoch}"
        return f"{offering} of {counted(len(self.peers))} offer the mean after epoch {self._after.epoch}"

    def _offer_in(self, answer: Answer) -> Offer | None:
        """The mean that an answer offers, with as many votes as any needs."""
        votes = answer.proof.signatures if answer.proof is not None else ()
        known = answer.offers[:1] if len(dict(votes)) >= FEWEST_VOTES else ()
        return next((offer for offer in known if offer.state == self._after), None)

    @property
    def _tally(self) -> Counter[Offer]:
        return Counter(offer for one in self._answers.values() if (offer := self._offer_in(one)))
