"""The one message of the DHT: a question to another peer, or its answer, decoded within bounds."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from equipoise.dht import sanitize
from equipoise.dht.records import Addresses, Kept
from equipoise.dht.sanitize import Malformed
from equipoise.dht.state import PROTOCOL_VERSION

MAX_KEYS = 16
"""Most keys of one look-up. A run has 4 keys, and a look-up asks for one run's."""
MAX_RECORDS = 512
"""Most records in one message; about 140 usual records fill `PAGE_BYTES`."""
MAX_PEER_CHARACTERS = 64
"""Longest PeerID; an Ed25519 PeerID has 52 characters."""
MAX_INSTANCE_BYTES = 16
MAX_NEAREST = 20
"""Most peers named as nearest to a key: Kademlia's k."""
MAX_MESSAGE_BYTES = 128 * 1024
"""Longest message; p2pd's own limit is 256 KB. A page of records holds at most `PAGE_BYTES`."""
PAGE_BYTES = 64 * 1024
"""Most bytes of all records in one answer: about 140 usual records."""

_Versioned = TypeVar("_Versioned", bound="Versioned")


class VersionError(Malformed):
    """A message has another protocol version; the text says which side is older, and what to upgrade."""


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Every message begins with the `PROTOCOL_VERSION` of its author."""

    version: int = PROTOCOL_VERSION


class Neighbour(msgspec.Struct, frozen=True):
    """A peer that may be nearer to a key; its addresses are another peer's word."""

    peer: Annotated[str, msgspec.Meta(max_length=MAX_PEER_CHARACTERS)]
    addresses: Addresses = ()


Key = Annotated[bytes, msgspec.Meta(min_length=20, max_length=20)]
Neighbours = Annotated[tuple[Neighbour, ...], msgspec.Meta(max_length=MAX_NEAREST)]


class Message(Versioned, frozen=True, kw_only=True):
    """A question to another peer, or its answer: each tells of its author first. A question for nothing is a ping.

    Attributes:
        serves: Whether the author answers look-ups (False in client mode).
        addresses: Addresses where the author listens.
        relays: Whether it relays for peers that cannot be dialled.
        instance: Random bytes drawn at the author's start; see `Instances`.
        doubled: Whether the author has heard two daemons that speak as the recipient.
        keys: In a question: ask for the records under these keys, and for peers nearer to them.
        records: In a question: ask to keep these records; the invalid ones are dropped. In an answer: records under
            any of the question's keys.
        nearest: In an answer: for each key of the question, the nearest peers known, in its order.
    """

    serves: bool
    addresses: Addresses = ()
    relays: bool = False
    instance: Annotated[bytes, msgspec.Meta(max_length=MAX_INSTANCE_BYTES)] = b""
    doubled: bool = False
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()
    records: Annotated[tuple[Kept, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()
    nearest: Annotated[tuple[Neighbours, ...], msgspec.Meta(max_length=MAX_KEYS)] = ()


class _Version(msgspec.Struct, frozen=True):
    version: int


_versions = msgspec.msgpack.Decoder(_Version)
messages = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, decoder: msgspec.msgpack.Decoder[_Versioned]) -> _Versioned:
    """Decode a stranger's message; raises Malformed if it is malformed, too large, or of another version."""
    version = sanitize.decode(_versions, data, MAX_MESSAGE_BYTES).version
    if version != PROTOCOL_VERSION:
        newer = version > PROTOCOL_VERSION
        age, hint = ("newer", "upgrade this machine's") if newer else ("older", "have it upgraded")
        both = f"protocol version {version}, this machine version {PROTOCOL_VERSION}"
        raise VersionError(f"its equipoise is {age} ({both}): {hint} with pip install --upgrade equipoise")
    message = sanitize.decode(decoder, data, MAX_MESSAGE_BYTES)
    if isinstance(message, Message) and sum(len(one.data) for one in message.records) > PAGE_BYTES:
        raise Malformed(f"malformed message: expected at most {PAGE_BYTES} bytes of records")
    return message
