"""Chooses the image that a newcomer takes, and the epoch that it asks its donors for, from their answers alone.

A newcomer takes an image if most of the peers that hold a state offer it; a single peer is most. After some patience it
also takes an image that two offer, if fewer peers offer another of the same epoch and most peers have reached that
epoch. One liar among three changes nothing. If there are two peers and they differ, neither is believed.

Donors that stand in different epochs take different snapshots. So the newcomer asks all donors for an epoch that is
still ahead: the next after the epoch where most stand. If steps are so fast that this epoch is over when the wish
arrives, the margin doubles. If steps are so slow that the epoch is long in coming, the newcomer asks for the present
epoch too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from equipoise.averaging.counts import count
from equipoise.averaging.replication.answers import ANSWER_SECONDS, LONE_SECONDS, Agreement, Answers
from equipoise.averaging.replication.messages import Answer, Offer
from equipoise.averaging.state import MAX_EPOCH

PATIENCE_SECONDS = 5.0
"""Longest time that donors may take to fulfil a wish after the first donor did: to copy and digest an image."""

STUCK_SECONDS = 30.0
"""Longest time that a peer whose epoch does not change has a vote while another is ahead by `STUCK_EPOCHS`: its trainer
hangs. (The record of a peer whose daemon has died has expired by then.) This applies only while no more peers are stuck
than offer the image: if most peers stand still, steps just take longer."""

STUCK_EPOCHS = 2
"""Fewest epochs that a stuck peer without a vote is behind. A slow peer is one epoch behind a liar at once."""

LAG_EPOCHS = 8
"""Most epochs that a voter is behind the epoch that a newcomer asks for: a peer further behind is a newcomer itself."""

SLOW_SECONDS = 2.0
"""Longest step in which a newcomer asks for the next epoch only. In a longer one it asks for the present epoch too."""

FIRST_REST_SECONDS, MAX_REST_SECONDS = 1.0, 30.0
"""First and longest time between two wishes after the donors' snapshots differed. It doubles each time, because each
wish costs the donors a snapshot."""

MAX_MARGIN = 64
"""Most epochs between the donors' epoch and the epoch in a wish: at 10 ms a step, more than half a second."""


