"""What two peers say to each other, over a relay, to punch a hole: msgpack, bounded, checked before it is believed."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from equipoise.dht import msgpack_guard
from equipoise.dht.escaping import printable
from equipoise.dht.punch.places import MAX_INSIDE, Places
from equipoise.dht.state import PROTOCOL_VERSION

PUNCH_PROTOCOL = f"/equipoise/{PROTOCOL_VERSION}/punch"
MAX_MESSAGE_BYTES = 1024
"""Three IPv6 addresses, or a reason, take less than half."""
MAX_REASON_CHARACTERS = 160
MAX_TRIES = 3
"""As in DCUtR: what does not come about in three tries does not in thirty."""

_Host = Annotated[str, msgspec.Meta(max_length=45)]
_Place = tuple[_Host, Annotated[int, msgspec.Meta(ge=1, le=65535)]]
_Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_TRIES)]


class Malformed(ValueError):
    """Bytes that are no message."""


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Where the author's connections come from (`places.Places`); the other side answers with its own."""

    outside: _Place
    inside: Annotated[tuple[_Place, ...], msgspec.Meta(max_length=MAX_INSIDE)] = ()
    steady: bool = True

    @property
    def places(self) -> Places:
        """The same as a value."""
        return Places(self.outside, self.inside, self.steady)


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Before try `number`: answer at once, so that the way there and back is known."""

    number: _Number


class Echo(msgspec.Struct, frozen=True, array_like=True, tag="echo"):
    """The answer to a probe."""

    number: _Number


class Go(msgspec.Struct, frozen=True, array_like=True, tag="go"):
    """Connect now; the author does so when this should have arrived."""

    number: _Number


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The author has a channel, if there is no reason; else it gives up."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)] = ""


Message = Offer | Probe | Echo | Go | End

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode(data: bytes) -> Message:
    """Read a stranger's message.

    Raises:
        Malformed: It is none, or breaks a bound.
    """
    try:
        msgpack_guard.check(data, MAX_MESSAGE_BYTES)
        message: Message = _decode(data)
        for host, _ in (message.outside, *message.inside) if isinstance(message, Offer) else ():
            if ipaddress.ip_address(host) and "%" in host:
                raise ValueError("expected addresses without a zone")
    except (msgspec.MsgspecError, ValueError) as error:
        raise Malformed(f"malformed message: {printable(str(error))}") from None
    return message
