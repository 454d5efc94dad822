"""Builders for tests of a transfer's machines: what newcomers ask and donors answer."""

from __future__ import annotations

from equipoise.averaging.state import StateId
from equipoise.averaging.statesync.chunks import CHUNK_BYTES, ImageId
from equipoise.averaging.statesync.events import BodyReceived
from equipoise.averaging.statesync.messages import Answer, Ask, Chunk, Digests, Offer

RUN, SPEC, TICKET = "run/step", "5" * 64, b"ticket.."


def offer_of(epoch: int, kind: int = 0, chunks: int = 3) -> Offer:
    image = ImageId(bytes([kind, epoch % 256]).ljust(32, b"i"), chunks * CHUNK_BYTES)
    return Offer(StateId(epoch, f"{epoch:064x}"), image)


def ask(at_least: int = 0, wanted: tuple[int, ...] = (), ticket: bytes = TICKET) -> Ask:
    return Ask(RUN, ticket, SPEC, at_least, wanted)


def answer(epoch: int | None, *offers: Offer, noted: tuple[int, ...] = (), ticket: bytes = TICKET) -> Answer:
    return Answer(RUN, ticket, epoch, noted, offers)


def digests_came(peer: str, offer: Offer, genuine: bool = True) -> BodyReceived:
    """The digests of what `peer` offers."""
    return BodyReceived(peer, Digests(RUN, TICKET, offer.image.digest), genuine)


def chunk_came(peer: str, offer: Offer, chunk: int, genuine: bool = True) -> BodyReceived:
    """A chunk of what `peer` offers."""
    return BodyReceived(peer, Chunk(RUN, TICKET, offer.image.digest, chunk), genuine)
