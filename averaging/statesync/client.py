"""The newcomer's machine: asks who has what, then downloads from all who have the same.

Theory of operation. It *asks* until most donors agree (`snapshot_quorum`); then it asks one of them for the digests of
the chunks, which the agreed name of the image proves, and all of them for chunks (`chunk_scheduler`), each of which
its digest proves. A donor that sends one wrong byte is barred; one that dies or stalls loses its chunks to the others,
either way at once. If none is left it asks again, and goes on with what it has if the same image is offered. It ends
with the whole image, or, at its timeout, with the reason why there is none. A mean that was missed is had in the same
way, or, as soon as all have answered, not at all (`update_query`). Whether it is the group's is found out when it is
here; if not, all who offer it are barred, and what others offer is tried; as is, at any time, what those offer who are
more to be believed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.answers import Agreement
from equipoise.averaging.statesync.chunk_scheduler import STALL_SECONDS, ChunkScheduler
from equipoise.averaging.statesync.chunks import ImageId
from equipoise.averaging.statesync.events import (
    Allocate,
    AnswerReceived,
    Check,
    Checked,
    ChunkReceived,
    DigestsReceived,
    Fail,
    FetchAction,
    FetchEvent,
    Finish,
    MemoryReady,
    MemoryRefused,
    PeerLost,
    PeersSeen,
    ProtocolBroken,
    Send,
    Withdrew,
)
from equipoise.averaging.statesync.messages import (
    Answer,
    Ask,
    AskChunks,
    AskDigests,
    Bulk,
    Chunk,
    Finished,
    Gone,
    Offer,
    Refusal,
    ToDonor,
)
from equipoise.averaging.statesync.snapshot_quorum import SnapshotQuorum
from equipoise.averaging.statesync.update_query import UpdateQuery

ASK_AGAIN_SECONDS = 1.0
"""Between two asks while nothing is agreed: a lost message costs no more, and donors' epochs are that fresh."""

RENEW_SECONDS = 3.0
"""Between two asks during a download: they find new donors, and tell the old ones to hold the image."""

MAX_NOTES = 4
"""What went wrong last, as far as the reason of the end names it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a newcomer is after.

    Attributes:
        run: The run's name.
        spec: Hash of its RunSpec.
        ticket: 8 random bytes.
        at_least: The first epoch that is of use.
        limit: Most bytes of the image.
        after: A state: it is after the mean that leads on from there, and no snapshot.
        circle: PeerIDs of the peers by whom that state is known, whose offers are tried first. For a snapshot: PeerIDs
            of the only peers to take it from, while any of them is there.
        patient: Where nobody has that mean: whether to wait for those who are not as far.
        proved: Whether the asking peer can tell that mean by its digest, from any donor.
    """

    run: str
    spec: str
    ticket: bytes
    at_least: int
    limit: int
    after: StateId | None = None
    circle: frozenset[str] = frozenset()
    patient: bool = False
    proved: bool = False


