"""The messages of the DHT: ping, find and store, as msgspec structs with a version."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from equipoise.dht import sanitize
from equipoise.dht.records import Addresses, Kept, Key
from equipoise.dht.sanitize import Malformed
from equipoise.dht.state import PROTOCOL_VERSION

MAX_KEYS = 16
"""A run has 4 keys; a look-up asks for one run's."""
MAX_RECORDS = 512
"""In one message; `PAGE_BYTES` is reached at about 140 usual ones."""
MAX_PEER_CHARACTERS = 64
"""An Ed25519 PeerID has 52."""
MAX_INSTANCE_BYTES = 16
MAX_NEAREST = 20
"""Kademlia's k."""
MAX_MESSAGE_BYTES = 128 * 1024
"""p2pd's own limit is 256 KB. A page of records holds at most `PAGE_BYTES`."""
PAGE_BYTES = 64 * 1024
"""All records that one answer carries, about 140 usual ones."""

PING, FIND, STORE = "equipoise.dht.ping", "equipoise.dht.find", "equipoise.dht.store"

_Message = TypeVar("_Message", bound="Versioned")


class VersionError(Malformed):
    """A message is of another protocol version; says which side is older, and what to upgrade."""


class Versioned(msgspec.Struct, frozen=True, kw_only=True):
    """Every message begins with the `PROTOCOL_VERSION` of its author."""

    version: int = PROTOCOL_VERSION


class Hello(Versioned, frozen=True, kw_only=True):
    """A ping, and part of every other message.

    Attributes:
        serves: Whether the author answers look-ups (False in client mode).
        time: The author's clock, seconds since 1970.
        addresses: Where it listens.
        relays: Whether it relays for peers that cannot be dialled.
        instance: Drawn at the author's start; see `protocol.Instances`.
        doubled: Whether the author has heard two daemons that speak as the recipient.
    """

    serves: bool
    time: float
    addresses: Addresses = ()
    relays: bool = False
    instance: Annotated[bytes, msgspec.Meta(max_length=MAX_INSTANCE_BYTES)] = b""
    doubled: bool = False

    @property
    def hello(self) -> Hello:
        """Itself: what every message of the DHT has."""
        return self


class Neighbour(msgspec.Struct, frozen=True):
    """A peer that may be nearer to a key; its addresses are hearsay."""

    peer: Annotated[str, msgspec.Meta(max_length=MAX_PEER_CHARACTERS)]
    addresses: Addresses = ()


Records = Annotated[tuple[Kept, ...], msgspec.Meta(max_length=MAX_RECORDS)]
Neighbours = Annotated[tuple[Neighbour, ...], msgspec.Meta(max_length=MAX_NEAREST)]


class Find(Versioned, frozen=True, kw_only=True):
    """Ask for the records under some keys, and for peers nearer to them."""

    hello: Hello
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]


class Found(Versioned, frozen=True, kw_only=True):
    """Answer to `Find`: records under any of the keys, and for each key the nearest peers known, in its order."""

    hello: Hello
    records: Records
    nearest: Annotated[tuple[Neighbours, ...], msgspec.Meta(max_length=MAX_KEYS)]


class Store(Versioned, frozen=True, kw_only=True):
    """Ask to keep some records; what is not valid is dropped."""

    hello: Hello
    records: Records


class Stored(Versioned, frozen=True, kw_only=True):
    """Answer to `Store`."""

    hello: Hello
    accepted: int


class _Version(msgspec.Struct, frozen=True):
    version: int


_versions = msgspec.msgpack.Decoder(_Version)
encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, kind: type[_Message]) -> _Message:
    """Decode a stranger's message; raises Malformed if it is malformed, too large, or of another version."""
    version = sanitize.decode(_versions, data, MAX_MESSAGE_BYTES).version
    if version != PROTOCOL_VERSION:
        newer = version > PROTOCOL_VERSION
        age, hint = ("newer", "upgrade this machine's") if newer else ("older", "have it upgraded")
        both = f"protocol version {version}, this machine version {PROTOCOL_VERSION}"
        raise VersionError(f"its equipoise is {age} ({both}): {hint} with pip install --upgrade equipoise")
    message = sanitize.decode(msgspec.msgpack.Decoder(kind), data, MAX_MESSAGE_BYTES)
    if isinstance(message, Store | Found) and sum(len(one.data) for one in message.records) > PAGE_BYTES:
        raise Malformed(f"malformed message: expected at most {PAGE_BYTES} bytes of records")
    return message
