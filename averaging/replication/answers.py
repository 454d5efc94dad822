"""A newcomer's question, the answers of its run's peers, and the peers that have still to answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.replication.messages import Answer, Epoch, Offer
from equipoise.averaging.state import StateId

ANSWER_SECONDS = 1.0
"""Longest time to wait for an answer; most peers answer within a round trip."""

LONE_SECONDS = 3 * ANSWER_SECONDS
"""Longest time to wait for the others if only one has answered: a channel may have to be opened first."""


Peers = Annotated[frozenset[str], msgspec.Meta(max_length=256)]
"""PeerIDs: as many as a follower remembers."""


class Wish(msgspec.Struct, frozen=True):
    """What a newcomer looks for: a snapshot or, given `after`, a mean that it missed.

    Attributes:
        at_least: The first epoch that is of use.
        limit: Most bytes of a snapshot.
        after: The state to which the group applied the mean.
        circle: PeerIDs of the peers that vouch for that state: they held it in a round with this peer, or had a vote on
            its snapshot. More than half of them must offer the same mean, as far as they can be reached. For a
            snapshot: PeerIDs of the only peers that have a vote, while any is there.
        strict: Whether no other peer has a vote either while none of them is there.
        barred: PeerIDs of the peers whose last snapshot did not fit the newcomer's model: they are not asked.
        patient: Whether to wait for the peers that are not as far, if no other peer has that mean.
    """

    at_least: Epoch = 0
    limit: int = 0
    after: StateId | None = None
    circle: Peers = frozenset()
    strict: bool = False
    barred: Peers = frozenset()
    patient: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A newcomer's request.

    Attributes:
        run: The run's name.
        spec: Hash of its RunSpec.
        ticket: 8 random bytes.
        wish: What it looks for.
        quorum: Fewest members that make a round without the others, where a draw or a place decides who contributes;
            0: no minority does.
        follows: Whether the asking peer has no place in the group, and waits for the mean until others are beyond it.
    """

    run: str
    spec: str
    ticket: bytes
    wish: Wish
    quorum: int = 0
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """The image to download.

    Attributes:
        offer: The snapshot, or mean.
        donors: PeerIDs of the peers that offer it.
        reason: Why it was chosen, in one line.
        voters: For a snapshot: PeerIDs of all peers that had a vote or were late, whether they offer it or not.
        closed: For a mean: when the group of its round closed, by the median word of its donors.
    """

    offer: Offer
    donors: tuple[str, ...]
    reason: str
    voters: tuple[str, ...] = ()
    closed: float = 0.0


class Answers:
    """The answers of a run's peers.

    Attributes:
        peers: PeerID of each peer to ask -> since when it is known.
        barred: PeerID -> why the newcomer takes nothing more from that peer.
        wanted: The epochs of which donors are asked to take a snapshot.
    """

    def __init__(self) -> None:
        self.peers: dict[str, float] = {}
        self.barred: dict[str, str] = {}
        self.wanted: tuple[int, ...] = ()
        self._answers: dict[str, Answer] = {}
        self._closed: dict[str, float] = {}
        self._silent: set[str] = set()

    def see(self, peers: tuple[str, ...], now: float) -> list[str]:
        """Note the peers of the run; return the new peers, which are asked now."""
        self.peers = {peer: self.peers.get(peer, now) for peer in peers if peer not in self.barred}
        self._answers = {peer: answer for peer, answer in self._answers.items() if peer in self.peers}
        self._closed = {peer: at for peer, at in self._closed.items() if peer in self.peers}
        self._silent &= self.peers.keys()
        return [peer for peer, since in self.peers.items() if since == now]

    def hear(self, peer: str, answer: Answer, now: float) -> None:
        """Take note of an answer."""
        if peer in self.peers:
            self._answers[peer] = answer
            self._closed[peer] = now - answer.age
            self._silent.discard(peer)

    def forget(self, peer: str) -> None:
        """Drop the answer of `peer`, and do not wait for it: it cannot be reached, or will not answer."""
        self._answers.pop(peer, None)
        self._silent.add(peer)

    def bar(self, peer: str, reason: str) -> None:
        """Take nothing more from `peer`."""
        self.barred[peer] = reason
        self.peers.pop(peer, None)
        self._answers.pop(peer, None)

    def offers(self, peer: str, offer: Offer) -> bool:
        """True if `peer` offers this image."""
        return peer in self._answers and offer in self._answers[peer].offers

    def _settled(self, now: float, seconds: float = ANSWER_SECONDS) -> bool:
        """True if each awaited peer has answered, cannot answer, or has had `seconds` to answer."""
        return all(
            peer in self._answers or peer in self._silent or now >= self.peers[peer] + seconds
            for peer in self._awaited
        )

    @property
    def _awaited(self) -> Set[str]:
        """The peers whose answers are worth some time."""
        return self.peers.keys()

    def _agreed(self, offer: Offer, reason: str, voters: Iterable[str] = ()) -> Agreement:
        donors = tuple(peer for peer in self.peers if self.offers(peer, offer))
        closed = median_low(self._closed[peer] for peer in donors)
        return Agreement(offer, donors, reason, tuple(voters), closed)

    @property
    def _nobody(self) -> str:
        """Why no peer has answered, one line; empty if a peer has."""
        if not self.peers:
            barred = "; ".join(f"{peer[-8:]}: {why}" for peer, why in self.barred.items())
            unknown = "no other peer of this run is known"
            return f"no other peer can be asked ({barred})" if barred else unknown
        return "" if self._answers else f"none of {count(len(self.peers), 'peer')} has answered"


class UpdateQuery(Answers):
    """The answers on the mean that the group applied to the state `request.wish.after`; chooses the mean to download.

    The peer asks all others. It believes a mean that more than half of its circle offer: the peers that held its state
    in a round, or had a vote on its snapshot. Each peer answers for itself, on an authenticated channel, so any number
    of strangers proves nothing. Liars that are more than half of a circle could also have outvoted the others in that
    round or poll. Peers of the circle that are gone or cannot be reached do not count: else the mean of a group would
    be lost with half of its members. A peer that is silent counts, because it may still be in the round of that mean,
    and answers when that has ended.

    Where a draw decides which peers contribute, or too few places do, these few make a round, and the others may all
    have missed it. Drawn peers belong to the circle, though they may never have met this peer. The peers of the circle
    that are not beyond the state do not count, and the quorum of such a round must offer the mean, but for its members
    that are gone. One member in the circle is enough: the others may have come to the state by a download.
    """

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
