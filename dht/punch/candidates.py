"""Messages of two peers that punch a hole: where their connections come from, and when to connect.

Messages are msgpack, bounded, and checked before use; a peer does not try every place that a stranger names.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec

from equipoise.dht import sanitize
from equipoise.dht.dialpolicy import Place
from equipoise.dht.sanitize import printable
from equipoise.dht.state import PROTOCOL_VERSION

MIN_PORT = 1024
"""Lowest port that a peer may name: routers give outgoing connections no lower port; a service would be there."""

MAX_INSIDE = 2
"""Most places inside. A member that lies can have one more first packet than this sent to this peer's neighbours."""

_Told = tuple[Annotated[str, msgspec.Meta(max_length=45)], Annotated[int, msgspec.Meta(ge=1, le=65535)]]
PUNCH_PROTOCOL = f"/equipoise/{PROTOCOL_VERSION}/punch"
MAX_MESSAGE_BYTES = 1024
"""Longest message; three IPv6 addresses, or a reason, take less than half of it."""
MAX_REASON_CHARACTERS = 160


class Candidates(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """The places that one peer's connections come from; the two sides of a punch exchange them first.

    Attributes:
        outside: The place that public peers see: its router's.
        inside: The places that its own machine and its neighbours see.
        steady: Whether its router, as far as is known, gives every destination the same port.
    """

    outside: _Told
    inside: Annotated[tuple[_Told, ...], msgspec.Meta(max_length=MAX_INSIDE)] = ()
    steady: bool = True


def judge(seen: Iterable[Place], inside: Iterable[Place]) -> Candidates:
    """Return this peer's places: where public peers have `seen` its connections come from, and the places `inside`.

    Most observers must agree on the address: otherwise a lying observer could make peers connect to any host. Raises
    ConnectionError with the reason if no observer answered, or they do not agree.
    """
    seen = list(seen)
    # A neighbour sees an inside address, which is of no use beyond the router.
    outside = [place for place in seen if ipaddress.ip_address(place[0]).is_global] or seen
    if not outside:
        raise ConnectionError("no public peer has told where its connections come from")
    [(host, votes)] = Counter(host for host, _ in outside).most_common(1)
    if 2 * votes <= len(outside):
        told = " and ".join(sorted({host for host, _ in outside}))
        raise ConnectionError(f"public peers do not agree where its connections come from: {told}")
    [(place, alike)] = Counter(place for place in outside if place[0] == host).most_common(1)
    return Candidates(place, tuple(dict.fromkeys(inside))[:MAX_INSIDE], steady=2 * alike > votes)


def targets(own: Candidates, theirs: Candidates) -> tuple[Place, ...]:
    """Return where the other peer may be found, the likeliest first; empty if it names nothing worth a packet.

    If both peers are behind one router (one public address), the inside places are tried too. Private addresses are
    tried only if this peer's own address is private. One side's port must be known. The other side's may change: a
    router that filters by address only lets its connection in from any port (RFC 5382, section 4.3).
    """
    found = []
    if (own.steady or theirs.steady) and _alike(own.outside, theirs.outside):
        found = [theirs.outside]
    if own.outside[0] == theirs.outside[0]:
        found = [place for place in theirs.inside if any(_alike(one, place) for one in own.inside)] + found
    foreign = (place for place in dict.fromkeys(found) if place not in (own.outside, *own.inside))
    return tuple(place for place in foreign if place[1] >= MIN_PORT)


def obstacle(own: Candidates, theirs: Candidates) -> str:
    """Return in words what is known to stand between the two; empty if nothing is."""
    unsteady = [whose for whose, one in (("this", own), ("the other", theirs)) if not one.steady]
    if not unsteady:
        return ""
    return f"{' and '.join(unsteady)} side's router gives every destination another port"


def _alike(own: Place, theirs: Place) -> bool:
    here, there = ipaddress.ip_address(own[0]), ipaddress.ip_address(theirs[0])
    if there.is_multicast or there.is_unspecified or here.version != there.version:
        return False
    return (here.is_global, here.is_loopback) == (there.is_global, there.is_loopback)


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Sent before a try: the receiver sends it back at once, which measures the round trip."""


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """The receiver connects now; the author connects when this message should have arrived."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The author gives up before it has tried."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)]


Message = Candidates | Probe | Go | End

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes) -> Message:
    """Read a stranger's message; raises Malformed if it is no message, or breaks a bound."""
    message = sanitize.decode(_decoder, data, MAX_MESSAGE_BYTES)
    try:
        for host, _ in (message.outside, *message.inside) if isinstance(message, Candidates) else ():
            if ipaddress.ip_address(host) and "%" in host:
                raise ValueError("expected addresses without a zone")
    except ValueError as error:
        raise sanitize.Malformed(f"malformed message: {printable(str(error))}") from None
    return message
