"""Chooses the mean that a peer downloads after it missed one, from the answers of the others.

The peer asks all others for the mean that the group applied to its state. The number of offers proves nothing. The
votes that come with a mean prove it (`update`), so one honest donor is enough. The peer first tries the mean that most
of its circle offer, so that inventions of strangers cost it no time. A mean that its donors offer but do not deliver
comes last. The choice changes as answers come: a peer in the middle of that round answers when the round has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from equipoise.averaging.allreduce.messages import Commit
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.answers import LONE_SECONDS, Agreement, Answers, counted
from equipoise.averaging.statesync.messages import Answer, Offer

FEWEST_VOTES = 2
"""Fewest votes for a mean that is worth a download: more than half of the smallest round."""

MAX_PROOFS = 256
"""Most proofs held at once, of present peers and of some that have gone: four times as many as peers are asked."""


class UpdateQuery(Answers):
    """The answers on the mean that the group applied to the state `after`.

    Args:
        after: The state.
        circle: PeerIDs of the peers that vouch for it.
        patient: Whether to wait while some peers are not as far: the round of that mean may still come.
        proved: Whether the asking peer knows the mean's digest, so that it can take the mean from any donor.
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
        """See `Answers`. The proof of a mean stays when its donor has gone or is barred."""
        super().hear(peer, answer, now)
        if peer not in self.peers or not any(offer.state == self._after for offer in answer.offers):
            return
        if len(self._offered) >= MAX_PROOFS:
            self._offered = {one: given for one, given in self._offered.items() if one in self.peers}
        self._offered.setdefault(peer, None)
        if answer.proof is not None and (offer := self._offer_in(answer)) is not None:
            self._offered[peer] = (offer, answer.proof)

    def proofs(self, offer: Offer) -> tuple[Commit, ...]:
        """The proofs that donors gave for the offered mean, each once."""
        return tuple({given[1]: None for given in self._offered.values() if given and given[0] == offer})

    def doubt(self, offer: Offer) -> None:
        """Note that no donor of this offer has delivered any of it when asked."""
        self._doubted.add(offer)

    def rank(self, offer: Offer) -> tuple[bool, int]:
        """The rank of an offer; the highest is tried first: not doubted, then offered by most of the circle."""
        return offer not in self._doubted, sum(self.offers(peer, offer) for peer in self._circle)

    @property
    def behind(self) -> int:
        """The number of peers that answered and are not as far as this peer, or fetch a state themselves."""
        epochs = [answer.epoch for answer in self._answers.values() if not answer.left]
        return sum(epoch is None or epoch < self._after.epoch for epoch in epochs)

    @property
    def unheard(self) -> int:
        """The number of peers that have not answered, or have offered a mean, which may be the right one."""
        return len((self.peers.keys() - self._answers.keys()) | self._offered.keys())

    def agreement(self, now: float) -> Agreement | None:
        """Return the mean to try next; None while that is not clear, or if no peer keeps a mean."""
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
        """Why the mean cannot come, one line; empty while it may come."""
        waits = not self._settled(now, LONE_SECONDS) or (self._patient and self.behind)
        return "" if waits else self.standing

    def wish(self, now: float) -> bool:
        """Returns False: a mean is kept or not, so there are no epochs to wish for."""
        return False

    @property
    def _awaited(self) -> Set[str]:
        """The circle, if all its peers are there: only a mean that most of them signed is taken. Other peers are asked
        too, but anybody can write records of peers that never answer, and those must not delay every question."""
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
        """The mean that an answer offers, if it comes with at least `FEWEST_VOTES` votes."""
        votes = answer.proof.signatures if answer.proof is not None else ()
        known = answer.offers[:1] if len(dict(votes)) >= FEWEST_VOTES else ()
        return next((offer for offer in known if offer.state == self._after), None)

    @property
    def _tally(self) -> Counter[Offer]:
        return Counter(offer for one in self._answers.values() if (offer := self._offer_in(one)))
