"""What relays and their users say: protobufs of libp2p's circuit relay, version 2 (libp2p specs, relay/circuit-v2.md).

Nine fields need no generated code: their descriptors are made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError

from equipoise.dht.sanitize import Malformed

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
"""Spoken by whoever wants to be relayed, to the relay."""
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
"""Spoken by the relay, to whom a circuit is to lead to."""


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


_FIELDS: dict[str, dict[str, str]] = {
    "Peer": {"id": "bytes"},
    "Reservation": {"expires": "uint64"},
    "Limit": {"seconds": "uint64", "bytes": "uint64"},
    "Hop": {
        "kind": "uint64",
        "peer": "Peer",
        "reservation": "Reservation",
        "limit": "Limit",
        "status": "uint64",
    },
    "Stop": {"kind": "uint64", "peer": "Peer", "limit": "Limit", "status": "uint64"},
}
"""Fields of each message, in the order of their numbers."""


def _protobufs() -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    scalars = {"bytes": types.TYPE_BYTES, "uint64": types.TYPE_UINT64}
    file = descriptor_pb2.FileDescriptorProto(name="circuit.proto", package="circuit")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields.items(), start=1):
            added = message.field.add(name=field, number=number, label=types.LABEL_OPTIONAL)
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type, added.type_name = types.TYPE_MESSAGE, f".circuit.{kind}"
    return message_factory.GetMessages([file])


_CLASSES = _protobufs()
_BY_PROTOCOL = {HOP_PROTOCOL: _CLASSES["circuit.Hop"], STOP_PROTOCOL: _CLASSES["circuit.Stop"]}


def encode(message: Message, protocol: str) -> bytes:
    """Return a message of `HOP_PROTOCOL` or `STOP_PROTOCOL`; the latter knows no reservations."""
    made = _BY_PROTOCOL[protocol](kind=message.kind)
    if message.peer:
        made.peer.id = message.peer
    if message.expires and protocol == HOP_PROTOCOL:
        made.reservation.expires = message.expires
    if message.limit != Limit():
        made.limit.seconds, made.limit.bytes = message.limit.seconds, message.limit.bytes
    if message.status:
        made.status = message.status
    data: bytes = made.SerializeToString()
    return data


def decode(data: bytes, protocol: str) -> Message:
    """Read a message of `HOP_PROTOCOL` or `STOP_PROTOCOL`; raises Malformed if it is none."""
    try:
        found = _BY_PROTOCOL[protocol].FromString(data)
    except DecodeError as error:
        raise Malformed(f"malformed message: {error}") from None
    limit = Limit(found.limit.seconds, found.limit.bytes)
    expires = found.reservation.expires if protocol == HOP_PROTOCOL else 0
    return Message(found.kind, found.peer.id, expires, limit, found.status)


def describe(status: int) -> str:
    """Return a status as words."""
    names = {int(one): one.name.lower().replace("_", " ") for one in Status}
    return names.get(status, f"status {status}")
