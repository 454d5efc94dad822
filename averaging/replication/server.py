"""The donor's machine: it offers snapshots and means to newcomers, asks its trainer for snapshots, and serves them.

Theory of operation. A donor keeps a newcomer's `Ask` and answers it, and answers again whenever the answer changes,
until the newcomer has finished or has been silent for a while. `wanted` is the next epoch of which newcomers want a
snapshot. The trainer takes the snapshot when it reaches that epoch; training does not wait for it. The donor holds a
snapshot until the next replaces it, and longer while a newcomer downloads it. The donor also keeps the last means, and
makes an image of a mean when a newcomer asks for it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from equipoise.averaging.counts import count
from equipoise.averaging.matchmaking.messages import MAX_PATIENCE
from equipoise.averaging.replication import transfer_events as events
from equipoise.averaging.replication.chunks import ImageId
from equipoise.averaging.replication.messages import Answer, Ask, AskItems, Finished, Item, Offer, Refusal
from equipoise.averaging.replication.upload_queue import Serving
from equipoise.averaging.state import StateId
from equipoise.averaging.timing import ASKER_SECONDS

KEPT_MEANS = 256
"""Most means that a donor keeps, of small models: 256 manifests of eight members take 1 MB. Of others, bytes decide."""

OWN_MEANS, OWN_BYTES = 32, 1024 * 1024 * 1024
"""Most means that a donor keeps because its own trainer lacks them, while that downloads a snapshot, and their bytes: a
snapshot is always some rounds old, and needs the means since. Snapshots are larger, by six times with Adam and int8."""

MAX_SNAPSHOTS, SNAPSHOTS_SECONDS = 8, 60.0
"""Most snapshots that newcomers may ask a trainer for, and the time for them: each copies the trainer's memory. The
bound is for all newcomers together, because identities are free; a snapshot is offered to all of them."""

MAX_ASKERS = 64
"""Most newcomers served at once: as many as a group has members."""

HOLD_SECONDS, HOLD_SECONDS_PER_CHUNK = 600.0, 8.0
"""Longest time that an image is held for its downloads: a quarter of a link of 4 Mbit/s is enough. Without this limit,
two newcomers that never finish would keep both places, and no other newcomer would get a state."""


@dataclass
class _Mean:
    """The mean after one state.

    Attributes:
        size: Its bytes.
        closed: When the group of its round closed.
        image: Its image, once that is made.
        making: Whether the driver was asked to make its image.
    """

    size: int
    closed: float
    image: ImageId | None = None
    making: bool = False


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
        self._means: OrderedDict[StateId, _Mean] = OrderedDict()
        self._serving = Serving()
        self._epoch: int | None = None
        self._exchanging: StateId | None = None
        self._closed = 0.0
        self._taking: int | None = None
        self._fetching = self._left = False
        self._held_until: dict[bytes, float] = {}
        self._taken: deque[float] = deque(maxlen=MAX_SNAPSHOTS)
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
            return f"serving the state of epoch {epochs} to {count(readers, 'peer')}"
        if (wanted := self.wanted) is not None:
            want = "1 peer wants" if len(self._askers) == 1 else f"{len(self._askers)} peers want"
            return f"{want} the state of epoch {wanted}: waiting for the trainer's snapshot"
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
            case events.BodySent(peer, busy):
                self._serving.sent(peer, busy, now)
            case events.RoundsSeen(busy):
                self._serving.busy = busy
            case events.RoundBegan() | events.RoundOver() | events.MeanKept() | events.MeanReady():
                self._on_round(event)
            case _:
                self._on_trainer(event)
        for peer in [peer for peer, one in self._askers.items() if now >= one.expires]:
            self._forget(peer)
        self._hold(self._snapshots)
        while body := self._serving.next(now):
            self._out.append(events.SendBody(*body))
        out, self._out = self._out, []
        return out

    # ---- events ----

    def _on_trainer(self, event: events.DonorEvent) -> None:
        match event:
            case events.EpochReached(epoch):
                self._on_epoch(epoch)
            case events.TrainerLeft():
                self._left = True
            case events.FetchChanged(fetching):
                self._fetching = fetching
            case events.SnapshotTaken(state):
                self._taking = state.epoch
                self._taken.append(self._now)
            case events.SnapshotReady(state, image):
                self._on_snapshot(Offer(state, image))

    def _on_round(self, event: events.DonorEvent) -> None:
        match event:
            case events.RoundBegan(before):
                self._exchanging, self._closed = before, self._now
            case events.RoundOver():
                over, self._exchanging = self._exchanging, None
                if self._has_ended(over):
                    self._answer_those(lambda one: one.ask.after == over)
            case events.MeanKept(before, size, most, age):
                closed = self._closed if before == self._exchanging else self._now - age
                self._keep(before, _Mean(size, closed), most)
                if any(one.ask.after == before for one in self._askers.values()):
                    self._make_image(before)
            case events.MeanReady(before, image):
                if mean := self._means.get(before):
                    mean.image = image
                self._answer_those(lambda one: one.ask.after == before)

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

    def _on_reading(self, peer: str, message: AskItems | Finished) -> None:
        asker = self._askers.get(peer)
        known = asker is not None and asker.ask.ticket == message.ticket
        if isinstance(message, Finished):
            if known:
                self._forget(peer)
            return
        problem = self._serve(peer, asker, message) if asker and known else "that download is not known here"
        if problem:
            self._out.append(events.Send(peer, Refusal(message.run, message.ticket, problem)))

    def _serve(self, peer: str, asker: _Asker, message: AskItems) -> str:
        """Queue the items that a newcomer asks for; returns the reason if it is refused, else an empty string."""
        asker.expires = self._now + ASKER_SECONDS
        images = [*(one.image for one in self._snapshots), *(mean.image for mean in self._means.values())]
        image = next((one for one in images if one is not None and one.digest == message.digest), None)
        if image is None:
            return "it holds that image no longer"
        asker.reading = message.digest
        name = message.run, message.ticket, message.digest
        self._serving.add(peer, (Item(*name, item) for item in message.items if item <= image.chunks))
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
        mean = None if after is None else self._means.get(after)
        lacks_image = mean is not None and mean.image is None
        return after is not None and after != self._exchanging and not lacks_image

    def _keep(self, before: StateId, mean: _Mean, most: int) -> None:
        """Keep another mean, in place of an earlier one after the same state, and drop the oldest beyond the bounds.

        All means together take at most `most` bytes, unless this donor's trainer lacks them; the last one is kept
        whatever its size. Means that are being downloaded go last.
        """
        means, read = self._means, self._reading
        means.pop(before, None)
        means[before] = mean
        while len(means) > 1:
            *older, _ = means.items()
            lacks = self._epoch is not None and older[0][0].epoch >= self._epoch
            size = sum(one.size for one in means.values())
            if (len(means) <= KEPT_MEANS and size <= most) or (
                lacks and len(means) <= OWN_MEANS and size <= OWN_BYTES
            ):
                return
            unread = (state for state, one in older if one.image is None or one.image.digest not in read)
            oldest = next(unread, older[0][0])
            del means[oldest]
            self._out.append(events.Drop(oldest))

    def _make_image(self, before: StateId) -> None:
        mean = self._means.get(before)
        if mean is not None and not mean.making:
            mean.making = True
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
            mean = self._means.get(ask.after)
            if mean is not None and mean.image is not None:
                offers = (Offer(ask.after, mean.image),)
                age = min(max(self._now - mean.closed, 0.0), MAX_PATIENCE)
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
        worn = len(self._taken) == MAX_SNAPSHOTS and self._now < self._taken[0] + SNAPSHOTS_SECONDS
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
