"""The donor's machine: it offers snapshots and means to newcomers, asks its trainer for snapshots, and serves them.

Theory of operation. A donor keeps a newcomer's `Ask` and answers it, and answers again whenever the answer changes,
until the newcomer has finished or has been silent for a while. `wanted` is the next epoch of which newcomers want a
snapshot. The trainer takes the snapshot when it reaches that epoch; training does not wait for it. The donor holds a
snapshot until the next replaces it, and longer while a newcomer downloads it. The donor also keeps the last means, and
makes an image of a mean when a newcomer asks for it. The driver adds the known votes for the mean to the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from equipoise.averaging.matchmaking.messages import MAX_PATIENCE
from equipoise.averaging.state import StateId
from equipoise.averaging.statesync import events, messages
from equipoise.averaging.statesync.chunks import ImageId
from equipoise.averaging.statesync.messages import Answer, Ask, Bulk, Offer, Refusal
from equipoise.averaging.statesync.upload_queue import MAX_SERVINGS, Quota, Serving
from equipoise.averaging.timing import ASKER_SECONDS

KEPT_MEANS = 8
"""Most means that a donor keeps. A peer that is further behind takes a snapshot instead: eight means in int8 are as
large as the image of a state with Adam's two moments."""

MAX_ASKERS = 64
"""Most newcomers served at once: as many as a group has members."""

HOLD_SECONDS, HOLD_SECONDS_PER_CHUNK = 600.0, 8.0
"""Longest time that an image is held for its downloads: a quarter of a link of 4 Mbit/s is enough. Without this limit,
two newcomers that never finish would keep both places, and no other newcomer would get a state."""


@dataclass
class _Mean:
    size: int
    closed: float
    image: ImageId | None = None
    making: bool = False


class Kept:
    """The means of one run, by the state before each."""

    def __init__(self) -> None:
        self._means: OrderedDict[StateId, _Mean] = OrderedDict()

    def keep(
        self, before: StateId, size: int, most: int, read: Collection[bytes], closed: float = 0.0
    ) -> list[StateId]:
        """Keep another mean; returns the states before the means that must go.

        Args:
            before: The state to which the mean was applied; the mean replaces an earlier one from the same state.
            size: Bytes of the mean.
            most: Most bytes of all kept means together. The last mean is kept whatever its size.
            read: Digests of the images that are being downloaded, which go last.
            closed: When the group of its round closed.
        """
        gone = []
        self._means.pop(before, None)
        self._means[before] = _Mean(size, closed)
        while len(self._means) > 1 and (len(self._means) > KEPT_MEANS or self._bytes > most):
            *older, _ = self._means
            unread = (one for one in older if not ((offer := self.offer(one)) and offer.image.digest in read))
            oldest = next(unread, older[0])
            del self._means[oldest]
            gone.append(oldest)
        return gone

    def lacks_image(self, before: StateId) -> bool:
        """True if the mean after the state `before` is kept, and has no image yet."""
        mean = self._means.get(before)
        return mean is not None and mean.image is None

    def begins_image(self, before: StateId) -> bool:
        """Mark that the mean's image is being made; returns False if it is already, or the mean is not kept."""
        mean = self._means.get(before)
        if mean is None or mean.making:
            return False
        mean.making = True
        return True

    def ready(self, before: StateId, image: ImageId) -> None:
        """Set the mean's image, if the mean is still kept."""
        if before in self._means:
            self._means[before].image = image

    def offer(self, before: StateId) -> Offer | None:
        """The mean after the state `before`, if it is kept and has an image."""
        mean = self._means.get(before)
        return None if mean is None or mean.image is None else Offer(before, mean.image)

    def age(self, before: StateId, now: float) -> float:
        """Seconds since the group closed in whose round the mean after the state `before` was made; 0 if it is gone."""
        mean = self._means.get(before)
        return 0.0 if mean is None else min(max(now - mean.closed, 0.0), MAX_PATIENCE)

    def find(self, digest: bytes) -> Offer | None:
        """The mean whose image has this digest."""
        offers = (self.offer(before) for before in self._means)
        return next((offer for offer in offers if offer is not None and offer.image.digest == digest), None)

    @property
    def _bytes(self) -> int:
        return sum(mean.size for mean in self._means.values())


@dataclass
class _Asker:
    """One newcomer.

    Attributes:
        ask: The newcomer's last `Ask`.
        expires: When it is forgotten.
        reading: Digest of the image that it downloads; empty if none yet.
        told: Digest of the oldest image in its last offers, which it may still choose.
    """

    ask: Ask
    expires: float
    reading: bytes = b""
    told: bytes = b""


