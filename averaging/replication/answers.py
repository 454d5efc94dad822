"""A newcomer's question, the answers of its run's peers, and the peers that have still to answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.replication.messages import Answer, Offer
from equipoise.averaging.state import StateId, Step

ANSWER_SECONDS = 1.0
"""Longest time to wait for an answer; most peers answer within a round trip."""

LONE_SECONDS = 3 * ANSWER_SECONDS
"""Longest time to wait for the others if only one has answered: a channel may have to be opened first."""


Peers = Annotated[frozenset[str], msgspec.Meta(max_length=256)]
"""PeerIDs: as many as a follower remembers."""


class Wish(msgspec.Struct, frozen=True):
    """What a newcomer looks for: a snapshot or, given `after`, a mean that it missed.

    Attributes:
        at_least: The first epoch that is of use, 0 to `MAX_EPOCH`.
        limit: Most bytes of a snapshot.
        after: The state to which the group applied the mean.
        circle: PeerIDs of the peers that held that state: more than half of them must have signed the mean. Empty if
            this peer knows none. For a snapshot: PeerIDs of the only peers to take it from, while any is there.
        barred: PeerIDs of the peers whose last snapshot did not fit the newcomer's model: they are not asked.
        patient: Whether to wait for the peers that are not as far, if no other peer has that mean.
        proof: Whether only the chain of means from that state is wanted.
        strict: Whether a snapshot is taken from no other peer than those of the circle.
    """

    at_least: int = 0
    limit: int = 0
    after: StateId | None = None
    circle: Peers = frozenset()
    barred: Peers = frozenset()
    patient: bool = False
    proof: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A newcomer's request.

    Attributes:
        run: The run's name.
        spec: Hash of its RunSpec.
        ticket: 8 random bytes.
        wish: What it looks for.
        follows: Whether the asking peer has no place in the group, and waits for the mean until others are beyond it.
    """

    run: str
    spec: str
    ticket: bytes
    wish: Wish
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

    The peer asks all others. It believes a mean whose votes prove it (`chain`), from any donor, and first from peers of
    its circle: other donors may offer other bytes beside the same votes, which no digest of the chain proves before
    they are here. A peer that is silent may still be in the round of that mean, and answers when that has ended.

    Attributes:
        path: The states to which a chain of means leads from that state, as far as answers have proved it.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        assert request.wish.after is not None, "it asks for a mean"
        self.path: tuple[Step, ...] = ()
        self._after = request.wish.after
        self._request = request
        self._circle = request.wish.circle
        self._proved: set[str] = set()

    def prove(self, peer: str, path: tuple[Step, ...]) -> None:
        """Note the states to which the chain leads that `peer` has handed out."""
        self._proved |= {peer} if path else set()
        self.path = max(self.path, path, key=len)

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

        def trust(offer: Offer) -> tuple[int, int, bytes]:
            return sum(self.offers(peer, offer) for peer in self._circle), tally[offer], offer.image.digest

        best = max(tally, key=trust, default=None)
        if best is None or self._request.wish.proof:
            return None
        return self._agreed(best, f"{tally[best]} of {count(len(self.peers), 'peer')} offer it")

    def hopeless(self, now: float) -> str:
        """Why the mean cannot come, one line; empty while it may come."""
        wish = self._request.wish
        if wish.proof and self.path:
            return f"a chain of means leads to epoch {self.path[-1].state.epoch}"
        comes = not self.path if self._request.follows else wish.patient and self.behind > 0
        return "" if comes or not self._settled(now, LONE_SECONDS) else self.standing

    def wish(self, now: float) -> bool:
        """Returns False: a mean is kept or not, so there are no epochs to wish for."""
        return False

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
        what = f"the mean after epoch {self._after.epoch}"
        offering = sum(self._offer_in(one) is not None for one in self._answers.values())
        if not offering:
            return f"none of {count(len(self._answers), 'peer')} that answered keeps {what}"
        held = f"the {count(len(self._circle), 'peer')} that held this peer's state"
        lacks = f", which lacks the votes of most of {held}" if not self._tally else ""
        return f"{offering} of {count(len(self._answers), 'peer')} offer {what}{lacks}"

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
        proved = (one for peer, one in self._answers.items() if peer in self._proved)
        return Counter(offer for one in proved if (offer := self._offer_in(one)))