class SnapshotQuorum(Answers):
    """The answers on snapshots of epoch `at_least` and later.

    Only the peers `among` have a vote while one of these is there whose trainer has not left, or always, if `strict`.
    All others that offer the same image are donors too: its digest proves every byte.
    """

    def __init__(self, at_least: int, among: frozenset[str] = frozenset(), strict: bool = False) -> None:
        super().__init__()
        self._strict = strict
        self._at_least = at_least
        self._among = among
        self._left: set[str] = set()
        self._moved: dict[str, tuple[int | None, float]] = {}
        self._since: dict[Offer, float] = {}
        self._margin = 1
        self._rest = FIRST_REST_SECONDS
        self._wished_at = 0.0

    def see(self, peers: tuple[str, ...], now: float) -> list[str]:
        """See `Answers`."""
        new = super().see(peers, now)
        self._left &= self.peers.keys()
        self._moved = {peer: moved for peer, moved in self._moved.items() if peer in self.peers}
        return new

    def hear(self, peer: str, answer: Answer, now: float) -> None:
        """See `Answers`. A donor whose trainer has left votes only if it holds a snapshot of use."""
        if answer.left and not any(offer.state.epoch >= self._at_least for offer in answer.offers):
            self._left.add(peer)
            self.forget(peer)
            return
        self._left.discard(peer)
        super().hear(peer, answer, now)
        if peer in self.peers:
            if peer not in self._moved or self._moved[peer][0] != answer.epoch:
                self._moved[peer] = (answer.epoch, now)
            for offer in answer.offers:
                self._since.setdefault(offer, now)
            offered = {offer for one in self._answers.values() for offer in one.offers}
            self._since = {offer: since for offer, since in self._since.items() if offer in offered}

    def hopeless(self, now: float) -> str:
        """Why no snapshot can come, one line: no known peer holds one or may take one. Empty if one may come."""
        if not self.peers:
            return self._nobody
        if not self._awaited:
            return "none of the peers that this peer has trained with is there"
        left = self._awaited <= self._left
        return "all known peers have left the run, and hold no snapshot" if left else ""

    def agreement(self, now: float) -> Agreement | None:
        """Return the image to download; None while the answers do not decide it."""
        voters = list(self._voters)
        tally = Counter(offer for one in self._voters.values() for offer in one.offers if self._useful(offer))
        if not tally:
            return None
        offer = max(tally, key=lambda one: (tally[one], one.state.epoch, one.image.digest))
        offering = tally[offer]
        patience = ANSWER_SECONDS if offering > 1 else LONE_SECONDS
        if 2 * offering <= len(self._awaited) and not self._settled(now, patience):
            return None
        moving = [peer for peer in voters if not self._stuck(peer, offer.state.epoch, now)]
        # If most peers stand still, steps take long, and the few that are ahead may lie about their epoch.
        if len(voters) - len(moving) <= offering:
            voters = moving
        if 2 * offering > len(voters):
            why = f"{offering} of {count(len(voters), 'peer')} with a state offer it"
            return self._agreed(offer, why, self._heard_or_late)
        others = [n for one, n in tally.items() if one.state.epoch == offer.state.epoch and one != offer]
        if offering < 2 or offering <= max(others, default=0) or now < self._since[offer] + PATIENCE_SECONDS:
            return None
        # A peer below this epoch may still offer another image, so two peers that invent a future epoch do not win.
        if 2 * sum(self._has_reached(peer, offer) for peer in voters) <= len(voters):
            return None
        why = f"{count(offering, 'peer')} of {len(self._voters)} offer it, the others none in time"
        return self._agreed(offer, why, self._heard_or_late)

    def wish(self, now: float) -> bool:
        """Choose the epochs to ask for; returns whether they have changed."""
        if not self._answers or not self._settled(now):
            return False
        epochs = sorted(one.epoch for one in self._voters.values() if one.epoch is not None)
        # The median: one liar must not make all the others wait for an epoch that never comes.
        present = epochs[len(epochs) // 2] if epochs else 0
        before = self.wanted
        if not before:
            self._wish_for(present + 1 if epochs else self._at_least, now)
        elif self._missed(before[0]):
            # Donors in different epochs may agree on the next one. Donors that differ in the same epoch hardly will.
            if self._differ(before[0]) or self._margin == MAX_MARGIN:
                if now < self._wished_at + self._rest:
                    return False
                self._rest = min(2 * self._rest, MAX_REST_SECONDS)
            self._margin = min(2 * self._margin, MAX_MARGIN)
            self._wish_for(present + self._margin, now)
        elif epochs and now >= self._wished_at + SLOW_SECONDS and self._at_least <= present < before[0]:
            self.wanted = (before[0], present)
        return self.wanted != before

    def _wish_for(self, epoch: int, now: float) -> None:
        self.wanted = (min(max(self._at_least, epoch), MAX_EPOCH),)
        self._wished_at = now

    @property
    def standing(self) -> str:
        """The answers or snapshots for which the newcomer waits, in one line."""
        if self._nobody:
            return self._nobody
        voters = self._voters
        if not voters:
            heard = f"{len(self._answers)} of {count(len(self.peers), 'peer')} answered"
            return f"{heard}, and none holds a state of use"
        useful = sum(any(map(self._useful, one.offers)) for one in voters.values())
        offering = f"{useful} of {count(len(voters), 'peer')} with a state offer"
        if useful:
            return f"{offering} one, and they do not agree"
        wanted = self.wanted[0] if self.wanted else f"{self._at_least} or later"
        return f"{offering} a snapshot of epoch {wanted}"

    @property
    def _awaited(self) -> Set[str]:
        """The peers that have a vote; see the class."""
        among = self._among & self.peers.keys()
        return among if self._strict else among - self._left or self.peers.keys()

    @property
    def _voters(self) -> dict[str, Answer]:
        """Answers of the peers whose state is of use, or soon will be: newcomers at their first epoch do not vote."""
        least, awaited = self._at_least - LAG_EPOCHS, self._awaited
        return {
            peer: one
            for peer, one in self._answers.items()
            if peer in awaited and (one.offers or (one.epoch is not None and one.epoch >= least))
        }

    @property
    def _heard_or_late(self) -> Set[str]:
        # Late peers count as voters too, so that the peers which answered first are not all. This gives liars no new
        # power: if they are most, they could also have answered in time and outvoted the others.
        return self._voters.keys() | (self._awaited - self._answers.keys() - self._silent)

    def _useful(self, offer: Offer) -> bool:
        return offer.state.epoch >= self._at_least

    def _missed(self, epoch: int) -> bool:
        """True if no image of that epoch can win a majority: too few peers will offer one, or their images differ."""
        coming, voters = 0, self._voters
        tally: Counter[Offer] = Counter()
        for answer in voters.values():
            own = [offer for offer in answer.offers if offer.state.epoch == epoch]
            tally.update(own)
            coming += not own and (epoch in answer.noted or answer.epoch is None or answer.epoch <= epoch)
        return voters != {} and coming + max(tally.values(), default=0) <= len(voters) // 2

    def _stuck(self, peer: str, epoch: int, now: float) -> bool:
        """True if a peer has stood still while others went on to `epoch`."""
        stands, since = self._moved[peer]
        behind = stands is not None and stands + STUCK_EPOCHS <= epoch
        return behind and now >= since + STUCK_SECONDS

    def _has_reached(self, peer: str, offer: Offer) -> bool:
        """True if a peer offers it, or has reached its epoch without offering it."""
        epoch = self._answers[peer].epoch
        return self.offers(peer, offer) or (epoch is not None and epoch >= offer.state.epoch)

    def _differ(self, epoch: int) -> bool:
        offers = {offer for one in self._voters.values() for offer in one.offers}
        return sum(offer.state.epoch == epoch for offer in offers) > 1
