"""The newcomer's machine: it asks the donors for their offers, then downloads one image from all its donors.

Theory of operation. A newcomer *asks* until most donors agree (`snapshot_quorum`). Then it asks one donor for the
digests of the chunks, which the agreed name of the image proves. It asks all donors for chunks (`ChunkScheduler`); a
digest proves each chunk. A donor that sends a wrong byte is barred at once. If a donor dies or stalls, the others are
asked for its chunks at once. If no donor is left, the newcomer asks again, and keeps its chunks if the same image is
offered. It ends with the whole image or, at its timeout, with the reason why it has none.

A newcomer gets a mean that it missed in the same way, or learns once the donors have answered that it cannot have it
(`UpdateQuery`).
"""

from __future__ import annotations

from collections import deque

import msgspec

from equipoise.averaging.counts import count
from equipoise.averaging.outcome import FetchOutcome
from equipoise.averaging.replication import messages
from equipoise.averaging.replication import transfer_events as events
from equipoise.averaging.replication.answers import Agreement, Request, UpdateQuery
from equipoise.averaging.replication.chunks import CHUNK_BYTES, ChunkScheduler, ImageId
from equipoise.averaging.replication.messages import Item, Offer
from equipoise.averaging.replication.snapshot_quorum import SnapshotQuorum
from equipoise.averaging.replication.transfer_events import FetchAction, FetchEvent, Finish
from equipoise.averaging.timing import RENEW_SECONDS, STALL_SECONDS

ASK_AGAIN_SECONDS = 1.0
"""Longest time between two asks before the donors agree: the newcomer's view of their epochs is no older."""

LOOK_SECONDS = 0.25
"""Time between two looks at the answers, while the donors do not agree: time alone may decide."""

MAX_NOTES = 4
"""Most mishaps that the reason of the result names: the last ones."""


