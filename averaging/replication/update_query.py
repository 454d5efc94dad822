"""Chooses the mean that a peer downloads after it missed one, from the answers of the others.

The peer asks all others for the mean that the group applied to its state. It believes a mean that more than half of its
circle offer: the peers that held its state in a round, or had a vote on its snapshot. Each peer answers for itself, on
an authenticated channel, so any number of strangers proves nothing. Liars that are more than half of a circle could
also have outvoted the others in that round or poll. Peers of the circle that are gone or cannot be reached do not
count: else the mean of a group would be lost with half of its members. A peer that is silent counts, because it may
still be in the round of that mean.

Where a draw decides which peers contribute, or too few places do, these few make a round, and the others may all have
missed it. Drawn peers belong to the circle, though they may never have met this peer. The peers of the circle that are
not beyond the state do not count, and the quorum of such a round must offer the mean, but for its members that are
gone. One member in the circle is enough: the others may have come to the state by a download.

The choice changes as answers come: a peer in the middle of that round answers when the round has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from statistics import median_low

from equipoise.averaging.counts import count
from equipoise.averaging.replication.answers import LONE_SECONDS, Agreement, Answers, Request
from equipoise.averaging.replication.messages import Answer, Offer


class UpdateQuery(Answers):
    """The answers on the mean that the group applied to the state `request.wish.after`."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        assert request.wish.after is not None, "it asks for a mean"
        self._after = request.wish.after
        self._request = request
        self._circle = request.wish.circle

    def _near(self, offer: Offer) -> int:
        """The number of peers of the circle that make an offer."""
        return sum(self.offers(peer, offer) for peer in self._circle)

    @property
    def behind(self) -> int:
        """The number of peers that answered and are not as far as this peer, or fetch a state themselves."""
        epochs = [answer.epoch for answer in self._answers.values() if not answer.left]
        return sum(epoch is None or epoch < self._after.epoch for epoch in epochs)

    @property
    def unheard(self) -> int:
        """The number of peers that have not answered, or offer a mean, which may be the right one."""
        return len(self.peers) - len(self._answers) + self._tally.total()

    def agreement(self, now: float) -> Agreement | None:
        """Return the mean to try next; None if no mean is believed so far."""
        tally = self._tally
        offer = max(tally, key=lambda one: (self._near(one), tally[one], one.image.digest), default=None)
        if offer is None:
            return None
        voters, quorum = self._circle, self._request.quorum
        if self._settled(now, LONE_SECONDS):
            voters = voters & self.peers.keys() - self._silent
        near, gone = self._near(offer), len(self._circle) - len(voters)
        if quorum and near and tally[offer] + gone >= quorum:
            voters = voters - {peer for peer in voters if self._waits(peer)}
        if 2 * near <= len(voters):
            return None
        return self._agreed(offer, f"{tally[offer]} of {count(len(self.peers), 'peer')} offer it")

    def hopeless(self, now: float) -> str:
        """Why the mean cannot come, one line; empty while it may come."""
        request = self._request
        comes = not self.beyond if request.follows else request.wish.patient and self.behind > 0
        return "" if comes or not self._settled(now, LONE_SECONDS) else self.standing

    def wish(self, now: float) -> bool:
        """Returns False: a mean is kept or not, so there are no epochs to wish for."""
        return False

    @property
    def beyond(self) -> int:
        """The epoch that most peers of the circle that answered have reached; 0 unless it is beyond the state."""
        there = self._circle & self._answers.keys() or self._answers.keys()
        reached = median_low([self._answers[peer].epoch or 0 for peer in there] or [0])
        return reached if reached > self._after.epoch else 0

    def _waits(self, peer: str) -> bool:
        """True if a peer has answered, and is not beyond the state: it has missed the mean, too."""
        answer = self._answers.get(peer)
        return answer is not None and (answer.epoch is None or answer.epoch <= self._after.epoch)

    @property
    def _awaited(self) -> Set[str]:
        """The peers of the circle that are there, if any: other peers are asked too, but anybody can write records of
        peers that never answer, and those must not delay every question."""
        return self._circle & self.peers.keys() or self.peers.keys()

    @property
    def standing(self) -> str:
        """The offers of the mean so far, in one line."""
        if self._nobody:
            return self._nobody
        tally, what = self._tally, f"the mean after epoch {self._after.epoch}"
        if not tally:
            return f"none of {count(len(self._answers), 'peer')} that answered keeps {what}"
        near = max(map(self._near, tally))
        circle = count(len(self._circle), "peer")
        return f"{near} of the {circle} that vouch for this peer's state offer the same as {what}"

    def _offer_in(self, answer: Answer) -> Offer | None:
        """The mean that an answer offers."""
        fits = (
            one
            for one in answer.offers
            if one.state == self._after and one.image.size <= self._request.wish.limit
        )
        return next(fits, None)

    @property
    def _tally(self) -> Counter[Offer]:
        return Counter(offer for one in self._answers.values() if (offer := self._offer_in(one)))
