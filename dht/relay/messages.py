"""What relays and their users say: protobufs of libp2p's circuit relay, version 2 (libp2p specs, relay/circuit-v2.md).

Nine fields need no generated code: their descriptors are made here. A field that was not set reads as 0, or as empty.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError

from equipoise.dht.sanitize import Malformed
from equipoise.dht.streams import Stream, receive_message, send_message

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


_FIELDS = {
    "Peer": "id:bytes",
    "Reservation": "expires",
    "Limit": "seconds bytes",
    "Hop": "kind peer:Peer reservation:Reservation limit:Limit status",
    "Stop": "kind peer:Peer limit:Limit status",
}
"""Fields of each message, in the order of their numbers; those without a type are uint64. `expires` is in seconds since
1970, by the relay's clock. A limit bounds how long one circuit lasts and what passes in each direction, 0 or no limit
for no bound. `id` is a PeerID in binary that a circuit is to lead to, or comes from."""


def _protobufs() -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    scalars = {"bytes": types.TYPE_BYTES, "": types.TYPE_UINT64}
    file = descriptor_pb2.FileDescriptorProto(name="circuit.proto", package="circuit")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields.split(), start=1):
            field, _, kind = text.partition(":")
            added = message.field.add(name=field, number=number, label=types.LABEL_OPTIONAL)
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type, added.type_name = types.TYPE_MESSAGE, f".circuit.{kind}"
    return message_factory.GetMessages([file])


_CLASSES = _protobufs()
Hop, Stop = _CLASSES["circuit.Hop"], _CLASSES["circuit.Stop"]
"""The messages of the two protocols."""


async def send(stream: Stream, message: Any) -> None:
    """Send a `Hop` or a `Stop`; raises StreamClosed as `Stream.send` does."""
    await send_message(stream, message.SerializeToString())


async def receive(stream: Stream, kind: Any) -> Any:
    """Receive a `Hop` or a `Stop`; raises Malformed if it is none, StreamClosed if it ends or is too long."""
    return decode(await receive_message(stream), kind)


def decode(data: bytes, kind: Any) -> Any:
    """Read a `Hop` or a `Stop`; raises Malformed if it is none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Malformed(f"malformed message: {error}") from None


def describe(status: int) -> str:
    """Return a status as words."""
    names = {int(one): one.name.lower().replace("_", " ") for one in Status}
    return names.get(status, f"status {status}")