class Fetch:
    """One download, from the first question to the last byte.

    Attributes:
        ended: Whether it is over.
    """

    def __init__(self, request: Request, now: float, timeout: float) -> None:
        self.ended = False
        self._request = request
        self._began, self._expires = now, now + timeout
        self._poll: SnapshotQuorum | UpdateQuery = SnapshotQuorum(
            request.wish.at_least, request.wish.circle, request.wish.strict
        )
        if request.wish.after is not None:
            self._poll = UpdateQuery(request)
        self._poll.barred |= dict.fromkeys(request.wish.barred, "its last image did not fit")
        self._agreement: Agreement | None = None
        self._sources = ChunkScheduler(())
        self._image: ImageId | None = None
        self._digests_known = False
        self._memory = 0
        self._ask_at = now + ASK_AGAIN_SECONDS
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._next_change = float("inf")
        self._out: list[FetchAction] = []

    @property
    def deadline(self) -> float:
        """When `Woke` is due."""
        return float("inf") if self.ended else min(self._expires, self._ask_at, self._next_change)

    @property
    def standing(self) -> str:
        """The present activity, in one line."""
        what = "state" if self._request.wish.after is None else "mean"
        if self._agreement is None:
            return f"fetching a {what}: {self._poll.standing}"
        offer, donors = self._agreement.offer, count(len(self._sources.donors), "peer")
        done = offer.image.chunks - self._sources.left if self._digests_known else 0
        return (
            f"fetching the {what} of epoch {offer.state.epoch}: {done} of {offer.image.chunks} MiB "
            f"from {donors} ({self._agreement.reason})"
        )

    @property
    def _missed(self) -> UpdateQuery | None:
        """The question, if this newcomer looks for a mean that it missed."""
        return self._poll if isinstance(self._poll, UpdateQuery) else None

    def expects(self, peer: str, message: Item) -> bool:
        """True if the newcomer wants the body of this message of `peer`."""
        if self.ended or self._agreement is None or message.digest != self._agreement.offer.image.digest:
            return False
        return self._sources.expects(peer, message.item)

    def handle(self, event: FetchEvent, now: float) -> list[FetchAction]:
        """Take an event; return the actions, in order."""
        if self.ended:
            return []
        match event:
            case events.PeersSeen(peers):
                self._ask(self._poll.see(peers, now))
            case events.AnswerReceived(peer, message):
                self._on_answer(peer, message, now)
            case events.BodyReceived(peer, message, genuine):
                self._on_body(peer, message, genuine, now)
            case events.PeerLost(peer, reason):
                self._lose(peer, reason)
            case events.MemoryReady(size):
                self._memory = size
            case events.Withdrew(reason):
                self._fail(reason, now)
            case events.ProtocolBroken(peer, reason):
                self._bar(peer, reason)
        if not self.ended:
            self._advance(now)
        out, self._out = self._out, []
        return out

    # ---- events ----

    def _on_answer(self, peer: str, message: messages.ToNewcomer, now: float) -> None:
        if message.ticket != self._request.ticket:
            return
        match message:
            case messages.Answer():
                self._poll.hear(peer, message, now)
                if self._agreement and self._poll.offers(peer, self._agreement.offer):
                    self._sources.add(peer)
            case messages.Refusal(reason=reason):
                self._lose(peer, f"refuses: {reason}")

    def _on_body(self, peer: str, message: Item, genuine: bool, now: float) -> None:
        if not self.expects(peer, message) or self._image is None:
            return
        if not genuine:
            what = f"chunk {message.item}" if message.item else "the list of digests"
            self._bar(peer, f"{what} from it has not the digest it should have")
            return
        self._sources.receive(peer, message.item, now)
        if not self._digests_known:
            self._digests_known = True
            self._sources = ChunkScheduler(range(1, self._image.chunks + 1), self._sources.donors)

    def _lose(self, peer: str, reason: str) -> None:
        self._poll.forget(peer)
        self._leave_out(peer, reason)

    def _bar(self, peer: str, reason: str) -> None:
        self._poll.bar(peer, reason)
        self._leave_out(peer, reason)

    def _leave_out(self, peer: str, reason: str) -> None:
        known = self._sources.remove(peer)
        note = f"{peer[-8:]}: {reason}"
        if (known or peer in self._poll.barred) and note not in self._notes:
            self._notes.append(note)

    # ---- what follows ----

    def _advance(self, now: float) -> None:
        if now >= self._expires:
            self._fail(f"not within {self._expires - self._began:g} s: {self.standing}", now)
            return
        if self._agreement is not None and not self._sources.donors:
            self._agreement = None
            self._ask_at = now
        if self._agreement is not None and self._outranked(self._agreement.offer, now):
            self._agreement = None
        if self._agreement is None:
            self._seek(now)
        if self._agreement is not None and not self.ended:
            self._download(self._agreement, now)
        if not self.ended and now >= self._ask_at:
            self._ask_at = now + (ASK_AGAIN_SECONDS if self._agreement is None else RENEW_SECONDS)
            self._ask(list(self._poll.peers))
        seeks = self._agreement is None
        self._next_change = now + LOOK_SECONDS if seeks else self._sources.deadline(now)

    def _seek(self, now: float) -> None:
        agreement = self._poll.agreement(now)
        if agreement is None:
            if hopeless := self._poll.hopeless(now):
                self._fail(hopeless, now)
            elif self._poll.wish(now):
                self._ask_at = now
            return
        size, limit = agreement.offer.image.size, self._request.wish.limit
        if size <= limit:
            self._begin(agreement, now)
        else:
            problem = f"expected an image of at most {limit} bytes, {agreement.reason}: {size} bytes"
            self._fail(problem, now)

    def _outranked(self, offer: Offer, now: float) -> bool:
        """True if another mean is more likely to be the group's than the mean on its way."""
        best = self._missed.agreement(now) if self._missed and self._sources.left else None
        return best is not None and best.offer != offer

    def _begin(self, agreement: Agreement, now: float) -> None:
        image = agreement.offer.image
        self._agreement = agreement
        if image != self._image:
            self._image = image
            self._sources = ChunkScheduler([0])
            self._digests_known, self._memory = False, 0
            self._out.append(events.Allocate(image))
        for peer in agreement.donors:
            self._sources.add(peer)
        self._ask_at = now  # The new ask has no wishes: donors may forget the earlier ones.

    def _download(self, agreement: Agreement, now: float) -> None:
        if not self._sources.left:
            self._complete(agreement, now)
            return
        for peer in self._sources.stalled(now):
            self._notes.append(f"{peer[-8:]}: nothing came from it for {STALL_SECONDS:g} s")
        image = agreement.offer.image
        if self._memory == image.size or not self._digests_known:
            for peer, items in self._sources.requests(now):
                ask = messages.AskItems(self._request.run, self._request.ticket, image.digest, items)
                self._out.append(events.Send(peer, ask))

    def _ask(self, peers: list[str]) -> None:
        one = self._request
        wanted = self._poll.wanted if self._agreement is None else ()
        ask = messages.Ask(one.run, one.ticket, one.spec, one.wish.at_least, wanted, one.wish.after)
        self._out += [events.Send(peer, ask) for peer in peers]

    # ---- the end ----

    def _complete(self, agreement: Agreement, now: float) -> None:
        size, delivered = agreement.offer.image.size, self._sources.delivered.items()
        outcome = FetchOutcome(
            ok=True,
            reason="; ".join([agreement.reason, *self._notes]),
            state=agreement.offer.state,
            size=size,
            sources={peer: min(chunks * CHUNK_BYTES, size) for peer, chunks in delivered},
            seconds=now - self._began,
            voters=agreement.voters,
            age=max(now - agreement.closed, 0.0) if self._missed else 0.0,
        )
        self._end(outcome)

    def _fail(self, reason: str, now: float) -> None:
        reason = "; ".join([reason, *(note for note in self._notes if note not in reason)])
        outcome = FetchOutcome(ok=False, reason=reason, seconds=now - self._began)
        if (one := self._missed) is not None:
            told = {"behind": one.behind, "unheard": one.unheard, "beyond": one.beyond}
            outcome = msgspec.structs.replace(outcome, **told)
        self._end(outcome)

    def _end(self, outcome: FetchOutcome) -> None:
        self.ended = True
        bye = messages.Finished(self._request.run, self._request.ticket)
        self._out += [*(events.Send(peer, bye) for peer in self._poll.peers), Finish(outcome)]