class Server:
    """One peer's part in one run as a donor."""

    def __init__(self) -> None:
        self._askers: dict[str, _Asker] = {}
        self._snapshots: tuple[Offer, ...] = ()
        self._kept = Kept()
        self._serving = Serving()
        self._epoch: int | None = None
        self._exchanging: StateId | None = None
        self._closed = 0.0
        self._taking: int | None = None
        self._fetching = self._left = False
        self._held_until: dict[bytes, float] = {}
        self._wear = Quota()
        self._now = 0.0
        self._out: list[events.DonorAction] = []

    @property
    def wanted(self) -> int | None:
        """The next epoch of which a newcomer wants a snapshot; None without a wish, or while both places are taken."""
        return min((epoch for peer in self._askers for epoch in self._wishes(peer)), default=None)

    @property
    def deadline(self) -> float:
        """When `Woke` is due."""
        expiries = [asker.expires for asker in self._askers.values()]
        return min([self._serving.deadline(self._now), *expiries])

    @property
    def standing(self) -> str:
        """The service to others, in one line; empty while no newcomer is served or waits."""
        if readers := self._serving.readers:
            epochs = " and ".join(str(offer.state.epoch) for offer in self._snapshots)
            return f"serving the state of epoch {epochs} to {readers} peers"
        if (wanted := self.wanted) is not None:
            return f"{len(self._askers)} peers want the state of epoch {wanted}: waiting for the trainer's snapshot"
        return ""

    def handle(self, event: events.DonorEvent, now: float) -> list[events.DonorAction]:
        """Take an event; return the actions, in order."""
        self._now = now
        match event:
            case events.AskReceived(peer, message):
                if isinstance(message, Ask):
                    self._on_ask(peer, message)
                else:
                    self._on_reading(peer, message)
            case events.PeerLost(peer):
                self._serving.drop(peer)
            case events.EpochReached(epoch):
                self._on_epoch(epoch)
            case events.TrainerLeft():
                self._left = True
            case events.FetchChanged(fetching):
                self._fetching = fetching
            case events.SnapshotTaken(state):
                self._taking = state.epoch
                wished = [peer for peer, one in self._askers.items() if state.epoch in one.ask.wanted]
                self._wear.took(wished, now)
            case events.SnapshotReady(state, image):
                self._on_snapshot(Offer(state, image))
            case events.RoundBegan(before):
                self._exchanging, self._closed = before, now
            case events.RoundOver():
                over, self._exchanging = self._exchanging, None
                if self._has_ended(over):
                    self._answer_those(lambda one: one.ask.after == over)
            case events.MeanKept(before, size, most):
                closed = self._closed if before == self._exchanging else now
                self._out += map(events.Drop, self._kept.keep(before, size, most, self._reading, closed))
                if any(one.ask.after == before for one in self._askers.values()):
                    self._make_image(before)
            case events.MeanReady(before, image):
                self._kept.ready(before, image)
                self._answer_those(lambda one: one.ask.after == before)
            case events.BodySent(peer, busy):
                self._serving.sent(peer, busy, now)
            case events.RoundsSeen(busy):
                self._serving.busy = busy
        for peer in [peer for peer, one in self._askers.items() if now >= one.expires]:
            self._forget(peer)
        self._hold(self._snapshots)
        while body := self._serving.next(now):
            self._out.append(events.SendBody(*body))
        out, self._out = self._out, []
        return out

    # ---- events ----

    def _on_ask(self, peer: str, ask: Ask) -> None:
        asker = self._askers.get(peer)
        if asker is None and len(self._askers) >= MAX_ASKERS:
            reason = f"{MAX_ASKERS} peers are being served already"
            refusal = Refusal(ask.run, ask.ticket, reason)
            self._out += [events.Send(peer, refusal), events.Forget(peer)]
            return
        if asker is None or asker.ask.ticket != ask.ticket:
            self._serving.drop(peer)
            asker = self._askers[peer] = _Asker(ask, self._now)
        asker.ask, asker.expires = ask, self._now + ASKER_SECONDS
        if ask.after is None or self._has_ended(ask.after):
            self._answer(peer, asker)
        else:  # The answer follows when that round has ended, or when the image is made.
            self._make_image(ask.after)

    def _on_reading(self, peer: str, message: messages.AskBulk | messages.Finished) -> None:
        asker = self._askers.get(peer)
        known = asker is not None and asker.ask.ticket == message.ticket
        if isinstance(message, messages.Finished):
            if known:
                self._forget(peer)
            return
        problem = self._serve(peer, asker, message) if asker and known else "that download is not known here"
        if problem:
            self._out.append(events.Send(peer, Refusal(message.run, message.ticket, problem)))

    def _serve(self, peer: str, asker: _Asker, message: messages.AskBulk) -> str:
        """Queue the bodies that a newcomer asks for; returns the reason if it is refused, else an empty string."""
        asker.expires = self._now + ASKER_SECONDS
        held = (one for one in self._snapshots if one.image.digest == message.digest)
        offer = next(held, None) or self._kept.find(message.digest)
        if offer is None:
            return "it holds that image no longer"
        asker.reading = message.digest
        room = self._wear.room(peer, message.digest, offer.image.chunks, self._now)
        if room <= 0:
            return f"it was sent {MAX_SERVINGS} times already"
        name = message.run, message.ticket, message.digest
        bodies: list[Bulk] = [messages.Digests(*name)]
        if isinstance(message, messages.AskChunks):
            chunks = [chunk for chunk in dict.fromkeys(message.chunks) if chunk < offer.image.chunks]
            bodies = [messages.Chunk(*name, chunk) for chunk in chunks]
        self._wear.served(peer, message.digest, self._serving.add(peer, bodies[:room]), self._now)
        return ""

    def _on_epoch(self, epoch: int) -> None:
        def differs(one: _Asker) -> bool:
            return self._has_ended(one.ask.after) or any(wish < epoch for wish in one.ask.wanted)

        before, self._epoch = self._epoch, epoch
        if before != epoch:
            self._answer_those(lambda one: not one.reading and differs(one))

    def _on_snapshot(self, offer: Offer) -> None:
        if self._taking == offer.state.epoch:
            self._taking = None
        self._epoch = max(self._epoch or 0, offer.state.epoch)
        self._hold((offer, *self._snapshots))
        until = self._now + HOLD_SECONDS + HOLD_SECONDS_PER_CHUNK * offer.image.chunks
        held = (one.image.digest for one in self._snapshots)
        self._held_until = {digest: self._held_until.get(digest, until) for digest in held}
        self._answer_those(
            lambda one: one.ask.at_least <= offer.state.epoch and not one.reading and one.ask.after is None
        )

    def _hold(self, offers: tuple[Offer, ...]) -> None:
        """Hold the first of these snapshots, and the last of the others if newcomers download it: more of it has been
        sent. So a donor's memory is bounded to two images."""
        before, read = self._snapshots, self._read
        others = [one for one in offers[1:] if one.image != offers[0].image and one.image.digest in read]
        self._snapshots = (*offers[:1], *others[-1:])
        held = {one.image for one in self._snapshots}
        self._out += [events.Release(one.image) for one in before if one.image not in held]

    def _has_ended(self, after: StateId | None) -> bool:
        """True if no round from this state goes on here, and no image is made of its mean."""
        return after is not None and after != self._exchanging and not self._kept.lacks_image(after)

    def _make_image(self, before: StateId) -> None:
        if self._kept.begins_image(before):
            self._out.append(events.MakeImage(before))

    def _forget(self, peer: str) -> None:
        del self._askers[peer]
        self._serving.drop(peer)
        self._out.append(events.Forget(peer))

    # ---- answers ----

    def _answer_those(self, concerned: Callable[[_Asker], bool]) -> None:
        """Answer the newcomers that `concerned` picks."""
        for peer, asker in self._askers.items():
            if concerned(asker):
                self._answer(peer, asker)

    def _answer(self, peer: str, asker: _Asker) -> None:
        ask, epoch = asker.ask, self._epoch
        noted: tuple[int, ...] = ()
        offers: tuple[Offer, ...] = ()
        age = 0.0
        if ask.after is not None:
            if mean := self._kept.offer(ask.after):
                offers, age = (mean,), self._kept.age(ask.after, self._now)
        else:
            offers = tuple(one for one in self._snapshots if one.state.epoch >= ask.at_least)
            wishes = self._wishes(peer)
            noted = tuple(epoch for epoch in ask.wanted if epoch == self._taking or epoch in wishes)
            if offers:
                asker.told = offers[-1].image.digest
            epoch = None if self._fetching else self._epoch
        answer = Answer(ask.run, ask.ticket, epoch, noted, offers, self._left, age)
        self._out.append(events.Send(peer, answer))

    def _wishes(self, peer: str) -> list[int]:
        """The epochs of which the donor asks its trainer for a snapshot for this newcomer."""
        read = {asker.reading for asker in self._askers.values() if self._holds(asker.reading)}
        full = sum(offer.image.digest in read for offer in self._snapshots) > 1
        worn = self._wear.worn(self._now) or not self._wear.may_wish(peer, self._now)
        if full or worn or self._fetching or self._left:
            return []
        ask = self._askers[peer].ask
        return [epoch for epoch in ask.wanted if self._awaits(ask, epoch)]

    def _awaits(self, ask: Ask, epoch: int) -> bool:
        """True if the trainer may still take a snapshot of `epoch`, and the newcomer can use it."""
        held = any(one.state.epoch == epoch for one in self._snapshots)
        return epoch >= max(ask.at_least, self._epoch or 0) and not held and epoch != self._taking

    @property
    def _reading(self) -> set[bytes]:
        """Digests of the images that newcomers download."""
        return {asker.reading for asker in self._askers.values() if asker.reading}

    @property
    def _read(self) -> set[bytes]:
        """Digests of the held images that newcomers download, or may download as they were just offered them."""
        return {digest for one in self._askers.values() if self._holds(digest := one.reading or one.told)}

    def _holds(self, digest: bytes) -> bool:
        """True if the time to hold this image for its downloads is not over."""
        return self._now < self._held_until.get(digest, float("-inf"))
