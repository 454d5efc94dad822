"""Builders for tests of a transfer's machines: what newcomers ask and donors answer."""

from __future__ import annotations

from equipoise.averaging.replication.chunks import CHUNK_BYTES, ImageId
from equipoise.averaging.replication.messages import Answer, Ask, Item, Offer
from equipoise.averaging.replication.transfer_events import BodyReceived
from equipoise.averaging.state import StateId

RUN, SPEC, TICKET = "run/step", "5" * 64, b"ticket.."


def offer_of(epoch: int, kind: int = 0, chunks: int = 3) -> Offer:
    image = ImageId(bytes([kind, epoch % 256]).ljust(32, b"i"), chunks * CHUNK_BYTES)
    return Offer(StateId(epoch, f"{epoch:064x}"), image)


def ask(at_least: int = 0, wanted: tuple[int, ...] = (), ticket: bytes = TICKET) -> Ask:
    return Ask(RUN, ticket, SPEC, at_least, wanted)


def answer(epoch: int | None, *offers: Offer, noted: tuple[int, ...] = (), ticket: bytes = TICKET) -> Answer:
    return Answer(RUN, ticket, epoch, noted, offers)


def item_came(peer: str, offer: Offer, item: int, genuine: bool = True) -> BodyReceived:
    """An item of what `peer` offers: the list of digests, 0, or a chunk."""
    return BodyReceived(peer, Item(RUN, TICKET, offer.image.digest, item), genuine)
