"""What relays and their users say: protobufs of libp2p's circuit relay, version 2 (libp2p specs, relay/circuit-v2.md).

Written by hand because nine fields do not need generated code, and so that what strangers send is bounded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
"""Spoken by whoever wants to be relayed, to the relay."""
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
"""Spoken by the relay, to whom a circuit is to lead to."""

MAX_FIELDS = 32
"""A reservation has some addresses; a message of 4 KB of empty fields is no message."""


class Kind(IntEnum):
    """Of a message to a relay."""

    RESERVE = 0
    CONNECT = 1
    STATUS = 2


class StopKind(IntEnum):
    """Of a message from a relay."""

    CONNECT = 0
    STATUS = 1


class Status(IntEnum):
    """What came of a request."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class Malformed(ValueError):
    """Bytes that are no message."""


@dataclass(frozen=True)
class Limit:
    """What a relay allows one circuit.

    Attributes:
        seconds: How long it may last; 0: as long as it likes.
        bytes: What may pass in each direction; 0: anything.
    """

    seconds: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Message:
    """A message of either protocol.

    Attributes:
        kind: `Kind` or `StopKind`.
        peer: PeerID in binary that a circuit is to lead to, or comes from.
        expires: When a reservation ends, seconds since 1970 by the relay's clock; 0: it is none.
        limit: What a circuit is allowed.
        status: What came of a request; 0: nothing yet.
    """

    kind: int
    peer: bytes = b""
    expires: int = 0
    limit: Limit = Limit()
    status: int = 0


def encode_hop(message: Message) -> bytes:
    """Return a message of `HOP_PROTOCOL`."""
    return _message(
        (1, message.kind),
        (2, _message((1, message.peer)) if message.peer else None),
        (3, _message((1, message.expires)) if message.expires else None),
        (4, _limit(message.limit)),
        (5, message.status or None),
    )


def decode_hop(data: bytes) -> Message:
    """Read a message of `HOP_PROTOCOL`.

    Raises:
        Malformed: It is none.
    """
    fields = _fields(data)
    return Message(
        kind=_number(fields, 1),
        peer=_bytes(_nested(fields, 2), 1),
        expires=_number(_nested(fields, 3), 1),
        limit=_read_limit(fields, 4),
        status=_number(fields, 5),
    )


def encode_stop(message: Message) -> bytes:
    """Return a message of `STOP_PROTOCOL`."""
    return _message(
        (1, message.kind),
        (2, _message((1, message.peer)) if message.peer else None),
        (3, _limit(message.limit)),
        (4, message.status or None),
    )


def decode_stop(data: bytes) -> Message:
    """Read a message of `STOP_PROTOCOL`.

    Raises:
        Malformed: It is none.
    """
    fields = _fields(data)
    return Message(
        kind=_number(fields, 1),
        peer=_bytes(_nested(fields, 2), 1),
        limit=_read_limit(fields, 3),
        status=_number(fields, 4),
    )


def _limit(limit: Limit) -> bytes | None:
    if limit == Limit():
        return None
    return _message((1, limit.seconds or None), (2, limit.bytes or None))


def _read_limit(fields: dict[int, int | bytes], number: int) -> Limit:
    nested = _nested(fields, number)
    return Limit(_number(nested, 1), _number(nested, 2))


def _message(*fields: tuple[int, int | bytes | None]) -> bytes:
    return b"".join(_field(number, value) for number, value in fields if value is not None)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _fields(data: bytes) -> dict[int, int | bytes]:
    """The last value of each field; protobuf lets later ones win."""
    found: dict[int, int | bytes] = {}
    place = 0
    for _ in range(MAX_FIELDS):
        if place == len(data):
            return found
        tag, place = _read_varint(data, place)
        value: int | bytes
        if tag & 7 == 0:
            value, place = _read_varint(data, place)
        elif tag & 7 == 2:
            size, place = _read_varint(data, place)
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise Malformed("a field ends after its message")
        else:
            raise Malformed(f"expected fields of wire type 0 or 2, got {tag & 7}")
        found[tag >> 3] = value
    raise Malformed(f"expected at most {MAX_FIELDS} fields")


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if place >= len(data):
            raise Malformed("a number ends after its message")
        value |= (data[place] & 0x7F) << shift
        place += 1
        if not data[place - 1] & 0x80:
            return value, place
    raise Malformed("expected a number below 2**64")


def _number(fields: dict[int, int | bytes], number: int) -> int:
    value = fields.get(number, 0)
    if not isinstance(value, int):
        raise Malformed(f"expected a number in field {number}")
    return value


def _bytes(fields: dict[int, int | bytes], number: int) -> bytes:
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise Malformed(f"expected bytes in field {number}")
    return value


def _nested(fields: dict[int, int | bytes], number: int) -> dict[int, int | bytes]:
    return _fields(_bytes(fields, number))


def describe(status: int) -> str:
    """Return a status as words."""
    known: Iterable[int] = [one.value for one in Status]
    return Status(status).name.lower().replace("_", " ") if status in known else f"status {status}"