class Fetch:
    """One download, from the first question to the last byte.

    Attributes:
        ended: Whether it has finished or failed.
    """

    def __init__(self, request: Request, now: float, timeout: float) -> None:
        self.ended = False
        self._request = request
        self._timeout = timeout
        self._expires = now + timeout
        self._missed = (
            None
            if request.after is None
            else UpdateQuery(request.after, request.circle, request.patient, request.proved)
        )
        self._poll: SnapshotQuorum | UpdateQuery = self._missed or SnapshotQuorum(
            request.at_least, request.circle
        )
        self._agreement: Agreement | None = None
        self._sources: ChunkScheduler | None = None
        self._image: ImageId | None = None
        self._digests_known = False
        self._checking: frozenset[str] = frozenset()
        self._proved = request.after is None
        self._withdrawn = ""
        self._memory = 0
        self._asked_digests: deque[str] = deque(maxlen=1)
        self._digests_until = 0.0
        self._slow: set[str] = set()
        self._ask_at = now + ASK_AGAIN_SECONDS
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._next_change = float("inf")

    @property
    def deadline(self) -> float:
        """When to wake it."""
        if self._checking:
            return float("inf")
        return min(self._expires, self._ask_at, self._next_change)

    @property
    def standing(self) -> str:
        """What it is doing, in one line."""
        what = "state" if self._request.after is None else "mean"
        if self._agreement is None or self._sources is None:
            return f"fetching a {what}: {self._poll.standing}"
        offer, count = self._agreement.offer, len(self._sources.donors)
        done = offer.image.chunks - self._sources.left
        return (
            f"fetching the {what} of epoch {offer.state.epoch}: {done} of {offer.image.chunks} MiB "
            f"from {count} peers ({self._agreement.reason})"
        )

    def expects(self, peer: str, message: Bulk) -> bool:
        """Whether the body of this message of `peer` is wanted."""
        if self.ended or self._agreement is None or message.digest != self._agreement.offer.image.digest:
            return False
        if isinstance(message, Chunk):
            return self._sources is not None and self._sources.expects(peer, message.chunk)
        return not self._digests_known and peer in self._asked_digests

    def handle(self, event: FetchEvent, now: float) -> list[FetchAction]:
        """Take note of an event; return what to do."""
        if self.ended:
            return []
        actions: list[FetchAction] = []
        match event:
            case PeersSeen(peers):
                actions += self._ask(self._poll.see(peers, now))
            case AnswerReceived(peer, message):
                self._on_answer(peer, message, now)
            case PeerLost(peer, reason):
                self._on_loss(peer, reason)
            case MemoryReady(size):
                self._memory = size
            case MemoryRefused(reason):
                self._checking = frozenset()
                return self._fail(reason)
            case Withdrew(reason):
                self._withdrawn = reason
            case Checked(problem):
                self._on_checked(problem)
            case ProtocolBroken(peer, reason):
                self._bar(peer, reason)
            case DigestsReceived():
                self._on_digests(event)
            case ChunkReceived():
                self._on_chunk(event, now)
        return actions + self._advance(now)

    # ---- events ----

    def _on_answer(self, peer: str, message: object, now: float) -> None:
        match message:
            case Answer(ticket=self._request.ticket):
                self._poll.hear(peer, message, now)
                if self._agreement and self._sources and self._poll.offers(peer, self._agreement.offer):
                    self._sources.add(peer)
            case Refusal(ticket=self._request.ticket):
                self._poll.forget(peer)
                self._leave_out(peer, f"refuses: {message.reason}")
            case Gone(ticket=self._request.ticket):
                self._poll.forget(peer)
                self._leave_out(peer, message.reason)

    def _on_loss(self, peer: str, reason: str) -> None:
        if self._sources is not None:
            self._sources.interrupt(peer)
        if peer in self._asked_digests:
            self._digests_until = 0.0
        self._poll.forget(peer)
        self._leave_out(peer, reason)

    def _on_digests(self, event: DigestsReceived) -> None:
        if self._is_current(event.image):
            self._digests_known = self._digests_known or event.genuine
            if not event.genuine:
                self._bar(event.peer, "its list of digests is not that of the image it offered")

    def _on_chunk(self, event: ChunkReceived, now: float) -> None:
        if not self._is_current(event.image) or self._sources is None:
            return
        if not event.genuine:
            self._bar(event.peer, f"chunk {event.chunk} from it has not the digest it should have")
        elif self._sources.expects(event.peer, event.chunk):
            self._sources.receive(event.peer, event.chunk, now)
            self._slow.discard(event.peer)

    def _on_checked(self, problem: str) -> None:
        offered, self._checking = self._checking, frozenset()
        self._proved = not problem
        if problem:
            for peer in sorted(offered):
                self._bar(peer, problem)

    def _is_current(self, image: object) -> bool:
        return self._agreement is not None and self._agreement.offer.image == image

    def _bar(self, peer: str, reason: str) -> None:
        self._poll.bar(peer, reason)
        self._leave_out(peer, reason)

    def _leave_out(self, peer: str, reason: str) -> None:
        known = self._sources is not None and peer in self._sources.donors
        if self._sources is not None:
            self._sources.remove(peer)
        note = f"{peer[-8:]}: {reason}"
        if (known or peer in self._poll.barred) and note not in self._notes:
            self._notes.append(note)

    # ---- what follows ----

    def _advance(self, now: float) -> list[FetchAction]:
        if self._checking:
            return []
        if self._withdrawn:
            return self._fail(self._withdrawn)
        if now >= self._expires:
            return self._fail(f"not within {self._timeout:g} s: {self.standing}")
        actions: list[FetchAction] = []
        if self._agreement is not None and self._sources is not None and not self._sources.donors:
            self._agreement = None
            self._ask_at = now
        if self._agreement is not None and self._outranked(self._agreement.offer, now):
            self._agreement = None
        if self._agreement is None:
            actions += self._seek(now)
        if self._agreement is not None and not self.ended:
            actions += self._download(self._agreement, now)
        if not self.ended and now >= self._ask_at:
            actions += self._ask_all(now)
        self._next_change = float("inf") if self.ended else self._changes_at(now)
        return actions

    def _seek(self, now: float) -> list[FetchAction]:
        agreement = self._poll.agreement(now)
        if agreement is None:
            if hopeless := self._poll.hopeless(now):
                return self._fail(hopeless)
            if self._poll.wish(now):
                self._ask_at = now
            return []
        size, limit = agreement.offer.image.size, self._request.limit
        if size <= limit:
            return self._begin(agreement, now)
        problem = f"expected an image of at most {limit} bytes, {agreement.reason}: {size} bytes"
        if self._request.after is None:
            return self._fail(problem)
        for peer in agreement.donors:
            self._bar(peer, problem)
        return self._seek(now)

    def _outranked(self, offer: Offer, now: float) -> bool:
        """Whether another mean is to be had sooner, or is more likely to be the group's, than that on its way."""
        if self._missed is None or self._sources is None or not self._sources.left:
            return False
        self._note_slow(self._sources, now)
        if self._sources.donors.keys() <= self._slow:
            self._missed.doubt(offer)
        best = self._missed.agreement(now)
        return best is not None and self._missed.rank(best.offer) > self._missed.rank(offer)

    def _note_slow(self, sources: ChunkScheduler, now: float) -> None:
        for peer in sources.stalled(now):
            self._slow.add(peer)
            self._notes.append(f"{peer[-8:]}: nothing came from it for {STALL_SECONDS:g} s")
        if not self._digests_known and now >= self._digests_until:
            self._slow.update(self._asked_digests)

    def _begin(self, agreement: Agreement, now: float) -> list[FetchAction]:
        image = agreement.offer.image
        self._agreement = agreement
        actions: list[FetchAction] = []
        if self._sources is None or image != self._image:
            self._image = image
            self._sources = ChunkScheduler(image.chunks)
            self._digests_known, self._memory = False, 0
            self._slow.clear()
            actions.append(Allocate(image))
        for peer in agreement.donors:
            self._sources.add(peer)
        self._asked_digests.clear()
        self._digests_until = now
        self._ask_at = now  # Whoever noted a wish may forget it.
        return actions

    def _download(self, agreement: Agreement, now: float) -> list[FetchAction]:
        assert self._sources is not None
        if not self._sources.left:
            return self._complete(agreement, self._sources)
        self._note_slow(self._sources, now)
        if not self._digests_known:
            return self._ask_digests(agreement, now)
        if self._memory != agreement.offer.image.size:
            return []
        digest = agreement.offer.image.digest
        return [
            self._say(peer, AskChunks(self._request.run, self._request.ticket, digest, chunks))
            for peer, chunks in self._sources.requests(now)
        ]

    def _ask_digests(self, agreement: Agreement, now: float) -> list[FetchAction]:
        assert self._sources is not None
        asked = self._asked_digests[0] if self._asked_digests else ""
        if now < self._digests_until and asked in self._sources.donors:
            return []
        donors = list(self._sources.donors)
        after = donors.index(asked) + 1 if asked in donors else 0
        if not donors:
            return []
        peer = donors[after % len(donors)]
        self._asked_digests.append(peer)
        self._digests_until = now + STALL_SECONDS
        digest = agreement.offer.image.digest
        return [self._say(peer, AskDigests(self._request.run, self._request.ticket, digest))]

    def _ask_all(self, now: float) -> list[FetchAction]:
        self._ask_at = now + (ASK_AGAIN_SECONDS if self._agreement is None else RENEW_SECONDS)
        return self._ask(list(self._poll.peers))

    def _ask(self, peers: list[str]) -> list[FetchAction]:
        one = self._request
        wanted = self._poll.wanted if self._agreement is None else ()
        return [
            self._say(peer, Ask(one.run, one.ticket, one.spec, one.at_least, wanted, one.after))
            for peer in peers
        ]

    def _changes_at(self, now: float) -> float:
        if self._agreement is None or self._sources is None:
            return self._poll.deadline(now)
        change = self._sources.deadline(now) if self._digests_known else self._digests_until
        return change if self._missed is None else min(change, self._poll.deadline(now))

    # ---- the end ----

    def _complete(self, agreement: Agreement, sources: ChunkScheduler) -> list[FetchAction]:
        offer = agreement.offer
        if self._missed is not None and not self._proved:
            offering = (peer for peer in self._poll.peers if self._poll.offers(peer, offer))
            self._checking = frozenset({*offering, *sources.donors})
            return [Check(self._missed.proofs(offer))]
        reason = "; ".join([agreement.reason, *self._notes])
        finish = Finish(offer.state, offer.image, dict(sources.delivered), agreement.voters, reason)
        return [*self._end(), finish]

    def _fail(self, reason: str) -> list[FetchAction]:
        missed = self._missed
        behind, unheard = (0, 0) if missed is None else (missed.behind, missed.unheard)
        notes = [note for note in self._notes if note not in reason]
        return [*self._end(), Fail("; ".join([reason, *notes]), behind, unheard)]

    def _end(self) -> list[FetchAction]:
        self.ended = True
        self._expires = self._ask_at = self._next_change = float("inf")
        return [
            self._say(peer, Finished(self._request.run, self._request.ticket)) for peer in self._poll.peers
        ]

    def _say(self, peer: str, message: ToDonor) -> FetchAction:
        return Send(peer, message)
